"""Sequences of a micro-batch that each data-parallel rank can take, and the bytes that this fills on its devices."""

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
    """Bytes of device memory that the estimate may use: a share of the whole, plus what it does not count."""

    share: float = 1.0
    """Share of the device's memory."""
    outside_bytes: float = 0.0
    """Bytes that the estimate counts although a requested layout may do without them."""

    @staticmethod
    def for_requested_layout(cluster: Cluster, profile: SoftwareProfile) -> MemoryBudget:
        """The budget of a layout that a person named: it is refused only where it cannot run even if a GPU's
        allocator wastes nothing."""
        gpus = any(island.device.kind != "cpu" for island in cluster.islands)
        return MemoryBudget(share=ALLOCATOR_RESERVE, outside_bytes=profile.outside_bytes) if gpus else MemoryBudget()

    def usable_bytes(self, memory_bytes: Reals) -> Reals:
        """Bytes that the estimate may reach on devices of so much memory."""
        return self.share * memory_bytes + self.outside_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatches:
    """Number and size of a replica's micro-batches, one entry per candidate."""

    number: Counts
    size: Counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LimitedReplicas:
    """Micro-batches that equal data-parallel ranks can take, and the bytes that they may come to need; arrays over
    candidates."""

    replicas: Counts
    """Indices of these data-parallel ranks."""
    requested: Counts
    """Sequences of the largest micro-batch over all ranks, if each held what the candidate asks for."""
    limit: Counts
    """Sequences of a micro-batch, at most: the requested ones, or fewer where the devices hold no more."""
    number: Counts
    """Micro-batches per step, ignoring collectives inside them."""
    size: Counts
    """Sequences of the largest of them."""
    most: Reals
    """Shape [pipeline, candidates]: bytes on each device at the limit and with several micro-batches, which a share
    that grows during the run may bring."""
    most_requested: Reals
    """Shape [pipeline, candidates]: the same bytes if the limit were what is requested."""
    capacity_bytes: Reals
    """Shape [pipeline]: memory of those devices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaMemory(LimitedReplicas):
    """LimitedReplicas with the bytes that they need at their present share."""

    needed_bytes: Reals
    """Shape [pipeline, candidates]: bytes on each device."""
    limits: MicroBatches
    """Equal micro-batches that fill as much memory."""

    def batch(self, candidates: Candidates) -> tuple[Counts, Candidates]:
        """Sequences of a step in which every rank had these micro-batches, and the candidates for it."""
        like = self.limits
        return like.number * like.size * candidates.data_parallel_degree, replace(candidates, micro_sequences=like.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryFit:
    """Whether the candidates of one assignment fit their devices; arrays over candidates."""

    most: Reals
    """Bytes on the device with least room left when shares grow."""
    fits: NDArray[np.bool_]
    n_microbatches: Counts
    """Micro-batches of the data-parallel rank that has most."""


def memory_fit(workload: Workload, group: CandidateGroup, profile: SoftwareProfile, budget: MemoryBudget) -> MemoryFit:
    """Whether each device holds its part. A candidate counts as fitting only if some rank can take the micro-batch
    that it asks for: with smaller ones it is another candidate."""
    scale, alike = _scale(workload, group, profile, budget)
    held = [scale.limited(parts) for parts in alike]
    part, rank = _fullest([(one.most, one.capacity_bytes) for one in held])
    most = np.stack([one.most for one in held])[part, rank, np.arange(len(part))]
    meant = np.any([one.limit == one.requested for one in held], axis=0)
    asked = np.max([one.most_requested.max(axis=0) for one in held], axis=0)
    fit = np.all([(one.most <= budget.usable_bytes(one.capacity_bytes)[:, None]).all(axis=0) for one in held], axis=0)
    numbers = np.max([one.number for one in held], axis=0)
    return MemoryFit(most=np.where(meant, most, asked), fits=meant & fit, n_microbatches=numbers)


def replica_memory_of(
    workload: Workload, group: CandidateGroup, profile: SoftwareProfile, budget: MemoryBudget
) -> list[ReplicaMemory]:
    """The data-parallel ranks of a group's assignment, equal ones together, with the bytes that they need."""
    scale, alike = _scale(workload, group, profile, budget)
    return [scale.portion(parts) for parts in alike]


def _scale(
    workload: Workload, group: CandidateGroup, profile: SoftwareProfile, budget: MemoryBudget
) -> tuple[_ReplicaScale, list[Counts]]:
    """What estimates a group's data-parallel ranks, and which of them are equal."""
    assert group.assignment is not None
    assignment, have = group.assignment, group.assignment.memory_bytes
    alike = indices_of_equal_columns(np.vstack([have, assignment.sequences_per_replica]))
    asked = np.max(
        [_cut(share, group.candidates.micro_sequences)[1] for share in set(assignment.sequences_per_replica)], axis=0
    )
    # One that all of a share goes into may have room for more, should the share grow.
    asked = np.maximum(
        asked,
        group.candidates.micro_sequences * (group.candidates.micro_sequences > max(assignment.sequences_per_replica)),
    )
    scale = _ReplicaScale(
        workload=workload,
        candidates=group.candidates,
        profile=profile,
        assignment=assignment,
        budget=budget,
        asked=asked,
    )
    return scale, alike


def tightest_replica(portions: list[ReplicaMemory]) -> tuple[Counts, Counts]:
    """For each candidate the index of the replicas, and the pipeline rank in them, whose device has least room left."""
    return _fullest([(one.needed_bytes, one.capacity_bytes) for one in portions])


def _fullest(held: Sequence[tuple[Reals, Reals]]) -> tuple[Counts, Counts]:
    """For each candidate the index in the sequence, and the pipeline rank, that fills the largest share of its
    memory."""
    filled = np.stack([needed / have[:, None] for needed, have in held])
    return np.divmod(filled.reshape(-1, filled.shape[-1]).argmax(axis=0), filled.shape[1])


def memory_of_rank(
    workload: Workload,
    one: Candidates,
    profile: SoftwareProfile,
    assignment: WorkAssignment,
    portion: ReplicaMemory,
    rank: int,
) -> MemoryEstimate:
    """The items of memory of a single candidate on one pipeline rank of these replicas."""
    batch, taken = portion.batch(one)
    whole = replace(workload, batch_sequences=int(batch[0]))
    if assignment.ranks == 1:
        return estimate_memory(whole, taken, profile)
    last = rank == assignment.ranks - 1
    return estimate_memory(
        *workload_of_one_rank(whole, taken, assignment.stages_per_rank[rank], last=last),
        profile,
        end="last" if last else "first",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ReplicaScale:
    """Estimates the memory of the data-parallel ranks of one assignment."""

    workload: Workload
    candidates: Candidates
    profile: SoftwareProfile
    assignment: WorkAssignment
    budget: MemoryBudget
    asked: Counts

    def portion(self, parts: Counts) -> ReplicaMemory:
        """Micro-batches and bytes of some equal data-parallel ranks at their present share."""
        found, every = self.limited(parts), np.arange(len(self.asked))
        number, size = found.number.copy(), found.size.copy()
        needed = found.most.copy()
        fewer = every[(size < found.limit) | (number == 1) | (self.assignment.ranks > 1)]
        fewer = fewer if len(self.assignment.sequences_per_replica) > 1 else every[:0]
        needed[:, fewer] = self._bytes((number * size)[fewer], size[fewer], fewer)
        # Where the first one alone is so large, no gradients of others stand beside it.
        first = every[(number * (size - 1) + 1 == self.assignment.sequences_per_replica[int(parts[0])]) & (number > 1)]
        if len(first) and self.assignment.ranks == 1:
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
        """Micro-batches of some equal data-parallel ranks, and the bytes that they need at the most."""
        assignment = self.assignment
        share, have = assignment.sequences_per_replica[int(parts[0])], assignment.memory_bytes[:, parts[0]]
        limit, every = self.asked.copy(), np.arange(len(self.asked))
        most_asked = self._most(share, limit, every)
        most, budget = most_asked.copy(), self.budget.usable_bytes(have)[:, None]
        # Where devices are alike, or only one part is, other candidates take fewer at a time.
        smaller = len(np.unique(assignment.memory_bytes)) > 1 and len(assignment.sequences_per_replica) > 1
        over = every[(most > budget).any(axis=0) & (limit > 1)] if smaller else every[:0]
        while len(over):
            limit[over] = -(-limit[over] // 2)
            most[:, over] = self._most(share, limit[over], over)
            over = over[(most[:, over] > budget).any(axis=0) & (limit[over] > 1)]
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
        if len(self.assignment.sequences_per_replica) == 1:
            number, size = _cut(share, limit)
            return self._bytes(number * size, size, rows)
        # One keeps a micro-batch, and the gradients of others before it; a pipeline keeps several, or all there can be.
        grown = (
            sum(self.assignment.sequences_per_replica) - len(self.assignment.sequences_per_replica) + 1
            if self.assignment.ranks > 1
            else share
        )
        return self._bytes(np.maximum(-(-grown // limit), 2) * limit, limit, rows)

    def _bytes(self, each: Counts, size: Counts, rows: Counts) -> Reals:
        """(ranks, rows): bytes of a device where each part of the batch has `each` sequences, `size` at a time."""
        assignment = self.assignment
        taken = replace(self.candidates.select(rows), micro_sequences=size)
        found = np.empty((assignment.ranks, len(rows)))
        for count in np.unique(each):
            here = np.flatnonzero(each == count)
            whole = replace(self.workload, batch_sequences=int(count) * len(assignment.sequences_per_replica))
            if assignment.ranks > 1:
                found[:, here] = bytes_per_rank(whole, taken.select(here), self.profile, assignment.stages_per_rank)
            else:
                found[0, here] = estimate_memory(whole, taken.select(here), self.profile).reserved
        return found


def _cut(share: int, limit: Counts) -> tuple[Counts, Counts]:
    """Number of micro-batches of a share, and sequences of the largest: as data/portions.py cuts it."""
    number = -(-share // limit)
    return number, -(-share // number)
