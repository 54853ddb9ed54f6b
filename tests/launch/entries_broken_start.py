"""A module whose import breaks the start of every rank that is forked after it."""

from __future__ import annotations

from plait.launch.local import rank
from plait.launch.values.job import RankContext


def _fail() -> None:
    raise OSError(9, "the start is broken")


rank.keep_freed_memory = _fail


def never(context: RankContext, argument: str) -> None:
    raise AssertionError("no rank may come as far as its entry")
