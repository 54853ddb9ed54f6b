"""A rank's context where another launcher started it: torchrun, or whatever sets torch.distributed's variables."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.launch.local.guard import die_with_parent
from plait.launch.local.heap import keep_freed_memory
from plait.launch.local.rank import StopFlag
from plait.launch.local.signals import STOP_SIGNALS
from plait.launch.values.job import Message, RankContext
from plait.machines.machine import usable_cores

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVariables:
    """The launcher's facts about this process; None where it gives none."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None

    def __post_init__(self) -> None:
        local_rank = 0 if self.local_rank is None else self.local_rank
        local_world_size = self.world_size if self.local_world_size is None else self.local_world_size
        _require(self.rank < self.world_size, f"RANK = {self.rank}", f"less than WORLD_SIZE = {self.world_size}")
        _require(
            local_world_size <= self.world_size,
            f"LOCAL_WORLD_SIZE = {local_world_size}",
            f"at most WORLD_SIZE = {self.world_size}",
        )
        _require(
            local_rank < local_world_size,
            f"LOCAL_RANK = {local_rank}",
            f"less than LOCAL_WORLD_SIZE = {local_world_size}",
        )
        _require(local_rank <= self.rank, f"LOCAL_RANK = {local_rank}", f"at most RANK = {self.rank}")


def _require(fact: bool, found: str, wanted: str) -> None:
    if not fact:
        raise PlaitError(f"{found} in the environment should be {wanted}; correct what starts this process")


def launch_variables(environment: Mapping[str, str]) -> LaunchVariables | None:
    """What the launcher of this process set; None where there is none, or it started this process alone and without a
    place to meet. Raises PlaitError for variables that are missing, no numbers or contradict each other."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing and environment.get("WORLD_SIZE") == "1" and environment.get("RANK", "0") == "0":
        return None
    if missing:
        raise PlaitError(
            f"RANK or WORLD_SIZE is set in the environment, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: set {', '.join(_NEEDED)} for each process, or unset RANK and "
            "WORLD_SIZE to have plait start its workers itself"
        )
    if not 0 < _number(environment, "MASTER_PORT") < 1 << 16:
        raise PlaitError(
            f"MASTER_PORT = {environment['MASTER_PORT']} in the environment is not a port; choose 1024 to 65535"
        )
    return LaunchVariables(
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else None,
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None,
    )


def torchrun_context(on_message: Callable[[Message], None] | None = None) -> RankContext | None:
    """This process's RankContext where a launcher started it, or None; main thread only.

    Rank 0's messages go to `on_message`; those of other ranks are dropped, as there is no supervisor of ours. From here
    on SIGINT, SIGTERM and SIGHUP only set the flag behind `stop_requested` (but for those that this process was
    started to ignore). Under torchrun the process dies with it, which otherwise leaves its workers running when it is
    killed; of other launchers the parent may well end first, as a shell does.

    Where the launcher does not say which ranks this host has, the context takes it for the only one.
    """
    variables = launch_variables(os.environ)
    if variables is None:
        return None
    rank, world_size = variables.rank, variables.world_size
    # Before torch is loaded: its store warns, with sixty lines each, of every stranger and of a rank 0 that has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    stop = StopFlag()
    stop.listen(*[number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])
    if sys.platform == "linux":
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(os.getppid())
        keep_freed_memory()

    def channel(kind: str, values: Mapping[str, Any]) -> None:
        if rank == 0 and on_message is not None:
            on_message(Message(rank=rank, kind=kind, values=values))

    local_world_size = world_size if variables.local_world_size is None else variables.local_world_size
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=rank if variables.local_rank is None else variables.local_rank,
        local_world_size=local_world_size,
        threads=threads_of(local_world_size),
        rendezvous="env://",
        channel=channel,
        stop=stop.requested,
    )


def threads_of(local_world_size: int) -> int:
    """Threads for each of the ranks on this host."""
    if "OMP_NUM_THREADS" in os.environ:  # torchrun sets it to 1 when it starts several
        return max(1, _number(os.environ, "OMP_NUM_THREADS"))
    return max(1, usable_cores() // local_world_size)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise PlaitError(f"{name} = {text!r} in the environment is not a number; start plait by torchrun, or unset it")
    return int(text)
