"""What each rank of `benchmarks.many_agents` does: it says that it is up, and waits for its end."""

from __future__ import annotations

import time

from plait.launch.values.job import RankContext


def wait(context: RankContext, argument: str) -> None:
    """Say so, and wait until asked to stop; in steps that are told, as training does."""
    context.send("up")
    while not context.stop_requested():
        time.sleep(0.2)
