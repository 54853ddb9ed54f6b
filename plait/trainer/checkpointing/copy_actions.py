"""What the loop and the agreement of all ranks do with copies of the state in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.launch.values.copies import CopyStore, KeptCopy
from plait.machines.machine import free_memory_bytes
from plait.parallel.mesh import Sums
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.from_memory import restore_from_memory
from plait.trainer.checkpointing.in_memory import HostCopies, MemoryCopies
from plait.trainer.state import TrainState

_MEMORY_KEPT = 0.25
"""Share of the free memory that copies may not take."""
_INSTEAD = "after a failure the run goes on from its newest checkpoint"


class CopyActions:
    """One rank's copies, or none of them: every rank has one and makes the same calls in the same order.

    `store` is None where nobody holds copies.
    """

    def __init__(self, store: CopyStore | None, ranks: range, lineage: int, world: Sums) -> None:
        self._at = HostCopies(store=store, ranks=ranks, lineage=lineage) if store is not None else None
        self._world = world
        self._newest: KeptCopy | None = None
        self.copies: MemoryCopies | None = None

    def restore(self, assembly: Assembly, step: int) -> TrainState:
        """Go on from the copies of this step. Every rank must call it; raises RunFailed on all where one cannot."""
        assert self._at is not None, "who holds no copies asks for none"
        state, self._newest = restore_from_memory(assembly, self._at, step, self._world)
        return state

    def begin(self, assembly: Assembly) -> str:
        """Make copies from now on, where somebody holds them; returns a sentence for the log where nobody does, or
        ""."""
        if self._at is None:
            return f"the state is not kept in memory: nobody outlives workers that torchrun started; {_INSTEAD}"
        self.copies = MemoryCopies(assembly, self._at, self._world, self._newest)
        return ""

    @property
    def are_made(self) -> bool:
        """Whether copies are made, the same on every rank."""
        return self.copies is not None and self.copies.state == "on"

    def prepare(self) -> str:
        """Take the memory for copies, where that is not done; returns a warning for the log, or "". Every rank must
        call it, before a state is copied or saved."""
        if self.copies is None or not self.are_made or self.copies.is_prepared:
            return ""
        why = self.copies.prepare((1 - _MEMORY_KEPT) * free_memory_bytes())
        return why and f"warning  the state is not kept in memory: {why}; {_INSTEAD}"

    def copy(self, state: TrainState) -> str:
        """Copy a state; returns a warning for the log, or "". Every rank must call it."""
        warning = self.prepare()
        if self.copies is not None and self.are_made:
            self.copies.copy(state)
        return warning

    def told(self) -> Sequence[int]:
        """What this rank says in the agreement of all after a step, the largest of all ranks being the answer: the
        microseconds that its last copy took, if that is news, and whether it could make none."""
        if self.copies is None:
            return 0, 0
        cost_s, self.copies.cost_s = self.copies.cost_s, 0.0
        return round(cost_s * 1e6), int(bool(self.copies.failure))

    def agreed(self, cost_us: int, failed: int, tell: Callable[..., None]) -> float:
        """Take note of the answer; returns the seconds that the last copy took, where that is news, and reports it."""
        copies = self.copies
        if copies is None or not self.are_made:
            return 0.0
        if failed:
            copies.stop()
            tell("note", text=f"warning  no memory was left for a copy of the state: no more are made; {_INSTEAD}")
        elif cost_us and copies.newest_step is not None:
            tell("copied", step=copies.newest_step, seconds=cost_us / 1e6)
        return cost_us / 1e6
