"""A module whose import starts a thread, which a fork would not copy."""

from __future__ import annotations

import threading

from plait.launch.values.job import RankContext

threading.Thread(target=threading.Event().wait, daemon=True).start()


def never(context: RankContext, argument: str) -> None:
    raise AssertionError("no rank of this module may be forked")
