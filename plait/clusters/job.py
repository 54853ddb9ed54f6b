"""A job for a cluster as a value, the record of one that was submitted, and what each cluster system can do with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from plait.checked_json import parse_object, typed_value
from plait.clusters.request import Option, Scheduler, SubmitRequest
from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.private_folder import make_private_folder
from plait.recipe.schema import RunConfig
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

RANK_VARIABLE = "PLAIT_NODE_RANK"
"""The number of a node, from 0 on; node 0 leads."""
LEADER_VARIABLE = "PLAIT_LEADER"
"""Name or address of node 0."""
PORT_VARIABLE = "PLAIT_PORT"
"""Port of node 0."""
SECRET_FILE_VARIABLE = "PLAIT_SECRET_FILE"
"""The file with the secret on each node."""
GPUS_VARIABLE = "PLAIT_GPUS"
"""Number of GPUs that the scheduler gave a node."""
USUAL_PORT = 24717
LONGEST_JOB_NAME = 40
"""Kubernetes appends to it and allows 63 characters in all."""
SAVE_GRACE_S = 300
"""Time for a run to save before its node is taken away."""
SECRET_SUFFIX = ".secret"
"""Suffix of the file with the secret, which node 0 makes for the others."""
AGAIN_SUFFIX = ".again"
"""Suffix of the file that node 0 leaves at its end if the run is saved and not finished."""
HASH_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes of a job, and the partition that they come from, if one is named."""

    nodes: int
    gpus: int
    """GPUs of each node; 0: the run computes on processors."""
    partition: str = ""
    device: str = ""
    """The catalogue's name of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A recipe or a program, and the nodes that it runs on; node 0 is in the first group."""

    name: str
    """The job's name, in characters that schedulers accept; see cluster_job_name."""
    run: str
    """The run's name, or the program's without ".py"."""
    target: tuple[str, ...]
    """The recipe with its settings, or the program with its arguments, as typed."""
    groups: tuple[NodeGroup, ...]
    time_s: int | None = None
    """The time limit; None leaves it to the scheduler."""
    grace_s: int = SAVE_GRACE_S
    why: tuple[str, ...] = ()
    """The reasons for the number of nodes, which become comments of what is submitted."""
    near: str = ""
    """Why all nodes must be near each other; empty where it is only better."""

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def uses_gpus(self) -> bool:
        return any(group.gpus for group in self.groups)


def node_arguments(job: ClusterJob, target: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The arguments of Python on each node."""
    return ["-P", "-m", "plait", "node", "--nodes", str(job.nodes), *options, "--", *target]


def place_variables(rank: int, leader: str, port: int) -> dict[str, str]:
    """The environment variables by which a node knows its number, and where node 0 listens."""
    return {RANK_VARIABLE: str(rank), LEADER_VARIABLE: leader, PORT_VARIABLE: str(port)}


def cluster_job_name(text: str) -> str:
    """A run's name as schedulers take it: "My_Run" -> "my-run-7e8a28".

    A changed name ends in a hash of the original, since two names may become alike. Raises PlaitError where nothing is
    left of it.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name:
        raise PlaitError(
            f'"{text}" has no letter or digit that a scheduler takes in a name; write run.name="first", or rename the '
            "program's file"
        )
    if name == text and len(name) <= LONGEST_JOB_NAME and name[0].isalpha():
        return name
    name = name if name[0].isalpha() else f"run-{name}"
    digits = sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    return f"{name[: LONGEST_JOB_NAME - HASH_DIGITS - 1].rstrip('-')}-{digits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The record of a submitted job, `.plait/submitted/NAME.json`, by which it is watched, ended and brought back."""

    name: str
    """The run's, or the program's without ".py"."""
    label: str
    """The name that the scheduler shows."""
    scheduler: Scheduler
    job: str = ""
    """Slurm's number of the job, the kind of the object in Kubernetes, or the address of Ray."""
    is_array: bool = False
    """Whether Slurm starts it several times, each time as a task with a run of its own."""
    namespace: str = ""
    image: str = ""
    """The image of its pods."""
    volume: str = ""
    """The claim of the volume that they work on."""
    machines: tuple[str, ...] = ()
    """Names that ssh takes."""
    folder: str = ""
    """The working folder on those machines."""


def _record_file(name: str, working: WorkingFolder) -> Path:
    return working.cache / "submitted" / f"{name}.json"


def keep_record(record: Submitted, working: WorkingFolder = CURRENT_FOLDER) -> None:
    """Write a job's record; replaces an earlier one of that name."""
    file = _record_file(record.name, working)
    make_private_folder(file.parent)
    replace_file(file, f"{json.dumps(asdict(record), indent=2)}\n".encode())


def find_record(name: str, working: WorkingFolder = CURRENT_FOLDER) -> Submitted:
    """The record of a submitted job; raises PlaitError where there is none."""
    found = record_if_any(name, working)
    if found is not None:
        return found
    known = sorted(path.stem for path in (working.cache / "submitted").glob("*.json"))
    hint = f"submitted were: {', '.join(known[:10])}" if known else "submit it by plait submit, or look by plait status"
    raise PlaitError(f'no job "{name}" was submitted from this folder; {hint}')


def record_if_any(name: str, working: WorkingFolder = CURRENT_FOLDER) -> Submitted | None:
    """The record of a submitted job; None where there is none. Raises PlaitError for a damaged one."""
    file = _record_file(name, working)
    if "/" in name or not file.is_file():
        return None
    try:
        return typed_value(Submitted, parse_object(read_regular_file(file)))
    except (OSError, ValueError) as error:
        raise PlaitError(f"{file} is damaged ({error}); remove it, and look for the job in the scheduler") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A job as text, and the call that sends it."""

    file: str
    """The usual name of a file with this text."""
    text: str
    run: str
    """The name by which the job is found again."""
    send: Callable[[Screen, WorkingFolder], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSystem:
    """What plait does with Slurm, Kubernetes, Ray, ssh, SkyPilot or dstack; each operation raises PlaitError."""

    options: Mapping[str, Option]
    """The keys of `--with`."""
    cluster: Callable[[SubmitRequest, Mapping[str, str]], Cluster]
    """The machines that it has; the second argument holds the values of `--with`."""
    prepare: Callable[[ClusterJob, SubmitRequest, Mapping[str, str], RunConfig | None], Outgoing]
    """The job as text; without a recipe for a program."""
    state: Callable[[Submitted], str]
    log_lines: Callable[[Submitted, WorkingFolder], Iterator[str]]
    """The output of node 0 so far."""
    end: Callable[[Submitted], None]
    """Ends the job, which saves first."""
    copy: Callable[[Submitted, Path, WorkingFolder, Screen], None] | None = None
    """Copies the run's folder (relative to the working folder) here; None where it is here already."""
