"""Plain ssh: shell commands for each machine, the files sent to them, and a job's state, output and files.

Each machine is checked, sent what it lacks, started and followed. No command holds the secret.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import socket
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import MappingProxyType

from plait.clusters.job import (
    USUAL_PORT,
    ClusterJob,
    ClusterSystem,
    Outgoing,
    Submitted,
    keep_record,
    node_arguments,
    place_variables,
)
from plait.clusters.machines import SERVER, NodeKind, cluster_of_node_kinds
from plait.clusters.request import Option, Scheduler, SubmitRequest
from plait.clusters.tools import archive_command, complaint_text, tool_answer, unpack_answer
from plait.data.file_faults import shown_path
from plait.data.index import file_sha256
from plait.errors import PlaitError, RunFailed
from plait.hosts.handshake import new_secret
from plait.machines.catalog import find_device_by_driver_name
from plait.machines.cluster import Cluster
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted
from plait.working_folder import WorkingFolder

_OPTIONS: Mapping[str, Option] = {
    "python": Option("Python with plait on the machines; if left out an environment is made from the wheel"),
    "wheel": Option("the wheel to install; the newest in dist/ if left out", ".*"),
    "folder": Option("the folder to work in; plait-runs in the home folder if left out"),
    "port": Option("where node 0 listens; 24717 if left out"),
    "address": Option("the address at which the others reach the first machine; the one of its name here, if left out"),
}
USUAL_FOLDER = "plait-runs"
HOME_ENVIRONMENTS = ".plait/environments"
CHECK_MARK = "plait-check"
INSTALL_AT_LATEST_S = 3600.0
OLDEST_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(;.*)?")
SSH_WORDS = (
    "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""A machine that does not answer for a minute counts as lost; without this a dead connection would be waited for."""
_TELL_VERSION = f'import sys; print("{CHECK_MARK}", "%d.%d" % sys.version_info[:2])'


# Shell commands for each machine.


@dataclass(frozen=True, slots=True, kw_only=True)
class SshPlace:
    """The folder and the Python that plait uses on the machines."""

    machines: tuple[str, ...]
    """Names that ssh takes; the first is node 0."""
    leader: str
    """The address at which the others reach node 0."""
    folder: str = USUAL_FOLDER
    """Relative to the home folder, or absolute."""
    python: str = ""
    """Empty: the Python of an environment made from the wheel."""
    environment: str = ""
    """Name of that environment: a hash of the wheel and of the versions it is installed with."""
    port: int = USUAL_PORT
    gpus: int | None = None
    """Only the first `gpus` of each machine; None: all."""

    @property
    def environment_folder(self) -> str:
        """The folder of the environment, quoted for the remote shell."""
        return f'"$HOME"/{HOME_ENVIRONMENTS}/{self.environment}'


def check_command(place: SshPlace) -> str:
    """Says in one line what a machine has: the folder can be written, Python's version, cores, GPUs."""
    ready = "true" if place.python else f"[ -e {place.environment_folder}/ready ]"
    python = place.python or "python3"
    return "; ".join(
        [
            f"mkdir -p {place.folder} && [ -w {place.folder} ] || {{ echo 'Read-only file system' >&2; exit 1; }}",
            f"{ready} && has=environment || has=nothing",
            f"{python} -c '{_TELL_VERSION}' || echo {CHECK_MARK} none",
            "echo $has; nproc; nvidia-smi -L 2>/dev/null || true",
        ]
    )


def install_command(place: SshPlace, wheel: str) -> str:
    """Makes the environment from the wheel and the lock file, unless it exists."""
    own = place.environment_folder
    return (
        f"set -e; [ -e {own}/ready ] && exit; python3 -m venv {own}; "
        f"{own}/bin/python -m pip install --quiet --requirement {place.folder}/lock.txt {place.folder}/{wheel}; "
        f"touch {own}/ready"
    )


def start_command(job: ClusterJob, place: SshPlace, rank: int) -> str:
    """Starts a machine's agent, which stays when the connection ends; reads the secret from standard input."""
    python = place.python or f"{place.environment_folder}/bin/python"
    agent = f"{python} {shlex.join(node_arguments(job, job.target))}"
    stem = f"{job.name}.node-{rank}"
    placed = place_variables(rank, place.leader, place.port)
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in placed.items())
    if place.gpus is not None:
        variables += f" CUDA_VISIBLE_DEVICES={','.join(map(str, range(place.gpus)))}"
    secret = "" if job.nodes == 1 else "IFS= read -r PLAIT_SECRET; export PLAIT_SECRET; "
    inner = f"trap : TERM INT USR1; {agent}; echo $? >{stem}.code"
    return (
        f"set -e; umask 077; cd {place.folder}; {secret}export {variables}; rm -f {stem}.code; "
        f"setsid nohup sh -c {shlex.quote(inner)} >{stem}.log 2>&1 </dev/null & echo $! >{stem}.pid; "
        f"cut -d' ' -f22 /proc/$!/stat >{stem}.since 2>/dev/null || true"
    )


def follow_command(name: str, folder: str) -> str:
    """Prints node 0's log from its beginning, until node 0 ends."""
    stem = f"{name}.node-0"
    return f'cd {folder} && tail -n +1 --pid="$(cat {stem}.pid)" -F {stem}.log 2>/dev/null'


def running_command(name: str, folder: str, rank: int) -> str:
    """Says whether a machine's agent runs, or with which exit code it ended."""
    stem = f"{name}.node-{rank}"
    ended = f'[ -e {stem}.code ] && echo "ended with exit code $(cat {stem}.code)" || echo "not running"'
    return f"cd {folder} && {_is_running(stem)} && echo running || {{ {ended}; }}"


def _is_running(stem: str) -> str:
    """True in the shell while the process lives that was started. Since a reboot another one may have its number, so
    the time at which it began is compared (field 22 of /proc/PID/stat, proc(5)); a zombie has ended."""
    process = f'/proc/"$(cat {stem}.pid)"'
    return (
        f'[ -s {stem}.since ] && [ "$(cut -d\' \' -f22 {process}/stat 2>/dev/null)" = "$(cat {stem}.since)" ] '
        f"&& ! grep -q '^State:.Z' {process}/status"
    )


def end_agent_command(name: str, folder: str, rank: int) -> str:
    """Tells a machine's agent to save and end."""
    stem = f"{name}.node-{rank}"
    return f'cd {folder} && {_is_running(stem)} && kill -s TERM -- "-$(cat {stem}.pid)" 2>/dev/null || true'


def ssh_script(job: ClusterJob, place: SshPlace, wheel: str, lock: str, inputs: tuple[str, ...]) -> str:
    """All that would be done, as a shell script; the secret goes from a variable of the shell into standard input.
    `wheel` and `inputs` are files here, `lock` is the text of the lock file."""
    lines = ["#!/bin/bash", "# Made by plait submit, which does the same and says what to do where a step fails."]
    lines += [f"# {sentence}" for sentence in job.why]
    lines += ["set -eu", ""]
    for machine in place.machines:
        lines.append(f"ssh {shlex.quote(machine)} {shlex.quote(check_command(place))}")
    lines += [] if place.python else _installation(place, wheel, lock)
    lines += ["", "# what is to run; node 0 sends the others what they need"]
    lines.append(f"scp {shlex.join(inputs)} {shlex.quote(place.machines[0])}:{place.folder}/")
    secret = ["", "secret=$(tr -dc 0-9A-HJKMNP-TV-Z </dev/urandom | head -c 28)  # never an argument, in no file"]
    lines += secret if job.nodes > 1 else [""]
    hand = 'printf "%s\\n" "$secret" | ' if job.nodes > 1 else ""
    for rank, machine in enumerate(place.machines):
        lines.append(f"{hand}ssh {shlex.quote(machine)} {shlex.quote(start_command(job, place, rank))}")
    lines += ["", f"ssh {shlex.quote(place.machines[0])} {shlex.quote(follow_command(job.name, place.folder))}"]
    return "\n".join(lines) + "\n"


def _installation(place: SshPlace, wheel: str, lock: str) -> list[str]:
    """Commands that create the environment on each machine that lacks it."""
    lines = ["", "# the environment, once: plait's wheel, and the versions that are installed here"]
    lines += ["lock=$(cat <<'END'", *lock.splitlines(), "END", ")"]
    for machine in map(shlex.quote, place.machines):
        lines.append(f"scp {shlex.quote(wheel)} {machine}:{place.folder}/")
        lines.append(f'printf "%s\\n" "$lock" | ssh {machine} {shlex.quote(f"cat >{place.folder}/lock.txt")}')
        lines.append(f"ssh {machine} {shlex.quote(install_command(place, Path(wheel).name))}")
    return lines


# Files for the machines.


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFiles:
    """A wheel of plait, and the lock file: every package with its version."""

    wheel: Path
    lock: str

    @property
    def name(self) -> str:
        """A hash of both: machines that have an environment of that name need nothing."""
        return hashlib.sha256(self.wheel.read_bytes() + self.lock.encode()).hexdigest()[:16]


def environment_files(named: str | None) -> EnvironmentFiles:
    """The wheel that is named, or the newest in dist/, with a lock file; raises PlaitError where there is none."""
    wheel = find_wheel(named, "a Python that has plait by --with python=PATH")
    return EnvironmentFiles(wheel=wheel, lock="".join(f"{line}\n" for line in lock_lines("plait")))


def find_wheel(named: str | None, otherwise: str) -> Path:
    """The wheel that is named, or the newest in dist/; raises PlaitError where there is none, with what to name
    otherwise."""
    wheels = [Path(named)] if named else sorted(Path("dist").glob("plait-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels or not wheels[-1].is_file():
        where = named or "dist/"
        raise PlaitError(
            f"there is no wheel of plait to send ({where}); type make wheel where plait's source is, and name the file "
            f"by --with wheel=FILE, or name {otherwise}"
        )
    return wheels[-1]


def lock_lines(package: str) -> list[str]:
    """Every package that this one needs here, with its version."""
    found, left = set[str](), [package]
    while left:
        name = left.pop()
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # for another platform or Python
            continue
        found.add(name)
        matches = [
            match for text in needs if (match := _REQUIREMENT.match(text)) and "extra ==" not in (match[2] or "")
        ]
        left += {match[1].lower().replace("_", "-") for match in matches} - found
    lines = [f"{name}=={version(name)}" for name in sorted(found - {package})]
    if any(line.startswith("torch==") and "+cpu" in line for line in lines):
        lines.insert(0, "--extra-index-url https://download.pytorch.org/whl/cpu")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """The recipe or the program with the files that it reads, and the settings that name these files on the machines,
    where all are in one folder."""

    paths: tuple[Path, ...]
    settings: tuple[str, ...] = ()


def input_files(
    target: Sequence[str], config: RunConfig | None, *, on: Scheduler = "ssh", folder: str = ""
) -> InputFiles:
    """The files for node 0, which will be in `folder` there; raises PlaitError for a folder, and for a text that is a
    name on the hub."""
    place = "the first machine" if on == "ssh" else "its volume"

    def there(path: Path) -> str:
        return f"{folder}/{path.name}" if folder else path.name

    if config is None:
        return InputFiles(paths=(Path(target[0]),))
    named = config.data.files
    texts = [named] if isinstance(named, str) else list(named)
    paths = [Path(text) for text in texts if isinstance(text, str)]
    if len(paths) < len(texts):
        raise PlaitError(f"--on {on} copies files by their names alone; put this recipe's texts on {place} yourself")
    for path in paths:
        if not path.is_file():
            raise PlaitError(f"{path} is not a single file, and --on {on} copies single files only; copy it to {place}")
    settings = [f"data.files={json.dumps([there(path) for path in paths])}"]
    for key, path in _other_inputs(target, config, on):
        paths.append(path)
        settings.append(f"{key}={json.dumps(there(path))}")
    if len({path.name for path in paths}) < len(paths):
        raise PlaitError("two files of this recipe have the same name, and all are copied to one folder; rename one")
    return InputFiles(paths=(Path(target[0]), *paths), settings=tuple(settings))


def _other_inputs(target: Sequence[str], config: RunConfig, on: Scheduler) -> Iterator[tuple[str, Path]]:
    """Further files that the recipe names, by key, except those whose path on the machines was given."""
    read = {
        "model.from": config.model.from_,
        "data.tokenizer": config.data.tokenizer,
        "report.choices": config.report.choices,
    }
    for key, text in read.items():
        if (
            text is None
            or not (path := Path(text)).is_absolute()
            or any(word.startswith(f"{key}=/") for word in target)
        ):
            continue
        if path.is_dir():
            raise PlaitError(
                f"{key} is the folder {path}, and --on {on} copies single files; put it on each machine, and add "
                f"{key}=/ITS/PLACE/THERE to this command"
            )
        yield key, path


def on_machine(machine: str, command: str, *, stdin: str = "", within_s: float = 120.0) -> str:
    """The output of a shell command on a machine; raises PlaitError."""
    return tool_answer([*SSH_WORDS, machine, command], stdin=stdin, about=machine, within_s=within_s)


def send_files(
    machine: str, folder: str, files: Sequence[Path], texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Send files that a machine does not have yet in that folder, and small texts under names of their own."""
    names = shlex.join([path.name for path in files])
    there = on_machine(machine, f"cd {folder} && sha256sum {names} 2>/dev/null || true")
    known = {line.split(maxsplit=1)[1].lstrip("*"): line.split()[0] for line in there.splitlines() if " " in line}
    fresh = [path for path in files if known.get(path.name) != file_sha256(path)]
    if not fresh and not texts:
        return
    command = [*SSH_WORDS, machine, f"mkdir -p {folder} && tar -x --no-same-owner -C {folder}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            with process.stdin as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
                for path in fresh:
                    archive.add(path.resolve(), arcname=path.name, recursive=False)
                for name, text in texts.items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(text.encode())
                    archive.addfile(entry, io.BytesIO(text.encode()))
        except BrokenPipeError:
            pass  # what the other end says of it follows
        complaint = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise PlaitError(f"{machine} does not take files: {complaint_text(complaint, 'ssh', process.returncode)}")


# The machines, and submitting a job.


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAnswer:
    """Python, environment, cores and GPUs of a machine."""

    python: tuple[int, int] | None
    has_environment: bool
    cores: int
    gpus: tuple[str, ...]


def parse_ssh_answer(machine: str, said: str) -> SshAnswer:
    """Parse the output of `check_command`."""
    lines = said[said.find(CHECK_MARK) :].splitlines() if CHECK_MARK in said else []
    if len(lines) < 3 or not lines[2].strip().isdecimal():
        raise PlaitError(f"{machine} gives an unexpected answer; see what its login prints: ssh {machine}")
    found = re.fullmatch(rf"{CHECK_MARK} (\d+)\.(\d+)", lines[0].strip())
    gpus = tuple(match[1] for line in lines[3:] if (match := re.match(r"GPU \d+: (.+?) \(UUID", line)))
    return SshAnswer(
        python=(int(found[1]), int(found[2])) if found else None,
        has_environment=lines[1].strip() == "environment",
        cores=int(lines[2]),
        gpus=gpus,
    )


def _cluster(request: SubmitRequest, options: Mapping[str, str]) -> Cluster:
    folder = options.get("folder", USUAL_FOLDER)
    command = check_command(SshPlace(machines=request.machines, leader="", python="python3", folder=folder))
    kinds = []
    for machine in request.machines:
        answer = parse_ssh_answer(machine, on_machine(machine, command))
        device = find_device_by_driver_name(answer.gpus[0]) if answer.gpus else None
        name, per_node = (SERVER, 1) if device is None else (device.name, len(answer.gpus))
        kinds.append(NodeKind(device=name, per_node=per_node, cores=answer.cores))
    return cluster_of_node_kinds(kinds, "the machines")


def _prepare(job: ClusterJob, request: SubmitRequest, options: Mapping[str, str], config: RunConfig | None) -> Outgoing:
    """The script for all machines; the first one leads."""
    port = options.get("port", str(USUAL_PORT))
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PlaitError(f"--with port={port} is not a port; write a number from 1024 to 65535, or leave it out")
    machines = request.machines[: job.nodes]
    inputs = input_files(job.target, config)
    environment = environment_files(options.get("wheel")) if "python" not in options else None
    place = SshPlace(
        machines=machines,
        leader=options.get("address") or _leader_address(machines[0]),
        folder=options.get("folder", USUAL_FOLDER),
        python=options.get("python", ""),
        environment=environment.name if environment else "",
        port=int(port),
        gpus=request.gpus,
    )
    there = replace(job, target=(Path(job.target[0]).name, *job.target[1:], *inputs.settings))
    wheel, lock = (shown_path(environment.wheel), environment.lock) if environment else ("", "")
    return Outgoing(
        file=f"{job.name}.ssh.sh",
        text=ssh_script(there, place, wheel, lock, tuple(shown_path(path) for path in inputs.paths)),
        run=job.run,
        send=lambda screen, working: _send(there, place, environment, inputs.paths, screen, working),
    )


def _leader_address(machine: str) -> str:
    """The address of the first machine, as its name is known here: over there it may mean the machine itself alone."""
    said = tool_answer(["ssh", "-G", machine], about=machine)
    name = next((line.split(" ", 1)[1] for line in said.splitlines() if line.startswith("hostname ")), machine)
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise PlaitError(
            f"{name} has no address here; write the one by which the other machines reach it: --with address=ADDRESS"
        ) from None


def _send(
    job: ClusterJob,
    place: SshPlace,
    environment: EnvironmentFiles | None,
    inputs: Sequence[Path],
    screen: Screen,
    working: WorkingFolder,
) -> None:
    """Check all machines, then send them what they lack and start them; follows node 0 to its end, whose exit code
    becomes a PlaitError. When the connection is lost, the run goes on."""
    for machine in place.machines:
        _install_if_needed(machine, place, environment, screen)
    record = Submitted(name=job.run, label=job.name, scheduler="ssh", machines=place.machines, folder=place.folder)
    for rank, machine in enumerate(place.machines):
        if _agent_state(record, rank) == "running":
            raise PlaitError(f"{job.run} runs on {machine} already; end it first: plait stop {job.run}")
    send_files(place.machines[0], place.folder, inputs)
    secret = new_secret().text
    try:
        for rank, machine in enumerate(place.machines):
            on_machine(machine, start_command(job, place, rank), stdin=f"{secret}\n" if job.nodes > 1 else "")
            screen.print(f"started  node {rank}: {machine}")
    except BaseException:  # those that were started would wait for the others in vain
        _end_agents(record, range(job.nodes))
        raise
    keep_record(record, working)
    screen.print(
        f"         it goes on without this machine: plait logs {job.run}, plait stop {job.run}, or plait fetch"
    )
    follow = [*SSH_WORDS, place.machines[0], follow_command(job.name, place.folder)]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            screen.print(line.rstrip("\n"))
    _end_of_following(record, screen)


def _end_of_following(record: Submitted, screen: Screen) -> None:
    """Report how the run ended once nothing more is printed; agents that still wait for node 0 are ended."""
    leader = record.machines[0]
    try:
        state = _agent_state(record, 0)
    except PlaitError as error:
        raise RunFailed(f"{error}. If {leader} lives, the run goes on: plait status {record.name} says so") from None
    if state == "running":
        screen.print(f"lost     the connection; the run goes on: plait logs {record.name}")
        return
    _end_agents(record, range(1, len(record.machines)))
    if state != "ended with exit code 0":
        raise RunFailed(f"node 0 ({leader}) {state}; see what it printed, then submit again")


def _install_if_needed(machine: str, place: SshPlace, environment: EnvironmentFiles | None, screen: Screen) -> None:
    check = parse_ssh_answer(machine, on_machine(machine, check_command(place)))
    if check.python is None:
        where = place.python or "python3"
        raise PlaitError(f"{machine} has no {where}; install Python 3.11 or newer there, with python3-venv")
    if check.python < OLDEST_PYTHON:
        raise PlaitError(
            f"{machine} has Python {check.python[0]}.{check.python[1]}, and plait needs 3.11 or newer there"
        )
    has = f"checked  {machine}: {counted(check.cores, 'core')}, {counted(len(check.gpus), 'GPU')}"
    if environment is None or check.has_environment:
        screen.print(f"{has}, plait is there")
        return
    screen.print(f"{has}; installing plait, once")
    send_files(machine, place.folder, (environment.wheel,), {"lock.txt": environment.lock})
    on_machine(machine, install_command(place, environment.wheel.name), within_s=INSTALL_AT_LATEST_S)


def _agent_state(record: Submitted, rank: int) -> str:
    return on_machine(record.machines[rank], running_command(record.label, record.folder, rank)).strip()


def _end_agents(record: Submitted, ranks: Iterable[int]) -> list[PlaitError]:
    """Tell machines to save and end; returns the errors of those that were not reached."""
    complaints = []
    for rank in ranks:
        try:
            on_machine(record.machines[rank], end_agent_command(record.label, record.folder, rank))
        except PlaitError as error:
            complaints.append(error)
    return complaints


def _end(record: Submitted) -> None:
    """Tell all machines to save and end, then raise for the first that was not reached."""
    for complaint in _end_agents(record, range(len(record.machines))):
        raise complaint


def _state(record: Submitted) -> str:
    """The state of the agent on each machine."""

    def one(rank: int) -> str:
        machine = record.machines[rank]
        try:
            return f"{machine} {_agent_state(record, rank)}"
        except PlaitError as error:
            return f"{error} ({machine} does not answer)"

    return ", ".join(one(rank) for rank in range(len(record.machines)))


def _log_lines(record: Submitted, working: WorkingFolder) -> Iterator[str]:
    command = f"cat {record.folder}/{record.label}.node-0.log"
    yield from on_machine(record.machines[0], command).splitlines()


def _copy(record: Submitted, inside: Path, working: WorkingFolder, screen: Screen) -> None:
    machine = record.machines[0]
    command = [*SSH_WORDS, machine, shlex.join(archive_command(record.folder, inside))]
    unpack_answer(command, working.path, f"{machine} does not give {inside}")


SSH = ClusterSystem(
    options=_OPTIONS, cluster=_cluster, prepare=_prepare, state=_state, log_lines=_log_lines, end=_end, copy=_copy
)
