"""Sequences of a micro-batch that each data-parallel rank can take, and the bytes that this fills on its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.planner.heterogeneous.assignment import CandidateGroup
from plait.planner.heterogeneous.replica_memory import MemoryBudget, ReplicaMemory, ReplicaMemoryEstimator, cut_share
from plait.planner.problem.candidates import Counts, Reals, group_equal_columns
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryFit:
    """Whether the candidates of one assignment fit their devices; arrays over candidates."""

    most: Reals
    """Bytes on the device with least room left when shares grow."""
    fits: NDArray[np.bool_]
    n_microbatches: Counts
    """Micro-batches of the data-parallel rank that has most."""


def memory_fit(workload: Workload, group: CandidateGroup, profile: SoftwareProfile, budget: MemoryBudget) -> MemoryFit:
    """Whether each device holds its share of the state and of the batch.

    A candidate fits only if some rank can take the micro-batch that it asks for: with smaller ones it is another
    candidate.
    """
    estimator, equal_ranks = _estimator(workload, group, profile, budget)
    held = [estimator.at_most(ranks) for ranks in equal_ranks]
    replica, rank = _fullest([(one.most, one.capacity_bytes) for one in held])
    most = np.stack([one.most for one in held])[replica, rank, np.arange(len(rank))]
    meant = np.any([one.limit == one.requested for one in held], axis=0)
    requested = np.max([one.most_requested.max(axis=0) for one in held], axis=0)
    fit = np.all([(one.most <= budget.usable_bytes(one.capacity_bytes)[:, None]).all(axis=0) for one in held], axis=0)
    numbers = np.max([one.number for one in held], axis=0)
    return MemoryFit(most=np.where(meant, most, requested), fits=meant & fit, n_microbatches=numbers)


def replica_memory_of(
    workload: Workload, group: CandidateGroup, profile: SoftwareProfile, budget: MemoryBudget
) -> list[ReplicaMemory]:
    """The data-parallel ranks of a group's assignment, equal ones together, with the bytes that they need."""
    estimator, equal_ranks = _estimator(workload, group, profile, budget)
    return [estimator.at_present_share(ranks) for ranks in equal_ranks]


def _estimator(
    workload: Workload, group: CandidateGroup, profile: SoftwareProfile, budget: MemoryBudget
) -> tuple[ReplicaMemoryEstimator, list[Counts]]:
    """The estimates for a group's data-parallel ranks, and which of them are equal."""
    assert group.assignment is not None
    assignment, capacity = group.assignment, group.assignment.memory_bytes
    equal_ranks = group_equal_columns(np.vstack([capacity, assignment.sequences_per_replica]))
    requested = np.max(
        [cut_share(share, group.candidates.micro_sequences)[1] for share in set(assignment.sequences_per_replica)],
        axis=0,
    )
    # A requested micro-batch that is larger than every share stays: a share may grow into it.
    requested = np.maximum(
        requested,
        group.candidates.micro_sequences * (group.candidates.micro_sequences > max(assignment.sequences_per_replica)),
    )
    estimator = ReplicaMemoryEstimator(
        workload=workload,
        candidates=group.candidates,
        profile=profile,
        assignment=assignment,
        budget=budget,
        requested=requested,
    )
    return estimator, equal_ranks


def tightest_replica(replicas: list[ReplicaMemory]) -> tuple[Counts, Counts]:
    """For each candidate the index of the replicas, and the pipeline rank in them, whose device has least room left."""
    return _fullest([(one.needed_bytes, one.capacity_bytes) for one in replicas])


def _fullest(held: Sequence[tuple[Reals, Reals]]) -> tuple[Counts, Counts]:
    """For each candidate the index in the sequence, and the pipeline rank, that fills the largest share of its
    memory."""
    filled = np.stack([needed / capacity[:, None] for needed, capacity in held])
    return np.divmod(filled.reshape(-1, filled.shape[-1]).argmax(axis=0), filled.shape[1])
