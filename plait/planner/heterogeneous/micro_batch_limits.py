"""What each part of the batch takes at a time, and what that fills: by its share, and by what its devices hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from plait.cluster.cluster import Cluster
from plait.planner.heterogeneous.assignment import CandidateGroup, WorkAssignment, bytes_per_rank, workload_of_one_rank
from plait.planner.memory.estimate import ALLOCATOR_RESERVE, MemoryEstimate, estimate_memory
from plait.planner.problem.candidates import Candidates, Counts, Reals, indices_of_equal_columns
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What of a device's memory a layout may fill by this model's sums."""

    share: float = 1.0
    outside_bytes: float = 0.0

    @staticmethod
    def for_requested_layout(cluster: Cluster, stack: SoftwareProfile) -> MemoryBudget:
        """One that was asked for is refused only where it cannot run even if a GPU's allocator wastes nothing."""
        gpus = any(island.device.kind != "cpu" for island in cluster.islands)
        return MemoryBudget(share=ALLOCATOR_RESERVE, outside_bytes=stack.outside_bytes) if gpus else MemoryBudget()

    def usable_bytes(self, memory_bytes: Reals) -> Reals:
        """Bytes of it."""
        return self.share * memory_bytes + self.outside_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatches:
    """So many micro-batches, all of the same size; arrays over candidates."""

    number: Counts
    size: Counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LimitedReplicas:
    """What one part of the batch, or several alike, takes at a time and may come to hold; layouts of one deal, arrays
    over candidates."""

    replicas: Counts
    """Which they are."""
    requested: Counts
    """Sequences of the largest micro-batch of all parts, if each held what the candidate asks for."""
    limit: Counts
    """Sequences at a time, at most: those, or fewer where the part's devices hold no more."""
    number: Counts
    """Micro-batches of a step, as if it met nobody in them."""
    size: Counts
    """Sequences of the largest of them."""
    most: Reals
    """(ranks of the pipeline, candidates): bytes on each of its devices, at its limit and with several micro-batches,
    which a share that grows may bring."""
    most_requested: Reals
    """The same if its limit were what is asked."""
    capacity_bytes: Reals
    """(ranks of the pipeline): bytes that those devices have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaMemory(LimitedReplicas):
    """The same with what it holds at the share that it is dealt."""

    needed_bytes: Reals
    """(ranks of the pipeline, candidates): bytes on each of its devices."""
    limits: MicroBatches
    """That fill as much."""

    def batch(self, candidates: Candidates) -> tuple[Counts, Candidates]:
        """Sequences of a step in which all parts were like this one, and the candidates for it."""
        like = self.limits
        return like.number * like.size * candidates.data_parallel_degree, replace(candidates, micro_sequences=like.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryFit:
    """Layouts of one deal with what they may hold; arrays over candidates."""

    most: Reals
    """Bytes on the device that has least room left when shares grow."""
    fits: NDArray[np.bool_]
    numbers: Counts
    """Micro-batches of the part that takes most."""


def memory_fit(workload: Workload, group: CandidateGroup, stack: SoftwareProfile, room: MemoryBudget) -> MemoryFit:
    """Whether each device holds what falls to it. Where all parts would take fewer than is asked, it does not count as
    what was asked for: that is another candidate."""
    scale, alike = _scale(workload, group, stack, room)
    held = [scale.limited(parts) for parts in alike]
    part, rank = _fullest([(one.most, one.capacity_bytes) for one in held])
    most = np.stack([one.most for one in held])[part, rank, np.arange(len(part))]
    meant = np.any([one.limit == one.requested for one in held], axis=0)
    asked = np.max([one.most_requested.max(axis=0) for one in held], axis=0)
    fit = np.all([(one.most <= room.usable_bytes(one.capacity_bytes)[:, None]).all(axis=0) for one in held], axis=0)
    numbers = np.max([one.number for one in held], axis=0)
    return MemoryFit(most=np.where(meant, most, asked), fits=meant & fit, numbers=numbers)


def replica_memory_of(
    workload: Workload, group: CandidateGroup, stack: SoftwareProfile, room: MemoryBudget
) -> list[ReplicaMemory]:
    """The parts of a group's deal, those that are alike together."""
    scale, alike = _scale(workload, group, stack, room)
    return [scale.portion(parts) for parts in alike]


def _scale(
    workload: Workload, group: CandidateGroup, stack: SoftwareProfile, room: MemoryBudget
) -> tuple[_Scale, list[Counts]]:
    """What a group's parts are weighed with, and which of them are alike."""
    assert group.assignment is not None
    deal, have = group.assignment, group.assignment.memory_bytes
    alike = indices_of_equal_columns(np.vstack([have, deal.sequences_per_replica]))
    asked = np.max(
        [_cut(share, group.candidates.micro_sequences)[1] for share in set(deal.sequences_per_replica)], axis=0
    )
    # One that all of a share goes into may have room for more, should the share grow.
    asked = np.maximum(
        asked, group.candidates.micro_sequences * (group.candidates.micro_sequences > max(deal.sequences_per_replica))
    )
    return _Scale(
        workload=workload, candidates=group.candidates, stack=stack, deal=deal, room=room, asked=asked
    ), alike  # fmt: skip


def tightest(portions: list[ReplicaMemory]) -> tuple[Counts, Counts]:
    """For each candidate the portion, and in it the rank of the pipeline, whose device has least room left."""
    return _fullest([(one.needed_bytes, one.capacity_bytes) for one in portions])


def _fullest(held: Sequence[tuple[Reals, Reals]]) -> tuple[Counts, Counts]:
    """Place in the sequence, and rank of the pipeline, where most of what there is is filled."""
    filled = np.stack([needed / have[:, None] for needed, have in held])
    return np.divmod(filled.reshape(-1, filled.shape[-1]).argmax(axis=0), filled.shape[1])


def memory_of_rank(
    workload: Workload, one: Candidates, stack: SoftwareProfile, deal: WorkAssignment, portion: ReplicaMemory, rank: int
) -> MemoryEstimate:
    """The items of memory of a single candidate on a device of that portion."""
    batch, taken = portion.batch(one)
    whole = replace(workload, batch_sequences=int(batch[0]))
    if deal.ranks == 1:
        return estimate_memory(whole, taken, stack)
    last = rank == deal.ranks - 1
    return estimate_memory(
        *workload_of_one_rank(whole, taken, deal.stages_per_rank[rank], last=last),
        stack,
        end="last" if last else "first",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scale:
    """What parts of the batch are weighed with."""

    workload: Workload
    candidates: Candidates
    stack: SoftwareProfile
    deal: WorkAssignment
    room: MemoryBudget
    asked: Counts

    def portion(self, parts: Counts) -> ReplicaMemory:
        """What some parts that are alike take and hold."""
        found, every = self.limited(parts), np.arange(len(self.asked))
        number, size = found.number.copy(), found.size.copy()
        needed = found.most.copy()
        fewer = every[(size < found.limit) | (number == 1) | (self.deal.ranks > 1)]
        fewer = fewer if len(self.deal.sequences_per_replica) > 1 else every[:0]
        needed[:, fewer] = self._bytes((number * size)[fewer], size[fewer], fewer)
        # Where the first one alone is so large, no gradients of others stand beside it.
        first = every[(number * (size - 1) + 1 == self.deal.sequences_per_replica[int(parts[0])]) & (number > 1)]
        if len(first) and self.deal.ranks == 1:
            alone = self._bytes(size[first], size[first], first)
            later = self._bytes((number * (size - 1))[first], size[first] - 1, first)
            needed[:, first] = np.maximum(alone, later)
            by_later = (later > alone).any(axis=0)
            number[first], size[first] = np.where(by_later, number[first], 1), size[first] - by_later
        like = MicroBatches(number=number, size=size)
        return ReplicaMemory(
            **{one.name: getattr(found, one.name) for one in fields(found)}, needed_bytes=needed, limits=like
        )

    def limited(self, parts: Counts) -> LimitedReplicas:
        """What some parts that are alike take, and hold at the most."""
        deal = self.deal
        share, have = deal.sequences_per_replica[int(parts[0])], deal.memory_bytes[:, parts[0]]
        limit, every = self.asked.copy(), np.arange(len(self.asked))
        most_asked = self._most(share, limit, every)
        most, room = most_asked.copy(), self.room.usable_bytes(have)[:, None]
        # Where devices are alike, or only one part is, other candidates take fewer at a time.
        smaller = len(np.unique(deal.memory_bytes)) > 1 and len(deal.sequences_per_replica) > 1
        over = every[(most > room).any(axis=0) & (limit > 1)] if smaller else every[:0]
        while len(over):
            limit[over] = -(-limit[over] // 2)
            most[:, over] = self._most(share, limit[over], over)
            over = over[(most[:, over] > room).any(axis=0) & (limit[over] > 1)]
        number, size = _cut(share, limit)
        return LimitedReplicas(
            replicas=parts,
            requested=self.asked,
            limit=limit,
            number=number,
            size=size,
            most=most,
            most_requested=most_asked,
            capacity_bytes=have,
        )

    def _most(self, share: int, limit: Counts, rows: Counts) -> Reals:
        """Bytes of a part whose share may change, unless it is the only one."""
        if len(self.deal.sequences_per_replica) == 1:
            number, size = _cut(share, limit)
            return self._bytes(number * size, size, rows)
        # One keeps a micro-batch, and the gradients of others before it; a pipeline keeps several, or all there can be.
        grown = (
            sum(self.deal.sequences_per_replica) - len(self.deal.sequences_per_replica) + 1
            if self.deal.ranks > 1
            else share
        )
        return self._bytes(np.maximum(-(-grown // limit), 2) * limit, limit, rows)

    def _bytes(self, each: Counts, size: Counts, rows: Counts) -> Reals:
        """(ranks, rows): bytes of a device where each part of the batch has `each` sequences, `size` at a time."""
        deal = self.deal
        taken = replace(self.candidates.select(rows), micro_sequences=size)
        found = np.empty((deal.ranks, len(rows)))
        for count in np.unique(each):
            here = np.flatnonzero(each == count)
            whole = replace(self.workload, batch_sequences=int(count) * len(deal.sequences_per_replica))
            if deal.ranks > 1:
                found[:, here] = bytes_per_rank(whole, taken.select(here), self.stack, deal.stages_per_rank)
            else:
                found[0, here] = estimate_memory(whole, taken.select(here), self.stack).reserved
        return found


def _cut(share: int, limit: Counts) -> tuple[Counts, Counts]:
    """Micro-batches of a share, and the size of the largest: as data/portions.py cuts it."""
    number = -(-share // limit)
    return number, -(-share // number)
