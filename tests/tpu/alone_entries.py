"""Ranks that talk over gloo while each computes alone, as XLA's plugin for processors can make no slice."""

from __future__ import annotations

from plait.commands.verifying.reference import run_check_rank
from plait.launch.values.job import RankContext
from plait.parallel.tpu_slice import compute_alone


def check_rank(context: RankContext, argument: str) -> None:
    """The entry of a proof's ranks, with nothing in the environment by which torch_tpu would know of others."""
    compute_alone()
    run_check_rank(context, argument)


def begin(context: RankContext, argument: str) -> None:
    """The entry of a job for which the process that forks ranks imports all that a proof needs."""
