"""Plain ssh: machines are looked at, sent what they lack, started, followed, and their files brought back."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.commands.submitting.machines import SERVER, NodeKind, cluster_of_node_kinds
from plait.commands.submitting.over_ssh.files import EnvironmentFiles
from plait.commands.submitting.over_ssh.transfer import SSH_WORDS, bring_folder, on_machine, send_files
from plait.commands.submitting.records import Submitted, keep_record
from plait.commands.submitting.tools import require_tool, tool_answer
from plait.deploy.cluster_job import ClusterJob
from plait.deploy.ssh_commands import (
    CHECK_MARK,
    SshRequest,
    check_command,
    end_agent_command,
    follow_command,
    install_command,
    running_command,
    start_command,
)
from plait.errors import PlaitError, RunFailed
from plait.launch.remote.secret import new_secret
from plait.machines.catalog import find_device_by_driver_name
from plait.machines.cluster import Cluster
from plait.screen.screen import Screen
from plait.units import counted
from plait.working_folder import WorkingFolder

INSTALL_AT_LATEST_S = 3600.0
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAnswer:
    """What a machine answered."""

    python: tuple[int, int] | None
    has_environment: bool
    cores: int
    gpus: tuple[str, ...]


def ssh_cluster(machines: Sequence[str], folder: str) -> Cluster:
    """What the machines have, as a cluster."""
    request = SshRequest(machines=tuple(machines), leader="", python="python3", folder=folder)
    checks = [look_at_machine(machine, request) for machine in machines]
    return cluster_of_node_kinds([_kind(check) for check in checks], "the machines")


def _kind(check: SshAnswer) -> NodeKind:
    device = find_device_by_driver_name(check.gpus[0]) if check.gpus else None
    if device is None:
        return NodeKind(device=SERVER, per_node=1, cores=check.cores)
    return NodeKind(device=device.name, per_node=len(check.gpus), cores=check.cores)


def look_at_machine(machine: str, request: SshRequest) -> SshAnswer:
    """Look at a machine; raises PlaitError where it cannot be reached, or its folder cannot be written."""
    return parse_ssh_answer(machine, on_machine(machine, check_command(request)))


def parse_ssh_answer(machine: str, said: str) -> SshAnswer:
    """What `check_command` printed."""
    lines = said[said.find(CHECK_MARK) :].splitlines() if CHECK_MARK in said else []
    if len(lines) < 3 or not lines[2].strip().isdecimal():
        raise PlaitError(
            f"{machine} answers something else than it was asked; see what its login prints: ssh {machine}"
        )
    found = re.fullmatch(rf"{CHECK_MARK} (\d+)\.(\d+)", lines[0].strip())
    gpus = tuple(match[1] for line in lines[3:] if (match := re.match(r"GPU \d+: (.+?) \(UUID", line)))
    return SshAnswer(
        python=(int(found[1]), int(found[2])) if found else None,
        has_environment=lines[1].strip() == "environment",
        cores=int(lines[2]),
        gpus=gpus,
    )


def leader_address(machine: str) -> str:
    """The address of the first machine, as its name is known here: over there it may mean the machine itself alone."""
    require_tool("ssh", "install openssh-client")
    said = tool_answer(["ssh", "-G", machine], about=machine)
    name = next((line.split(" ", 1)[1] for line in said.splitlines() if line.startswith("hostname ")), machine)
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise PlaitError(
            f"{name} has no address here; write the one by which the other machines reach it: --with address=ADDRESS"
        ) from None


def send_by_ssh(
    job: ClusterJob,
    request: SshRequest,
    environment: EnvironmentFiles | None,
    inputs: Sequence[Path],
    screen: Screen,
    working: WorkingFolder,
) -> None:
    """Check all machines, then send them what they lack and start them; follows node 0 to its end, whose exit code
    becomes a PlaitError. When the connection is lost, the run goes on."""
    for machine in request.machines:
        _prepare(machine, look_at_machine(machine, request), request, environment, screen)
    _refuse_running(job, request)
    send_files(request.machines[0], request.folder, inputs)
    record = Submitted(name=job.run, label=job.name, scheduler="ssh", machines=request.machines, folder=request.folder)
    _start(job, request, record, screen)
    keep_record(record, working)
    screen.print(
        f"         it goes on without this machine: plait logs {job.run}, plait stop {job.run}, or plait fetch"
    )
    _follow(request.machines[0], follow_command(job.name, request.folder), screen)
    _end(record, screen)


def _start(job: ClusterJob, request: SshRequest, record: Submitted, screen: Screen) -> None:
    """Start an agent on each machine; where one cannot be started, those that were would wait for it in vain."""
    secret = new_secret().text
    try:
        for rank, machine in enumerate(request.machines):
            on_machine(machine, start_command(job, request, rank), stdin=f"{secret}\n" if job.nodes > 1 else "")
            screen.print(f"started  node {rank}: {machine}")
    except BaseException:
        _end_agents(record, range(job.nodes))
        raise


def _end(record: Submitted, screen: Screen) -> None:
    """What became of the run once nothing more is printed: its exit code is the command's. Machines that still wait for
    node 0 are sent home."""
    leader = record.machines[0]
    try:
        state = on_machine(leader, running_command(record.label, record.folder, 0)).strip()
    except PlaitError as error:
        raise RunFailed(f"{error}. If {leader} lives, the run goes on: plait status {record.name} says so") from None
    if state == "running":
        screen.print(f"lost     the connection; the run goes on: plait logs {record.name}")
        return
    _end_agents(record, range(1, len(record.machines)))
    if state != "ended with exit code 0":
        raise RunFailed(f"node 0 ({leader}) {state}; see what it printed, then submit again")


def _end_agents(record: Submitted, ranks: Iterable[int]) -> list[PlaitError]:
    """Tell machines to save and end; returns what was wrong with those that were not reached."""
    complaints = []
    for rank in ranks:
        try:
            on_machine(record.machines[rank], end_agent_command(record.label, record.folder, rank))
        except PlaitError as error:
            complaints.append(error)
    return complaints


def _prepare(
    machine: str, check: SshAnswer, request: SshRequest, environment: EnvironmentFiles | None, screen: Screen
) -> None:
    """Make the environment where there is none."""
    if check.python is None:
        where = request.python or "python3"
        raise PlaitError(f"{machine} has no {where}; install Python 3.11 or newer there, with python3-venv")
    if check.python < OLDEST_PYTHON:
        raise PlaitError(
            f"{machine} has Python {check.python[0]}.{check.python[1]}, and plait needs 3.11 or newer there"
        )
    if environment is None or check.has_environment:
        screen.print(
            f"checked  {machine}: {counted(check.cores, 'core')}, {counted(len(check.gpus), 'GPU')}, plait is there"
        )
        return
    screen.print(
        f"checked  {machine}: {counted(check.cores, 'core')}, {counted(len(check.gpus), 'GPU')}; installing plait, once"
    )
    send_files(machine, request.folder, (environment.wheel,), {"lock.txt": environment.lock})
    on_machine(machine, install_command(request, environment.wheel.name), within_s=INSTALL_AT_LATEST_S)


def _refuse_running(job: ClusterJob, request: SshRequest) -> None:
    for rank, machine in enumerate(request.machines):
        if on_machine(machine, running_command(job.name, request.folder, rank)).strip() == "running":
            raise PlaitError(f"{job.run} runs on {machine} already; end it first: plait stop {job.run}")


def _follow(machine: str, command: str, screen: Screen) -> None:
    process = subprocess.Popen([*SSH_WORDS, machine, command], stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            screen.print(line.rstrip("\n"))


def ssh_log_lines(record: Submitted) -> Iterator[str]:
    """What node 0 has printed so far."""
    command = f"cat {record.folder}/{record.label}.node-0.log"
    yield from on_machine(record.machines[0], command).splitlines()


def end_by_ssh(record: Submitted) -> None:
    """Tell all machines to save and end; raises PlaitError that names one which was not reached, after all others were
    told."""
    for complaint in _end_agents(record, range(len(record.machines))):
        raise complaint


def copy_by_ssh(record: Submitted, inside: Path, working: WorkingFolder) -> None:
    """Copy the run's folder from node 0."""
    bring_folder(record.machines[0], record.folder, inside, working.path)


def ssh_state(record: Submitted) -> str:
    """On which machines it runs."""
    return ", ".join(_machine_state(record, rank) for rank in range(len(record.machines)))


def _machine_state(record: Submitted, rank: int) -> str:
    machine = record.machines[rank]
    try:
        return f"{machine} {on_machine(machine, running_command(record.label, record.folder, rank)).strip()}"
    except PlaitError as error:
        return f"{error} ({machine} does not answer)"
