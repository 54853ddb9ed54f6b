"""Bytes that data-parallel ranks of unequal devices need, and the micro-batches that they can take.

A rank with little memory takes fewer sequences at a time than the candidate asks for, and more micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from plait.machines.cluster import Cluster
from plait.planner.heterogeneous.assignment import WorkAssignment
from plait.planner.memory.estimate import ALLOCATOR_RESERVE, MemoryEstimate, bytes_per_rank, estimate_memory
from plait.planner.problem.candidates import Candidates, Counts, Reals
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
    def for_chosen_layout(error: float) -> MemoryBudget:
        """The budget of a layout that plait chooses: it fits even if it needs as much more than the estimate as the
        estimate is known to be off by."""
        return MemoryBudget(share=1 / (1 + error))

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
    """Sequences of the largest micro-batch."""
    most: Reals
    """Shape [pipeline, candidates]: bytes on each device at the limit and with several micro-batches, which a share
    that grows during the run may bring."""
    most_requested: Reals
    """Shape [pipeline, candidates]: `most` if the limit were `requested`."""
    capacity_bytes: Reals
    """Shape [pipeline]: memory of those devices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaMemory(LimitedReplicas):
    """LimitedReplicas with the bytes that they need at their present share."""

    needed_bytes: Reals
    """Shape [pipeline, candidates]: bytes on each device."""
    limits: MicroBatches
    """Micro-batches of equal size that need `needed_bytes`."""

    def batch(self, candidates: Candidates) -> tuple[Counts, Candidates]:
        """Sequences of a step in which every rank had these micro-batches, and the candidates for it."""
        like = self.limits
        return like.number * like.size * candidates.data_parallel_degree, replace(candidates, micro_sequences=like.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaMemoryEstimator:
    """Estimates the memory of the data-parallel ranks of one assignment."""

    workload: Workload
    candidates: Candidates
    profile: SoftwareProfile
    assignment: WorkAssignment
    budget: MemoryBudget
    requested: Counts

    def at_present_share(self, ranks: Counts) -> ReplicaMemory:
        """Micro-batches and bytes of some equal data-parallel ranks at their present share."""
        found, every = self.at_most(ranks), np.arange(len(self.requested))
        number, size = found.number.copy(), found.size.copy()
        needed = found.most.copy()
        fewer = every[(size < found.limit) | (number == 1) | (self.assignment.ranks > 1)]
        fewer = fewer if len(self.assignment.sequences_per_replica) > 1 else every[:0]
        needed[:, fewer] = self._bytes((number * size)[fewer], size[fewer], fewer)
        # Where only the first micro-batch is that large, no accumulated gradients stand beside it.
        first = every[(number * (size - 1) + 1 == self.assignment.sequences_per_replica[int(ranks[0])]) & (number > 1)]
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

    def at_most(self, ranks: Counts) -> LimitedReplicas:
        """Micro-batches of some equal data-parallel ranks, and the bytes that they need at the most."""
        assignment = self.assignment
        share, capacity = assignment.sequences_per_replica[int(ranks[0])], assignment.memory_bytes[:, ranks[0]]
        limit, every = self.requested.copy(), np.arange(len(self.requested))
        most_requested = self._most(share, limit, every)
        most, budget = most_requested.copy(), self.budget.usable_bytes(capacity)[:, None]
        # Where devices are alike, or there is only one rank, other candidates take fewer at a time.
        smaller = len(np.unique(assignment.memory_bytes)) > 1 and len(assignment.sequences_per_replica) > 1
        over = every[(most > budget).any(axis=0) & (limit > 1)] if smaller else every[:0]
        while len(over):
            limit[over] = -(-limit[over] // 2)
            most[:, over] = self._most(share, limit[over], over)
            over = over[(most[:, over] > budget).any(axis=0) & (limit[over] > 1)]
        number, size = cut_share(share, limit)
        return LimitedReplicas(
            replicas=ranks,
            requested=self.requested,
            limit=limit,
            number=number,
            size=size,
            most=most,
            most_requested=most_requested,
            capacity_bytes=capacity,
        )

    def _most(self, share: int, limit: Counts, rows: Counts) -> Reals:
        """Bytes of a rank whose share may grow during the run, unless it is the only one."""
        if len(self.assignment.sequences_per_replica) == 1:
            number, size = cut_share(share, limit)
            return self._bytes(number * size, size, rows)
        # One rank keeps a micro-batch and the gradients accumulated before it; a pipeline keeps several micro-batches,
        # or all there can be.
        grown = (
            sum(self.assignment.sequences_per_replica) - len(self.assignment.sequences_per_replica) + 1
            if self.assignment.ranks > 1
            else share
        )
        return self._bytes(np.maximum(-(-grown // limit), 2) * limit, limit, rows)

    def _bytes(self, each: Counts, size: Counts, rows: Counts) -> Reals:
        """Shape [ranks, rows]: bytes of a device if each data-parallel rank has `each` sequences, `size` at a time."""
        assignment = self.assignment
        taken = replace(self.candidates.select(rows), micro_sequences=size)
        found = np.empty((assignment.ranks, len(rows)))
        for count in np.unique(each):
            here = np.flatnonzero(each == count)
            whole = replace(self.workload, batch_sequences=int(count) * len(assignment.sequences_per_replica))
            found[:, here] = bytes_per_rank(whole, taken.select(here), self.profile)
        return found


def cut_share(share: int, limit: Counts) -> tuple[Counts, Counts]:
    """Number of micro-batches of a share, and sequences of the largest: the same as data/micro_sizes.py."""
    number = -(-share // limit)
    return number, -(-share // number)


def memory_of_rank(
    workload: Workload, one: Candidates, profile: SoftwareProfile, replicas: ReplicaMemory, rank: int
) -> MemoryEstimate:
    """The items of memory of a single candidate on one pipeline rank of these replicas."""
    batch, taken = replicas.batch(one)
    return estimate_memory(replace(workload, batch_sequences=int(batch[0])), taken, profile, rank=rank)
