"""What a rank of a probe knows of itself and the others, and how it talks with them and with the leader."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch._C._distributed_c10d import Store

from plait.cluster.probe.timing import TimingSetup
from plait.cluster.probe.verdict import ProbedHost, host_with_rank
from plait.commands.planning.measuring import PROGRESS
from plait.commands.probing.result import read_report
from plait.launch.values.job import RankContext

_T = TypeVar("_T")
ProbeStage = Literal["messages", "arithmetic", "sums"]
_STAGES: dict[ProbeStage, tuple[int, int, str]] = {
    "messages": (0, 15, "timing messages between workers"),
    "arithmetic": (15, 70, "timing the arithmetic of a step"),
    "sums": (70, 100, "timing sums over all workers"),
}
"""Where each stage of a probe begins and ends, in percent of its time, and its words."""
TELL_EVERY_S = 1.0
"""Who hears it redraws a bar, which takes some milliseconds of a core: not more often, as all cores are being timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRank:
    """A rank of a probe, and how it reaches the others and times its work."""

    rank: int
    hosts: tuple[ProbedHost, ...]
    store: Store
    bench: TimingSetup
    tell: Callable[[ProbeStage, float], None]
    """Tells the leader how much of a stage is done, from 0 to 1; only rank 0 is heard."""

    @property
    def host(self) -> ProbedHost:
        return host_with_rank(self.hosts, self.rank)

    def publish(self, key: str, values: Any) -> None:
        """Store JSON values for the other ranks."""
        self.store.set(f"probe/{key}", json.dumps(values))

    def wait_for(self, key: str, kind: type[_T], rank: int) -> _T:
        """What a rank published under a key; blocks until it is there. Raises RunFailed where it is nothing of that
        kind."""
        where = f"worker {rank} on {host_with_rank(self.hosts, rank).name}"
        return read_report(kind, self.store.get(f"probe/{key}"), where)


def teller_of(context: RankContext, clock: Callable[[], float] = time.monotonic) -> Callable[[ProbeStage, float], None]:
    """Sends rank 0's progress to the leader: each stage at once, and then at most each TELL_EVERY_S; other ranks send
    nothing."""
    told_s, told_stage = clock(), None

    def tell(stage: ProbeStage, share: float) -> None:
        nonlocal told_s, told_stage
        if context.rank or (stage == told_stage and clock() - told_s < TELL_EVERY_S):
            return
        told_s, told_stage = clock(), stage
        first, end, words = _STAGES[stage]
        context.send(PROGRESS, done=round(first + share * (end - first)), total=100, stage=words)

    return tell
