"""A rank's context when somebody else started it: torchrun."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from plait.cluster.topology import usable_cores
from plait.errors import PlaitError
from plait.launch.local.guard import die_with_parent
from plait.launch.local.heap import keep_freed_memory
from plait.launch.local.rank import StopFlag
from plait.launch.local.signals import STOP_SIGNALS
from plait.launch.values.job import Message, RankContext

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def torchrun_context(on_message: Callable[[Message], None] | None = None) -> RankContext | None:
    """This process's RankContext under torchrun, or None when torchrun did not start it; main thread only.

    Rank 0's messages go to `on_message`; those of other ranks are dropped, as there is no supervisor of ours. From here
    on SIGINT, SIGTERM and SIGHUP only set the flag behind `stop_requested` (but for those that this process was
    started to ignore), and the process dies with torchrun, which otherwise leaves its workers running when it is
    killed.
    """
    if any(name not in os.environ for name in _NAMES):
        return None
    rank, world_size, local_rank = _number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK")
    local_world_size = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else world_size
    stop = StopFlag()
    stop.listen(*[number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])
    if sys.platform == "linux":
        die_with_parent(os.getppid())
        keep_freed_memory()

    def channel(kind: str, values: Mapping[str, Any]) -> None:
        if rank == 0 and on_message is not None:
            on_message(Message(rank=rank, kind=kind, values=values))

    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        threads=_threads(local_world_size),
        rendezvous="env://",
        channel=channel,
        stop=stop.requested,
    )


def _threads(local_world_size: int) -> int:
    if "OMP_NUM_THREADS" in os.environ:  # torchrun sets it to 1 when it starts several
        return max(1, _number("OMP_NUM_THREADS"))
    return max(1, usable_cores() // local_world_size)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise PlaitError(f"{name} = {text!r} in the environment is not a number; start plait by torchrun, or unset it")
    return int(text)
