"""A job for each scheduler: the file that describes it, and how it is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plait.commands.programs.program_file import program_bytes
from plait.commands.submitting.kubernetes import send_to_kubernetes
from plait.commands.submitting.options import parse_port
from plait.commands.submitting.over_ssh.files import environment_files, input_files
from plait.commands.submitting.over_ssh.sending import leader_address, send_by_ssh
from plait.commands.submitting.slurm import send_to_slurm
from plait.deploy.cluster_job import USUAL_PORT, ClusterJob
from plait.deploy.manifests import JobKind, manifests_text
from plait.deploy.pod import INPUT_FOLDER, KubernetesRequest
from plait.deploy.slurm_script import SlurmRequest, sbatch_script
from plait.deploy.ssh_commands import SshRequest, ssh_script
from plait.errors import PlaitError
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.working_folder import WorkingFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A job as text, and how it is sent."""

    file: str
    """The name of the file that the text is usually in."""
    text: str
    send: Callable[[], None]
    run: str
    """The name that a person knows the job by."""


def slurm_job(job: ClusterJob, options: Mapping[str, str], screen: Screen, working: WorkingFolder) -> Outgoing:
    """The sbatch script of a job."""
    asked = {key: value for key, value in options.items() if key not in ("partition", "grace")}
    inside = "python3" if "image" in options else sys.executable
    script = sbatch_script(job, SlurmRequest(**{"python": inside, **asked}))
    return Outgoing(
        file=f"{job.name}.sbatch",
        text=script,
        send=lambda: send_to_slurm(job, script, screen, working),
        run=job.run,
    )


def kubernetes_job(
    job: ClusterJob, options: Mapping[str, str], kind: JobKind, screen: Screen, working: WorkingFolder
) -> Outgoing:
    """The manifests of a job; the recipe or the program travels in them."""
    file = Path(job.target[0])
    text = program_bytes(file).decode("utf-8", "replace")
    if len(text.encode()) > _CONFIG_MAP_AT_MOST:
        raise PlaitError(f"{file} is too large to travel in a ConfigMap; put it into the image or the volume")
    asked = {key: value for key, value in options.items() if key != "grace"}
    if asked.get("network", "host") != "host":
        raise PlaitError(f"--with network={asked['network']} is no network of pods; write host, or leave it out")
    if "rdma" in asked and "network" in asked:
        raise PlaitError("--with rdma gives each pod a device of its own, and needs no host network; leave network out")
    request = KubernetesRequest(**asked, files={file.name: text})  # type: ignore[arg-type]
    inside = replace(job, target=(f"{INPUT_FOLDER}/{file.name}", *job.target[1:]))
    sent = manifests_text(inside, request, kind)
    return Outgoing(
        file=f"{job.name}.yaml",
        text=sent,
        send=lambda: send_to_kubernetes(inside, request, kind, sent, screen, working),
        run=job.run,
    )


_CONFIG_MAP_AT_MOST = 200_000
"""Bytes. Kubernetes takes a mebibyte, but `kubectl apply` notes all of it in an annotation, which holds 262,144."""


def _shown(path: Path) -> str:
    """A path as it reads from this folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def ssh_job(
    job: ClusterJob,
    options: Mapping[str, str],
    machines: Sequence[str],
    gpus: int | None,
    config: RunConfig | None,
    screen: Screen,
    working: WorkingFolder,
) -> Outgoing:
    """What is typed on each machine; the first one leads."""
    inputs = input_files(job.target, config)
    environment = environment_files(options.get("wheel")) if "python" not in options else None
    request = SshRequest(
        machines=tuple(machines),
        leader=options.get("address") or leader_address(machines[0]),
        folder=options.get("folder", "plait-runs"),
        python=options.get("python", ""),
        environment=environment.name if environment else "",
        port=parse_port(options["port"]) if "port" in options else USUAL_PORT,
        gpus=gpus,
    )
    there = replace(job, target=(Path(job.target[0]).name, *job.target[1:], *inputs.settings))
    wheel, lock = (_shown(environment.wheel), environment.lock) if environment else ("", "")
    script = ssh_script(there, request, wheel, lock, tuple(_shown(path) for path in inputs.paths))
    return Outgoing(
        file=f"{job.name}.ssh.sh",
        text=script,
        send=lambda: send_by_ssh(there, request, environment, inputs.paths, screen, working),
        run=job.run,
    )
