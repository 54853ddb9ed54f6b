"""What is typed on each machine by ssh: look, install once, start the agent, follow it. It holds no secret."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from plait.deploy.cluster_job import (
    LEADER_VARIABLE,
    PORT_VARIABLE,
    RANK_VARIABLE,
    USUAL_PORT,
    ClusterJob,
    node_arguments,
)

HOME_ENVIRONMENTS = ".plait/environments"
CHECK_MARK = "plait-check"
_TELL_VERSION = f'import sys; print("{CHECK_MARK}", "%d.%d" % sys.version_info[:2])'


@dataclass(frozen=True, slots=True, kw_only=True)
class SshRequest:
    """Where plait works on the machines, and with which Python."""

    machines: tuple[str, ...]
    """Names that ssh takes; the first is node 0."""
    leader: str
    """The address at which the others reach node 0."""
    folder: str = "plait-runs"
    """Below the home folder, or absolute."""
    python: str = ""
    """Empty: that of an environment made from the wheel."""
    environment: str = ""
    """Name of that environment: a hash of the wheel and of the versions it is installed with."""
    port: int = USUAL_PORT
    gpus: int | None = None
    """Only the first so many of each machine's; None: all that it has."""


def python_path(request: SshRequest) -> str:
    """The Python of the agents, as the shell over there reads it."""
    return request.python or f'"$HOME"/{HOME_ENVIRONMENTS}/{request.environment}/bin/python'


def check_command(request: SshRequest) -> str:
    """Says in one line what a machine has: the folder can be written, Python's version, cores, GPUs."""
    ready = "true" if request.python else f'[ -e "$HOME"/{HOME_ENVIRONMENTS}/{request.environment}/ready ]'
    python = request.python or "python3"
    return "; ".join(
        [
            f"mkdir -p {request.folder} && [ -w {request.folder} ] || {{ echo 'Read-only file system' >&2; exit 1; }}",
            f"{ready} && has=environment || has=nothing",
            f"{python} -c '{_TELL_VERSION}' || echo {CHECK_MARK} none",
            "echo $has; nproc; nvidia-smi -L 2>/dev/null || true",
        ]
    )


def install_command(request: SshRequest, wheel: str) -> str:
    """Makes the environment from the wheel and the lock file that were copied beside it; a second time it is there."""
    place = f'"$HOME"/{HOME_ENVIRONMENTS}/{request.environment}'
    return (
        f"set -e; [ -e {place}/ready ] && exit; python3 -m venv {place}; "
        f"{place}/bin/python -m pip install --quiet --requirement {request.folder}/lock.txt {request.folder}/{wheel}; "
        f"touch {place}/ready"
    )


def start_command(job: ClusterJob, request: SshRequest, rank: int) -> str:
    """Starts a machine's agent, which stays when the connection ends; reads the secret from standard input."""
    agent = f"{python_path(request)} {shlex.join(node_arguments(job))}"
    stem = f"{job.name}.node-{rank}"
    variables = f"{RANK_VARIABLE}={rank} {LEADER_VARIABLE}={shlex.quote(request.leader)} {PORT_VARIABLE}={request.port}"
    if request.gpus is not None:
        variables += f" CUDA_VISIBLE_DEVICES={','.join(map(str, range(request.gpus)))}"
    secret = "" if job.nodes == 1 else "IFS= read -r PLAIT_SECRET; export PLAIT_SECRET; "
    inner = f"trap : TERM INT USR1; {agent}; echo $? >{stem}.code"
    return (
        f"set -e; umask 077; cd {request.folder}; {secret}export {variables}; rm -f {stem}.code; "
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


def ssh_script(job: ClusterJob, request: SshRequest, wheel: str, lock: str, inputs: tuple[str, ...]) -> str:
    """All that would be done, as a shell script; the secret goes from a variable of the shell into standard input.
    `wheel` and `inputs` are files here, `lock` is the text of the lock file."""
    lines = ["#!/bin/bash", "# Made by plait submit, which does the same and says what to mend where a step fails."]
    lines += [f"# {sentence}" for sentence in job.why]
    lines += ["set -eu", ""]
    for machine in request.machines:
        lines.append(f"ssh {shlex.quote(machine)} {shlex.quote(check_command(request))}")
    lines += [] if request.python else _installation(request, wheel, lock)
    lines += ["", "# what is to run; node 0 sends the others what they need"]
    lines.append(f"scp {shlex.join(inputs)} {shlex.quote(request.machines[0])}:{request.folder}/")
    secret = ["", "secret=$(tr -dc 0-9A-HJKMNP-TV-Z </dev/urandom | head -c 28)  # never an argument, in no file"]
    lines += secret if job.nodes > 1 else [""]
    hand = 'printf "%s\\n" "$secret" | ' if job.nodes > 1 else ""
    for rank, machine in enumerate(request.machines):
        lines.append(f"{hand}ssh {shlex.quote(machine)} {shlex.quote(start_command(job, request, rank))}")
    lines += ["", f"ssh {shlex.quote(request.machines[0])} {shlex.quote(follow_command(job.name, request.folder))}"]
    return "\n".join(lines) + "\n"


def _installation(request: SshRequest, wheel: str, lock: str) -> list[str]:
    """The environment on each machine, for who has none yet."""
    lines = ["", "# the environment, once: plait's wheel, and the versions that are installed here"]
    lines += ["lock=$(cat <<'END'", *lock.splitlines(), "END", ")"]
    for machine in map(shlex.quote, request.machines):
        lines.append(f"scp {shlex.quote(wheel)} {machine}:{request.folder}/")
        lines.append(f'printf "%s\\n" "$lock" | ssh {machine} {shlex.quote(f"cat >{request.folder}/lock.txt")}')
        lines.append(f"ssh {machine} {shlex.quote(install_command(request, Path(wheel).name))}")
    return lines
