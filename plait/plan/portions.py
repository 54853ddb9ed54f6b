"""What each part of the batch takes at a time, and what that fills: by its share, and by what its devices hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plait.cluster.cluster import Cluster
from plait.plan.candidates import Candidates, Counts, Reals
from plait.plan.deal import Deal, Group, lone_stage, stage_bytes
from plait.plan.memory import RESERVED, Memory, memory
from plait.plan.stack import Stack
from plait.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What of a device's memory a layout may fill by this model's sums."""

    share: float = 1.0
    outside_bytes: float = 0.0

    @staticmethod
    def of_asked(cluster: Cluster, stack: Stack) -> Room:
        """One that was asked for is refused only where it cannot run even if a GPU's allocator wastes nothing."""
        gpus = any(island.device.kind != "cpu" for island in cluster.islands)
        return Room(share=RESERVED, outside_bytes=stack.outside_bytes) if gpus else Room()

    def on(self, memory_bytes: Reals) -> Reals:
        """Bytes of it."""
        return self.share * memory_bytes + self.outside_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """One part of the batch, or several alike, in layouts of one deal; arrays over candidates."""

    parts: Counts
    """Which they are."""
    limit: Counts
    """Sequences at a time, at most: `micro_sequences`, or fewer where the part's devices hold no more."""
    number: Counts
    """Micro-batches of a step, as if it met nobody in them."""
    size: Counts
    """Sequences of the largest of them."""
    needed: Reals
    """(ranks of the pipeline, candidates): bytes on each of its devices."""
    have: Reals
    """(ranks of the pipeline): bytes that those devices have."""

    def fits(self, room: Room) -> NDArray[np.bool_]:
        """Which candidates its devices hold."""
        return np.all(self.needed <= room.on(self.have)[:, None], axis=0)

    def batch(self, candidates: Candidates) -> tuple[Counts, Candidates]:
        """Sequences of a step in which all parts were like this one, and the candidates for it."""
        return self.number * self.size * candidates.batch_parts, replace(candidates, micro_sequences=self.size)


def portions_of(workload: Workload, group: Group, stack: Stack) -> list[Portion]:
    """The parts of a group's deal, those that are alike together."""
    assert group.deal is not None
    deal, have = group.deal, group.deal.memory_bytes
    _, kind = np.unique(np.vstack([have, deal.shares]), axis=1, return_inverse=True)
    alike = [np.flatnonzero(kind.ravel() == one) for one in range(kind.max() + 1)]
    smaller = len(np.unique(have)) > 1
    return [_portion(workload, group.candidates, stack, deal, (parts, have[:, parts[0]], smaller)) for parts in alike]


def tightest(portions: list[Portion]) -> tuple[Counts, Counts]:
    """For each candidate the portion, and in it the rank of the pipeline, whose device has least room left."""
    filled = np.stack([one.needed / one.have[:, None] for one in portions])
    return np.divmod(filled.reshape(-1, filled.shape[-1]).argmax(axis=0), filled.shape[1])


def memory_on(workload: Workload, one: Candidates, stack: Stack, deal: Deal, portion: Portion, rank: int) -> Memory:
    """The items of memory of a single candidate on a device of that portion."""
    batch, taken = portion.batch(one)
    whole = replace(workload, batch_sequences=int(batch[0]))
    if deal.ranks == 1:
        return memory(whole, taken, stack)
    end = -1 if rank == deal.ranks - 1 else 0
    return memory(*lone_stage(whole, taken, int(deal.held[rank]), end), stack)


def _portion(
    w: Workload, candidates: Candidates, stack: Stack, deal: Deal, place: tuple[Counts, Reals, bool]
) -> Portion:
    parts, have, smaller = place
    share = deal.shares[int(parts[0])]
    limit = candidates.micro_sequences.copy()
    number, size = _cut(share, limit)
    needed = _bytes(w, candidates, stack, deal, number * size, size)
    # Where devices are alike, other candidates take fewer at a time.
    over = np.flatnonzero((needed > have[:, None]).any(axis=0) & (limit > 1)) if smaller else np.empty(0, dtype=int)
    while len(over):
        limit[over] = -(-limit[over] // 2)
        number[over], size[over] = _cut(share, limit[over])
        needed[:, over] = _bytes(w, candidates.select(over), stack, deal, number[over] * size[over], size[over])
        over = over[(needed[:, over] > have[:, None]).any(axis=0) & (limit[over] > 1)]
    return Portion(parts=parts, limit=limit, number=number, size=size, needed=needed, have=have)


def _cut(share: int, limit: Counts) -> tuple[Counts, Counts]:
    """Micro-batches of a share, and the size of the largest: as data/portions.py cuts it."""
    number = -(-share // limit)
    return number, -(-share // number)


def _bytes(w: Workload, c: Candidates, stack: Stack, deal: Deal, each: Counts, size: Counts) -> Reals:
    """(ranks, candidates): bytes of a device where each part of the batch has `each` sequences, `size` at a time."""
    taken = replace(c, micro_sequences=size)
    found = np.empty((deal.ranks, len(c)))
    for count in np.unique(each):
        rows = np.flatnonzero(each == count)
        whole, few = replace(w, batch_sequences=int(count) * len(deal.shares)), taken.select(rows)
        if deal.ranks > 1:
            found[:, rows] = stage_bytes(whole, few, stack, deal.held)
        else:
            found[0, rows] = memory(whole, few, stack).reserved
    return found
