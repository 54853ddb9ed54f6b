"""A module whose import has every forked child reset its wakeup descriptor, as asyncio's does from Python 3.12 on."""

from __future__ import annotations

import os
import signal

from plait.launch.values.job import RankContext

os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def tell(context: RankContext, argument: str) -> None:
    context.send("descriptor", descriptor=signal.set_wakeup_fd(-1))
