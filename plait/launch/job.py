"""The values of the launch floor: what to start, what a rank is told, what it tells, how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plait.errors import PlaitError

RANKS_AT_MOST = 250
"""One message carries every rank's channel to the fork server, and Linux passes at most 253 descriptors in one."""

StoppedBy = Literal["finished", "SIGINT", "SIGTERM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """N ranks of one entry on this machine; the entry is called as `function(context, argument)` in each.

    `log_dir` (an existing directory) gets `rank-N.log`: everything the ranks but rank 0 print, and every rank's
    traceback. Without it the ranks share the terminal.
    """

    entry: str
    argument: str
    world_size: int
    threads: int
    preload: tuple[str, ...] = ()
    log_dir: str | None = None

    def __post_init__(self) -> None:
        module, _, function = self.entry.partition(":")
        if not (module and function):
            raise ValueError(f"entry {self.entry!r} is not of the form package.module:function")
        if not 1 <= self.world_size <= RANKS_AT_MOST:
            raise PlaitError(
                f"{self.world_size} workers cannot be started on one machine; choose 1 to {RANKS_AT_MOST} workers"
            )
        if self.threads < 1:
            raise ValueError(f"threads = {self.threads}: a rank needs at least one")

    @property
    def module(self) -> str:
        return self.entry.partition(":")[0]

    @property
    def function(self) -> str:
        return self.entry.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a rank told its supervisor: a kind and JSON values."""

    rank: int
    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Who a rank is among its peers, and its two wires: `tell` to the supervisor, `stop_requested` from it.

    `rendezvous` is the path for a `FileStore`, or "env://" under torchrun.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    threads: int
    rendezvous: str
    channel: Callable[[str, Mapping[str, Any]], None]
    stop: Callable[[], bool]

    def tell(self, kind: str, **values: Any) -> None:
        """Send one message to the supervisor; values must be JSON, at most 1 MiB; may be called from any thread."""
        self.channel(kind, values)

    def stop_requested(self) -> bool:
        """Whether this rank was asked to save and return; ranks may learn of it at different steps."""
        return self.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job whose ranks all returned came to its end, and how long it ran."""

    stopped_by: StoppedBy
    wall_s: float
