"""The sbatch script of a job: what is asked of Slurm, the agents that srun starts, and when the job is queued again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from plait.deploy.cluster_job import (
    AGAIN_SUFFIX,
    LEADER_VARIABLE,
    PORT_VARIABLE,
    REQUEUE_EXIT,
    SECRET_SUFFIX,
    ClusterJob,
    NodeGroup,
    node_arguments,
)

REQUEUES_AT_MOST = 100
_NO_PYTHON = (
    'command -v "$0" >/dev/null || { echo "plait: $(hostname) has no $0; install plait at the same place on all '
    'nodes, or in a folder that they share" >&2; exit 2; }; exec "$0" "$@"'
)
_APPTAINER = "apptainer:"
_THIS_START, _EARLIER_START = "${SLURM_RESTART_COUNT:-0}", "$n"
_FRESH_STEP = (
    "# each start has a step of another number: a lost node that comes back would cancel the one that it had",
    "for ((n = 0; n < ${SLURM_RESTART_COUNT:-0}; n++)); do srun --nodes=1 --ntasks=1 true; done",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """What a site asks for beside nodes and time; empty where it is left to Slurm."""

    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    cpus: str = ""
    """Cores of each node; empty takes whole nodes."""
    memory: str = ""
    image: str = ""
    """A container: an image for pyxis, or "apptainer:FILE.sif"."""
    python: str = "python3"
    """Python with plait, the same path on all nodes."""


def sbatch_script(job: ClusterJob, request: SlurmRequest) -> str:
    """The script for sbatch; it holds no secret, and is the same each time."""
    lines = ["#!/bin/bash", "# Made by plait submit. sbatch takes it as it is, in the folder to work in."]
    lines += [f"# {sentence}" for sentence in job.why]
    lines += [f"#SBATCH {option}" for option in _job_options(job, request)]
    if _survives_lost_nodes(job, request):
        lines.append(
            "#SBATCH --no-kill  # the run goes on without a node that is lost; without node 0 it is queued again"
        )
    for number, group in enumerate(job.groups):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in _node_options(group, request)]
    lines += ["", "set -u", *_meeting_lines(job), *_FRESH_STEP, ""]
    lines += [*_launch_lines(job, request), "code=$?", "", *_requeue_lines(job)]
    return "\n".join(lines) + "\n"


def _job_options(job: ClusterJob, request: SlurmRequest) -> list[str]:
    named = [("account", request.account), ("qos", request.qos), ("reservation", request.reservation)]
    options = [f"--job-name={job.name}", *(f"--{key}={shlex.quote(value)}" for key, value in named if value)]
    if job.time_s is not None:
        options.append(f"--time={slurm_time(job.time_s)}")
    return [
        *options,
        f"--signal=USR1@{job.grace_s}  # so many seconds before its time is over, all agents are told to save",
        "--requeue  # what was saved goes on when the job starts again",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]


def _node_options(group: NodeGroup, request: SlurmRequest) -> list[str]:
    options = [f"--partition={shlex.quote(group.partition)}"] if group.partition else []
    options += [f"--nodes={group.nodes}", "--ntasks-per-node=1  # one agent a node; it starts the workers"]
    options += [f"--gpus-per-node={group.gpus}"] if group.gpus else []
    options += [f"--cpus-per-task={request.cpus}"] if request.cpus else ["--exclusive"]
    options += [f"--constraint={shlex.quote(request.constraint)}"] if request.constraint else []
    # A whole node is given with a part of its memory only, unless all of it is asked for.
    memory = request.memory or ("" if request.cpus else "0")
    return [*options, *([f"--mem={memory}"] if memory else [])]


def _meeting_lines(job: ClusterJob) -> list[str]:
    """Shell lines that tell the agents where node 0 is; a node alone needs none."""
    lines = ["trap '' USR1  # the warning is for the agents: until they listen, it must not end them"]
    if job.nodes == 1:
        return lines
    list_of_nodes = "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}"
    return [
        *lines,
        f'first=$(scontrol show hostnames "{list_of_nodes}" | head -n 1)',
        f"{LEADER_VARIABLE}=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        f"export {LEADER_VARIABLE} {PORT_VARIABLE}=$((20000 + (SLURM_JOB_ID + 7 * ${{SLURM_RESTART_COUNT:-0}}) % "
        f"10000))",
        "# two jobs of a node do not meet, nor do two starts of one job, of which a lost node may still have the first",
        "# a start whose node 0 was lost has left its secret behind",
        f'for ((n = 0; n < ${{SLURM_RESTART_COUNT:-0}}; n++)); do rm -f "{_secret_file(job, "$n")}"; done',
    ]


def _secret_file(job: ClusterJob, start: str) -> str:
    """The file of one start of one job, as the shell reads it."""
    return f".plait/{job.name}-$SLURM_JOB_ID-{start}{SECRET_SUFFIX}"


def _launch_lines(job: ClusterJob, request: SlurmRequest) -> list[str]:
    secret = [] if job.nodes == 1 else ["--secret-file", _Shell(f'"{_secret_file(job, _THIS_START)}"')]
    # Neither the end of one agent nor its failure ends the others: a run may leave a node out, or go on without it.
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", *_het_groups(job)]
    srun += ["--no-kill"] if _survives_lost_nodes(job, request) else []
    agent = [request.python, *node_arguments(job, secret)]
    checked = ["bash", "-c", _NO_PYTHON]
    if request.image.startswith(_APPTAINER):
        image = request.image.removeprefix(_APPTAINER)
        gpus = ["--nv"] if job.uses_gpus else []
        return _wrapped(srun, ["apptainer", "exec", *gpus, "--bind", _Shell('"$PWD"'), image], checked, agent)
    if request.image:
        mounts = [_Shell('--container-mounts="$PWD:$PWD"'), _Shell('--container-workdir="$PWD"')]
        return _wrapped(srun, [f"--container-image={request.image}", *mounts], checked, agent)
    return _wrapped(srun, checked, agent)


def _survives_lost_nodes(job: ClusterJob, request: SlurmRequest) -> bool:
    """Whether Slurm leaves the job alone when a node of it is lost.

    Slurm then also leaves it alone when node 0, which runs the script, is lost; so another node's agent has to queue it
    again (commands/submitting/lost_leader.py). It needs scontrol, which containers lack, and one list of nodes, which a
    heterogeneous job has not.
    """
    return job.nodes > 1 and len(job.groups) == 1 and not request.image


def _het_groups(job: ClusterJob) -> list[str]:
    return [f"--het-group=0-{len(job.groups) - 1}"] if len(job.groups) > 1 else []


class _Shell(str):
    """A word that the shell is to read as it stands."""


def _wrapped(*parts: Sequence[str]) -> list[str]:
    """One command over several lines of the script, a part a line."""
    lines = [" ".join(word if isinstance(word, _Shell) else shlex.quote(word) for word in part) for part in parts]
    return [f"{'' if at == 0 else '  '}{line}{chr(32) + chr(92) if at < len(lines) - 1 else ''}"
            for at, line in enumerate(lines)]  # fmt: skip


def _requeue_lines(job: ClusterJob) -> list[str]:
    told = _secret_file(job, _THIS_START).removesuffix(SECRET_SUFFIX) + AGAIN_SUFFIX
    last_word = [
        "# srun's code is the highest of all nodes; one that was lost earlier does not outweigh what node 0 says",
        f'if [ -e "{told}" ]; then rm -f "{told}"; code={REQUEUE_EXIT}; fi',
    ]
    return [
        *(last_word if job.nodes > 1 else []),
        f"# {REQUEUE_EXIT}: all is saved and more is to do. Whatever else ends a run is not mended by another try.",
        f'if [ $code = {REQUEUE_EXIT} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {REQUEUES_AT_MOST} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID" && sleep 120  # Slurm ends this script meanwhile',
        "fi",
        "exit $code",
    ]


def slurm_time(seconds: int) -> str:
    """5400 -> "01:30:00", 180000 -> "2-02:00:00"."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
