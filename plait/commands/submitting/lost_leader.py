"""Queues a Slurm job again whose node 0 was lost: with --no-kill Slurm lets such a job run on without its script."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from plait.commands.submitting.tools import tool_answer
from plait.deploy.slurm_script import REQUEUES_AT_MOST
from plait.errors import PlaitError
from plait.screen.screen import Screen

WATCHING_RANKS = 4
"""Nodes 1 to this one ask Slurm; not all of a large job."""
FOUND_LOST_WITHIN_S = 1800.0
"""Slurm gives a node up that has not answered for SlurmdTimeout, 300 s unless the site says otherwise."""
_LOOK_EVERY_S = 5.0


def requeue_if_leader_lost(
    rank: int | None,
    secret_file: Path | None,
    screen: Screen,
    *,
    environment: Mapping[str, str] = os.environ,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """On a node whose agent failed: wait until node 0 has ended, or Slurm has taken its node from the job, and in the
    second case queue the job again, which ends this process, too.

    Node 0 removes the secret's file when it ends in whichever way, unless its machine is lost. Returns at once outside
    Slurm, in a heterogeneous job and where scontrol is missing.
    """
    job, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
    if not job or not nodes or not rank or rank > WATCHING_RANKS or "SLURM_HET_SIZE" in environment:
        return
    deadline = time.monotonic() + FOUND_LOST_WITHIN_S
    try:
        leader = _hostnames(nodes)[0]
        while secret_file is not None and secret_file.exists() and time.monotonic() < deadline:
            left = re.search(r" NodeList=(\S+)", _scontrol("--oneliner", "show", "job", job))
            if left and leader not in _hostnames(left[1]) and restarts < REQUEUES_AT_MOST:
                screen.print(f"requeue  job {job}: its node 0 ({leader}) was lost, so it is queued again")
                _scontrol("requeue", job)
                return
            wait(_LOOK_EVERY_S)
    except PlaitError:
        return  # no scontrol here, or Slurm does not answer: its time limit ends the job


def _hostnames(nodes: str) -> list[str]:
    return _scontrol("show", "hostnames", nodes).split() or [""]


def _scontrol(*words: str) -> str:
    return tool_answer(["scontrol", *words], about="the job of this node")
