"""A module whose import makes every later fork hang before the rank has said that it started."""

from __future__ import annotations

import os
import signal

from plait.launch.values.job import RankContext


def _hang() -> None:
    while True:
        signal.pause()


os.register_at_fork(after_in_child=_hang)


def never(context: RankContext, argument: str) -> None:
    raise AssertionError("no rank of this module gets as far as its entry")
