"""Slurm: the machines according to sinfo, the script for sbatch, and a job's state, output and end.

The script starts one agent per node (`plait node`), and requeues the job if the run is saved but not finished.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.clusters.job import (
    AGAIN_SUFFIX,
    LEADER_VARIABLE,
    PORT_VARIABLE,
    RANK_VARIABLE,
    SECRET_SUFFIX,
    ClusterJob,
    ClusterSystem,
    NodeGroup,
    Outgoing,
    Submitted,
    keep_record,
    node_arguments,
    record_if_any,
)
from plait.clusters.machines import SERVER, NodeKind, cluster_of_node_kinds, cluster_of_partitions
from plait.clusters.request import Option, SubmitRequest, read_own_text
from plait.clusters.target import is_program
from plait.clusters.tools import DESCRIBE, tool_answer
from plait.errors import REQUEUE_EXIT, PlaitError
from plait.machines.catalog import find_device, find_device_by_driver_name
from plait.machines.cluster import Cluster
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.working_folder import WorkingFolder

_OPTIONS: Mapping[str, Option] = {
    "account": Option("the account that is charged"),
    "qos": Option("a quality of service"),
    "partition": Option("the partition; for unequal nodes one for each kind, joined by +"),
    "reservation": Option("a reservation"),
    "constraint": Option("features that nodes must have", r"[A-Za-z0-9_.:,&|*()\[\]+=/-]+", "a100&ib"),
    "cpus": Option("cores of each node; whole nodes if left out", r"[1-9]\d{0,4}", "16"),
    "memory": Option("memory of each node, such as 64G", r"\d+[KMGT]?", "64G"),
    "image": Option(
        "a container: an image for pyxis, or apptainer:FILE.sif",
        r"(?!apptainer:$)[A-Za-z0-9_./:@%+,=#-]+",
        "HOST#NAME:TAG or apptainer:FILE.sif",
    ),
    "python": Option("Python with plait on the nodes; the one that runs now if left out"),
    "lines": Option("a file of your own #SBATCH lines, and of shell lines before the start (module load)", ".+"),
    "grace": Option("how long before its time limit a run has to save, such as 5 minutes", ".*"),
}


# The machines.


def slurm_cluster(partition: str) -> Cluster:
    """The usable nodes of a partition (of the default one, if none is named), by sinfo; joined by "+" several."""
    partitions = partition.split("+") if partition else []
    named = ["--partition", ",".join(partitions)] if partition else []
    said = tool_answer(["sinfo", "--noheader", "-N", "-o", "%N|%P|%T|%c|%G", *named], about="Slurm's nodes")
    if len(partitions) < 2:
        nodes = slurm_nodes(said, partition)
        return cluster_of_node_kinds(list(nodes.values()), f"partition {partition}" if partition else "Slurm")
    found, taken = dict[str, list[NodeKind]](), set[str]()
    for one in partitions:  # a node of several partitions counts in the first of them
        own = slurm_nodes(said, one)
        found[one] = [kind for name, kind in own.items() if name not in taken]
        taken |= set(own)
    return cluster_of_partitions(found)


def slurm_nodes(said: str, partition: str) -> dict[str, NodeKind]:
    """The usable nodes by name, of sinfo's lines `NAME|PARTITION|STATE|CORES|GRES`: those of the default partition,
    which "*" marks, where none is named."""
    rows = [line.split("|") for line in said.splitlines() if line.count("|") == 4]
    if partition:
        rows = [row for row in rows if row[1].rstrip("*") in partition.split(",")]
    elif any(row[1].endswith("*") for row in rows):
        rows = [row for row in rows if row[1].endswith("*")]
    there = {row[0]: row for row in rows if not row[2].startswith(("down", "drain", "fail", "maint", "unk"))}
    if rows and not there:
        raise PlaitError(f"all nodes of Slurm are {rows[0][2]}; sinfo -R says why, or {DESCRIBE}")
    return {name: _slurm_node(row) for name, row in there.items()}


def _slurm_node(row: Sequence[str]) -> NodeKind:
    cores = int(row[3].rstrip("+") or 1)
    for entry in row[4].split(","):
        words = entry.partition("(")[0].split(":")
        if words[0] == "gpu":
            if len(words) < 3:
                raise PlaitError(f"Slurm does not say which GPUs {row[0]} has ({entry}); {DESCRIBE}")
            device = find_device_by_driver_name(words[1].replace("_", " ")) or find_device(words[1].replace("_", " "))
            return NodeKind(device=device.name, per_node=int(words[2]), cores=cores)
    return NodeKind(device=SERVER, per_node=1, cores=cores)


def slurm_limit_s(partition: str) -> tuple[str, int] | None:
    """The partition, of those that are named (else the default one), that first ends a job which asks for no time, and
    after how many seconds: its DefaultTime, else its MaxTime. None where none does, or sinfo does not answer."""
    if shutil.which("sinfo") is None:
        return None
    try:
        said = tool_answer(["sinfo", "--noheader", "-o", "%P|%l|%L"], about="Slurm's partitions", within_s=30)
    except PlaitError:
        return None
    rows = [line.split("|") for line in said.splitlines() if line.count("|") == 2]
    named = re.split(r"[+,]", partition) if partition else []
    own = [row for row in rows if (row[0].rstrip("*") in named if named else row[0].endswith("*"))]
    limits = {row[0].rstrip("*"): slurm_seconds(row[2]) or slurm_seconds(row[1]) for row in own}
    ends = [(name, seconds) for name, seconds in limits.items() if seconds is not None]
    return min(ends, key=lambda pair: pair[1], default=None)


def slurm_seconds(text: str) -> int | None:
    """Seconds of a time as sinfo writes it: "30:00" (minutes), "8:00:00", "1-12:00:00"; None for "infinite", "n/a"."""
    if not (match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)", text.strip())):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def slurm_time(seconds: int) -> str:
    """5400 -> "01:30:00", 180000 -> "2-02:00:00"."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


# The script.

REQUEUES_AT_MOST = 100
_NO_PYTHON = (
    'command -v "$0" >/dev/null || { echo "plait: $(hostname) has no $0; install plait at the same place on all '
    'nodes, or in a folder that they share" >&2; exit 2; }; exec "$0" "$@"'
)
_APPTAINER = "apptainer:"
_SET_BY_PLAIT = {
    "nodes": "--nodes", "ntasks": "", "ntasks-per-node": "", "job-name": "run.name", "time": "--time",
    "partition": "--with partition=", "output": "", "error": "", "open-mode": "", "signal": "--with grace=",
    "requeue": "", "no-requeue": "", "no-kill": "", "chdir": "", "hetjob": "", "wrap": "",
}  # fmt: skip
"""Options of sbatch that own lines may not set, and how they are set instead."""
_SHORT_OPTIONS = {
    "N": "nodes", "n": "ntasks", "J": "job-name", "t": "time", "p": "partition", "o": "output", "e": "error",
    "D": "chdir", "A": "account", "q": "qos", "C": "constraint", "c": "cpus-per-task", "a": "array", "G": "gpus",
    "L": "licenses", "d": "dependency", "w": "nodelist", "x": "exclude", "k": "no-kill",
}  # fmt: skip
_STANDS_FOR = {"gres": "gpus-per-node", "gpus": "gpus-per-node", "gpus-per-task": "gpus-per-node", "mem-per-cpu": "mem",
               "mem-per-gpu": "mem", "cpus-per-gpu": "exclusive", "cpus-per-task": "exclusive"}  # fmt: skip
"""By the option of an own line, the option of plait's that it stands for."""
_ARRAY_TASK = "$SLURM_ARRAY_TASK_ID"
_WHOLE_SUFFIX = ".whole"
"""Suffix of the file that a start leaves which ended on all nodes, to go on later."""
_THIS_START = "${SLURM_RESTART_COUNT:-0}"
_FORGET_PLACE = (
    "# sbatch hands on the variables of the shell that submits, which may itself be part of another job",
    f"unset {LEADER_VARIABLE} {RANK_VARIABLE}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLines:
    """What a person adds to the script: options of sbatch, and shell lines before the start."""

    options: tuple[str, ...] = ()
    """As written behind #SBATCH."""
    shell: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The long names of the options."""
        return frozenset(_option_name(option) for option in self.options)

    @property
    def replaced(self) -> frozenset[str]:
        """Names of plait's own options in whose place these stand."""
        names = {_option_name(option) for option in self.options if not option.startswith("--gres") or "gpu" in option}
        return frozenset(names | {_STANDS_FOR[name] for name in names if name in _STANDS_FOR})

    @property
    def is_array(self) -> bool:
        """Whether Slurm starts the job several times, each time with another SLURM_ARRAY_TASK_ID."""
        return "array" in self.names


def parse_own_lines(text: str, file: str) -> OwnLines:
    """The lines of the file of `--with lines=`; raises PlaitError for options that plait sets itself."""
    options, shell = list[str](), list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("#SBATCH"):
            shell += [line] if line.strip() and not line.startswith("#") else []
            continue
        option = line.removeprefix("#SBATCH").strip()
        name = _option_name(option)
        if not name:
            raise PlaitError(f"{file}:{number}: {line!r:.80} names no option of sbatch; write #SBATCH --NAME=VALUE")
        if sum(word.startswith("-") for word in option.partition(" #")[0].split()) > 1:
            raise PlaitError(f"{file}:{number}: {line!r:.80} has several options; write each on a line of its own")
        if name in _SET_BY_PLAIT:
            instead = _SET_BY_PLAIT[name]
            fix = f"take the line out and use {instead}" if instead else "take the line out"
            raise PlaitError(f"{file}:{number}: plait submit sets --{name} itself; {fix}")
        options.append(option)
    return OwnLines(options=tuple(options), shell=tuple(shell))


def _option_name(option: str) -> str:
    """ "--mail-type=END" -> "mail-type", "-w n1" -> "nodelist"; empty for what is no option."""
    long, short = re.match(r"--([a-z][a-z-]*)", option), re.match(r"-([A-Za-z])", option)
    return long[1] if long else _SHORT_OPTIONS.get(short[1], short[1]) if short else ""


def sbatch_script(job: ClusterJob, options: Mapping[str, str], own: OwnLines = OwnLines()) -> str:
    """The script for sbatch; it contains no secret, and is the same each time."""
    lines = ["#!/bin/bash", "# Made by plait submit. sbatch takes it as it is, in the folder to work in."]
    lines += [f"# {sentence}" for sentence in job.why]
    lines += [f"#SBATCH {option}" for option in _job_options(job, options, own)]
    lines += [f"#SBATCH {option}" for option in own.options]
    if _survives_lost_nodes(job, options):
        lines.append(
            "#SBATCH --no-kill  # the run goes on without a node that is lost; without node 0 it is queued again"
        )
    for number, group in enumerate(job.groups):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in _node_options(group, options) if not _is_replaced(option, own)]
    lines += ["", *_FORGET_PLACE, *own.shell, "set -u", *_meeting_lines(job), *_fresh_step_lines(job), ""]
    lines += [*_launch_lines(job, options, own), "code=$?", "", *_requeue_lines(job)]
    return "\n".join(lines) + "\n"


def _is_replaced(option: str, own: OwnLines) -> bool:
    return _option_name(option) in own.replaced


def _job_options(job: ClusterJob, options: Mapping[str, str], own: OwnLines) -> list[str]:
    given = [key for key in ("account", "qos", "reservation") if key in options and key not in own.names]
    named = [f"--{key}={shlex.quote(options[key])}" for key in given]
    return [
        f"--job-name={job.name}",
        *named,
        *([] if job.time_s is None else [f"--time={slurm_time(job.time_s)}"]),
        f"--signal=USR1@{job.grace_s}  # seconds before the time limit at which all agents receive the signal to save",
        "--requeue  # what was saved goes on when the job starts again",
        "--open-mode=append",
        f"--output=%x-{'%A_%a' if own.is_array else '%j'}.log",
    ]


def _node_options(group: NodeGroup, options: Mapping[str, str]) -> list[str]:
    cpus = options.get("cpus")
    # A whole node is given with a part of its memory only, unless all of it is asked for.
    memory = options.get("memory", "" if cpus else "0")
    return [
        *([f"--partition={shlex.quote(group.partition)}"] if group.partition else []),
        f"--nodes={group.nodes}",
        "--ntasks-per-node=1  # one agent a node; it starts the workers",
        *([f"--gpus-per-node={group.gpus}"] if group.gpus else []),
        f"--cpus-per-task={cpus}" if cpus else "--exclusive",
        *([f"--constraint={shlex.quote(options['constraint'])}"] if "constraint" in options else []),
        *([f"--mem={memory}"] if memory else []),
    ]


def _meeting_lines(job: ClusterJob) -> list[str]:
    """Shell lines that tell the agents where node 0 is; not needed for a single node."""
    lines = ["trap '' USR1  # the warning is for the agents: until they listen, it must not end them"]
    if job.nodes == 1:
        return lines
    list_of_nodes = "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}"
    return [
        *lines,
        f'first=$(scontrol show hostnames "{list_of_nodes}" | head -n 1)',
        "# the network of the nodes' addresses in slurm.conf, unless a line above names node 0 in another one",
        f'{LEADER_VARIABLE}=${{{LEADER_VARIABLE}:-$(scontrol show node "$first" |',
        "  sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')}",
        f"export {LEADER_VARIABLE} {PORT_VARIABLE}=$((20000 + (SLURM_JOB_ID + 7 * ${{SLURM_RESTART_COUNT:-0}}) % "
        f"10000))",
        "# two jobs of a node do not meet, nor do two starts of one job, of which a lost node may still have the first",
        "# a start whose node 0 was lost has left its secret behind",
        f'for ((n = 0; n < ${{SLURM_RESTART_COUNT:-0}}; n++)); do rm -f "{_secret_file(job, "$n")}"; done',
    ]


def _fresh_step_lines(job: ClusterJob) -> list[str]:
    """Shell lines that take a step's number for each earlier start that did not end on all nodes."""
    return [
        "# a lost node that comes back would cancel the step of the number that it had, so this start takes another",
        f'for ((n = 0; n < {_THIS_START}; n++)); do [ -e "{_file(job, "$n", _WHOLE_SUFFIX)}" ] || '
        "srun --nodes=1 --ntasks=1 true; done",
    ]


def _secret_file(job: ClusterJob, start: str) -> str:
    """The file with the secret of one start of one job, as the shell reads it."""
    return _file(job, start, SECRET_SUFFIX)


def _file(job: ClusterJob, start: str, suffix: str) -> str:
    return f".plait/{job.name}-$SLURM_JOB_ID-{start}{suffix}"


def _launch_lines(job: ClusterJob, options: Mapping[str, str], own: OwnLines) -> list[str]:
    image = options.get("image", "")
    secret = [] if job.nodes == 1 else ["--secret-file", _Shell(f'"{_secret_file(job, _THIS_START)}"')]
    # Neither the end of one agent nor its failure ends the others: a run may leave a node out, or go on without it.
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=0"]
    if "cpus" in options:  # since 22.05 srun does not take it from sbatch; Slurm binds the agent to these cores
        srun.append(f"--cpus-per-task={options['cpus']}")
    elif "cpus-per-task" in own.names:
        srun.append(_Shell('--cpus-per-task="$SLURM_CPUS_PER_TASK"'))
    else:  # Slurm would bind the agent of a whole node to one core
        srun.append("--cpu-bind=none")
    srun += [f"--het-group=0-{len(job.groups) - 1}"] if len(job.groups) > 1 else []
    srun += ["--no-kill"] if _survives_lost_nodes(job, options) else []
    parts: list[list[str]] = [srun]
    if image.startswith(_APPTAINER):
        gpus = ["--nv"] if job.uses_gpus else []
        parts.append(["apptainer", "exec", *gpus, "--bind", _Shell('"$PWD"'), image.removeprefix(_APPTAINER)])
    elif image:
        mounts = [_Shell('--container-mounts="$PWD:$PWD"'), _Shell('--container-workdir="$PWD"')]
        parts.append([f"--container-image={image}", *mounts])
    python = options.get("python", "python3" if image else sys.executable)
    target: list[str] = [*job.target]
    if own.is_array and not is_program(target):  # a run of its own for each task of the array, with a seed of its own
        target += [_Shell(f'"run.name={job.run}-{_ARRAY_TASK}"'), _Shell(f'"run.seed={_ARRAY_TASK}"')]
    parts += [["bash", "-c", _NO_PYTHON], [python, *node_arguments(job, target, secret)]]
    lines = [" ".join(word if isinstance(word, _Shell) else shlex.quote(word) for word in part) for part in parts]
    return " \\\n  ".join(lines).split("\n")


class _Shell(str):
    """A word for the shell that is not quoted."""


def _survives_lost_nodes(job: ClusterJob, options: Mapping[str, str]) -> bool:
    """Whether Slurm leaves the job alone when it loses a node.

    Slurm then also leaves it alone when node 0 is lost, which runs the script, so another node's agent has to requeue
    it (requeue_if_leader_lost in node.py). That needs scontrol, which containers lack, and a single list of nodes,
    which a heterogeneous job lacks.
    """
    return job.nodes > 1 and len(job.groups) == 1 and "image" not in options


def _requeue_lines(job: ClusterJob) -> list[str]:
    again = _file(job, _THIS_START, AGAIN_SUFFIX)
    whole = [
        "# srun has seen the end of every node, and Slurm has taken none away: none comes back later",
        f'if [ $code = {REQUEUE_EXIT} ] && [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %D)" = '
        f'"$SLURM_JOB_NUM_NODES" ]; then',
        f'  touch "{_file(job, _THIS_START, _WHOLE_SUFFIX)}"',
        "fi",
    ]
    last_word = [
        "# srun's code is the highest of all nodes; one that was lost earlier does not outweigh what node 0 says",
        f'if [ -e "{again}" ]; then rm -f "{again}"; code={REQUEUE_EXIT}; fi',
    ]
    return [
        *whole,
        *(last_word if job.nodes > 1 else []),
        f"# {REQUEUE_EXIT}: all is saved and more is to do. After any other end another try would not help.",
        f'if [ $code = {REQUEUE_EXIT} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {REQUEUES_AT_MOST} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID" && sleep 120  # Slurm ends this script meanwhile',
        "fi",
        f'[ $code = {REQUEUE_EXIT} ] || rm -f ".plait/{job.name}-$SLURM_JOB_ID-"*{_WHOLE_SUFFIX}',
        "exit $code",
    ]


# Submitting a job, and its state, output and end.

_ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED",
    "gone",
)  # fmt: skip
_REASONS = {
    "Resources": "waits for nodes that are free",
    "Priority": "others are before it",
    "PartitionTimeLimit": "it waits forever: the partition allows less time, so submit it with less --time",
    "PartitionNodeLimit": "it waits forever: the partition has fewer nodes, so submit it with fewer --nodes",
    "PartitionConfig": "it waits forever: the partition allows less time, or has fewer nodes; submit it with less",
    "BadConstraints": "no node meets the constraints: sinfo shows what there is",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
    "QOSMaxJobsPerUserLimit": "you already run as many jobs as you may",
    "AssocGrpGRES": "your account has no more GPUs free",
    "BeginTime": "was queued again, and starts in a moment",
    "JobHeldUser": "it waits forever: it is held, scontrol release lets it go",
    "JobHeldAdmin": "it waits forever: an administrator holds it, ask there",
    "launch failed requeued held": "it waits forever: it could not be started, and is held; scontrol release "
    "tries again",
    "InvalidAccount": "it waits forever: sacctmgr show associations lists the accounts that you may use",
    "InvalidQOS": "it waits forever: sacctmgr show qos lists the qualities of service",
}
"""The most common of Slurm's reasons for waiting, in words."""


def _prepare(job: ClusterJob, request: SubmitRequest, options: Mapping[str, str], config: RunConfig | None) -> Outgoing:
    own = OwnLines()
    if "lines" in options:
        own = parse_own_lines(read_own_text(Path(options["lines"]), "lines"), options["lines"])
    script = sbatch_script(job, options, own)

    def send(screen: Screen, working: WorkingFolder) -> None:
        name = job.run
        before = record_if_any(name, working)
        states = _states(before) if before is not None and before.scheduler == "slurm" else []
        if before is not None and (left := [state for state in states if not state.startswith(_ENDED)]):
            state = left[0].partition(" ")[0]
            raise PlaitError(f"{name} is job {before.job} of Slurm already ({state}); end it first: plait stop {name}")
        said = tool_answer(["sbatch", "--parsable"], stdin=script, about=f"the job {name}")
        number, tasks = said.strip().split(";")[0].splitlines()[-1], own.is_array
        record = Submitted(name=name, label=job.name, scheduler="slurm", job=number, is_array=tasks)
        keep_record(record, working)
        screen.print(f"sent     {name}: job {record.job} of Slurm, {_state(record)}")
        screen.print(f"         plait status {name}, plait logs {name}, plait stop {name}")

    return Outgoing(file=f"{job.name}.sbatch", text=script, run=job.run, send=send)


def _state(record: Submitted) -> str:
    """A job's state, or the states of an array's tasks."""
    return ", ".join(_states(record))


def _states(record: Submitted) -> Sequence[str]:
    """The different states of a job and its tasks, each with the reason in brackets if it waits; "gone" if Slurm no
    longer knows it."""
    command = ["squeue", "--noheader", "--states", "all", "--job", record.job, "--format", "%T|%r"]
    try:
        said = tool_answer(command, about=f"the job {record.name}").strip()
    except PlaitError as error:
        if "Invalid job id" in str(error):
            return ["gone"]
        raise
    return list(dict.fromkeys(map(_state_in_words, said.splitlines()))) or ["gone"]


def _state_in_words(line: str) -> str:
    state, _, reason = line.partition("|")
    why = _REASONS.get(reason.partition(",")[0], reason)
    return f"{state} ({why})" if state == "PENDING" and reason != "None" else state


def _log_lines(record: Submitted, working: WorkingFolder) -> Iterator[str]:
    """The output of a job, or of each task of an array that has printed something, with a line that names its file."""
    label = f"{record.label}-{record.job}"
    files = [working.path / f"{label}.log"]
    if record.is_array:
        files = sorted(working.path.glob(f"{label}_*.log"), key=lambda file: (len(file.name), file.name))  # 2 before 10
    if not any(file.is_file() for file in files):
        raise PlaitError(f"{record.name} has printed nothing yet: it is {_state(record)}; look again later")
    for file in files:
        if record.is_array:
            yield f"==> {file.name} <=="
        with file.open(encoding="utf-8", errors="replace") as text:
            yield from (line.rstrip("\n") for line in text)


def _end(record: Submitted) -> None:
    tool_answer(["scancel", record.job], about=f"the job {record.name}")


SLURM = ClusterSystem(
    options=_OPTIONS,
    cluster=lambda request, options: slurm_cluster(options.get("partition", "")),
    prepare=_prepare,
    state=lambda record: f"job {record.job}, {_state(record)}",
    log_lines=_log_lines,
    end=_end,
)
