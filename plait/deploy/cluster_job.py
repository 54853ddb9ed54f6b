"""A run that a cluster is to carry out: the value from which scripts and manifests are made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from plait.errors import PlaitError

RANK_VARIABLE = "PLAIT_NODE_RANK"
"""The number of a node, from 0 on; node 0 leads."""
LEADER_VARIABLE = "PLAIT_LEADER"
"""Name or address of node 0."""
PORT_VARIABLE = "PLAIT_PORT"
"""Where node 0 listens."""
GPUS_VARIABLE = "PLAIT_GPUS"
"""How many GPUs a node was given for the run."""
USUAL_PORT = 24717
LONGEST_JOB_NAME = 40
"""Kubernetes adds to it, and takes 63 characters in all."""
SAVE_GRACE_S = 300
"""Time that a run gets to save before its node is taken away."""
REQUEUE_EXIT = 75
"""To a scheduler: the run is saved where it stands, start it again."""
SECRET_SUFFIX = ".secret"
"""Of the file that node 0 makes for the others."""
AGAIN_SUFFIX = ".again"
"""Of the file beside it by which node 0 says at its end that all is saved and more is to do."""
HASH_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes of a job, and the partition that they come from, if one is named."""

    nodes: int
    gpus: int
    """GPUs of each node; 0: the run computes on processors."""
    partition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """What is to run on how many nodes; the first group has node 0."""

    name: str
    """As schedulers take it; see cluster_job_name."""
    run: str
    """The name that a person knows it by."""
    target: tuple[str, ...]
    """The recipe with its settings, or the program with its arguments, as they were typed."""
    groups: tuple[NodeGroup, ...]
    time_s: int | None = None
    """The scheduler's limit of time; None leaves it to the scheduler."""
    grace_s: int = SAVE_GRACE_S
    why: tuple[str, ...] = ()
    """Why so many nodes, in sentences that become comments of what is submitted."""
    near: str = ""
    """Why all nodes must be near each other; empty where it is only better."""

    @property
    def nodes(self) -> int:
        """Nodes of all groups."""
        return sum(group.nodes for group in self.groups)

    @property
    def uses_gpus(self) -> bool:
        """Whether any node lends GPUs."""
        return any(group.gpus for group in self.groups)


def node_arguments(job: ClusterJob, options: Sequence[str] = ()) -> tuple[str, ...]:
    """What Python is given on each node."""
    return ("-P", "-m", "plait", "node", "--nodes", str(job.nodes), *options, "--", *job.target)


def cluster_job_name(text: str) -> str:
    """A run's name as schedulers take it; one that is changed for it ends in a hash, since two runs may be changed
    alike: "My_Run" -> "my-run-7e8a28". Raises PlaitError where nothing is left of it."""
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
