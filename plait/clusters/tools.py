"""The programs of schedulers and ssh: run, waited for, and their error messages turned into one sentence."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from plait.errors import PlaitError

ANSWER_AT_LATEST_S = 120.0
DESCRIBE = "describe the machines instead, for example --cluster 4x(8xH100)"
_COMPLAINT_LENGTH = 300
_SLURM_HERE = f"log in where Slurm is, or {DESCRIBE} and add --dry-run"
_INSTALL = {
    "kubectl": f"install it, or {DESCRIBE} and add --dry-run",
    "ssh": "install openssh-client",
    "sky": "install it, pip install skypilot, or add --dry-run",
    "dstack": "install it, pip install dstack, or add --dry-run",
}
_FIXES = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another than before: make sure that the machine was "
     "installed again, then type ssh-keygen -R NAME"),
    ("Host key verification failed", "its host key is not known here: log in once by ssh, and compare the key"),
    ("ensurepip is not", "its Python has no module venv: install python3-venv there"),
    ("No matching distribution found", "it reaches no package index that has the versions which are installed here: "
     "install plait there yourself, and name its Python by --with python=PATH"),
    ("Permission denied", "it does not let you in without a password: put your public key there by ssh-copy-id"),
    ("Could not resolve hostname", "no such name is known here: check it, or write an address"),
    ("Connection timed out", "it does not answer: check that it is on, and that port 22 is open"),
    ("Connection refused", "no sshd listens there: start it"),
    ("No route to host", "no network leads there: check the cable or the VPN"),
    ("invalid partition", "there is no such partition: sinfo lists them"),
    ("Invalid account or account/partition", "sacctmgr show associations lists the accounts that you may use"),
    ("Invalid qos", "sacctmgr show qos lists the qualities of service"),
    ("Requested node configuration is not available", "no nodes have that much: see sinfo, and ask for less"),
    ("Invalid feature specification", "no node has such a feature: sinfo -o %N,%f lists them"),
    ("Node count specification invalid", "there are fewer nodes in that partition: sinfo shows how many, ask for less"),
    ("More processors requested than permitted", "ask for fewer nodes or cores: sinfo shows what there is"),
    ("Job violates accounting/QOS policy", "it is more than your account may have: ask for fewer nodes or less time"),
    ("Requested time limit is invalid", "the partition allows less time: sinfo -o %P,%l shows how much"),
    ("Could not establish a configuration source", "no slurm.conf is here: log in where Slurm is, set SLURM_CONF, or "
     "describe the machines, for example --cluster 4x(8xH100)"),
    ("Unable to contact slurm controller", "slurmctld does not answer: scontrol ping shows whether it runs"),
    ("no matches for kind", "this cluster has no such kind of object: have the operator installed, or use --kind job"),
    ("doesn't have a resource type", "this cluster has no such kind of object: have the operator installed (JobSet, "
     "Kubeflow Trainer), or use --kind job"),
    ("timed out waiting for the condition", "the cluster had no room for it, or cannot pull its image: see kubectl "
     "describe pod"),
    ("exceeded quota", "the namespace's quota is too small: kubectl describe quota shows it, ask for less"),
    ("AlreadyExists", "it is there already: end it by plait stop NAME, or choose another run.name"),
    ("connection to the server", "the cluster does not answer: kubectl cluster-info shows which one is meant"),
    ("namespaces \"", "there is no such namespace: kubectl get namespaces lists them"),
    ("forbidden", "you may not do that in this namespace: kubectl auth can-i shows what you may"),
    ("Read-only file system", "that folder cannot be written: name another by --with folder=FOLDER"),
    ("No space left on device", "its disk is full: free some space"),
)  # fmt: skip
"""Error messages of schedulers and ssh, and how to fix each."""


def tool_answer(
    command: Sequence[str],
    *,
    about: str,
    stdin: str = "",
    within_s: float = ANSWER_AT_LATEST_S,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The standard output of a program, which is given these variables of the environment beside plait's own; raises
    PlaitError with what it is `about`, the program's own message and the fix."""
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=within_s,
            errors="replace",
            env={**os.environ, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PlaitError(f"{about}: {command[0]} gave no answer within {within_s:.0f} s; try again later") from None
    except FileNotFoundError:
        fix = _INSTALL.get(command[0], _SLURM_HERE)
        raise PlaitError(f"{command[0]} is not on this machine, so nothing can be asked or sent; {fix}") from None
    except OSError as error:
        raise PlaitError(f"{about}: {command[0]} cannot be started ({error.strerror}); install it") from None
    if done.returncode:
        raise PlaitError(f"{about}: {complaint_text(done.stderr or done.stdout, command[0], done.returncode)}")
    return done.stdout


def complaint_text(said: str, program: str, code: int) -> str:
    """A program's error message in one sentence, with the fix where one is known."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" @\t")]
    fix = next((fix for mark, fix in _FIXES if mark in said), None)
    marked = next((line for line in lines if any(mark in line for mark, _ in _FIXES)), None)
    shown = (marked or (lines[-1] if lines else f"exit code {code}"))[:_COMPLAINT_LENGTH].strip("@ ")
    return f"{program} says: {shown.rstrip('.')}; {fix or 'correct that, and submit again'}"


def archive_command(folder: str, inside: Path) -> list[str]:
    """A program that prints `inside` of a folder as a tar archive. Runs go on meanwhile: tar ends with 1 where a file
    grew or was removed as it was read, and what it has read is whole nevertheless."""
    return ["sh", "-c", 'tar -c -C "$0" "$1" || [ $? = 1 ]', folder, str(inside)]


def unpack_answer(command: Sequence[str], target: Path, refusal: str) -> None:
    """Unpack the tar archive that a program prints into `target`; raises PlaitError that begins with `refusal`."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                archive.extractall(target, filter="data")
        except tarfile.ReadError:
            pass  # an empty stream: what the other end says of it follows
        complaint = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise PlaitError(f"{refusal}: {complaint_text(complaint, 'tar', process.returncode)}")
