"""Which candidates fit into the memory of their devices, and keep tensor and context groups inside a host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.planner.heterogeneous.assignment import WorkAssigner
from plait.planner.heterogeneous.host_permutations import crosses_hosts_needlessly
from plait.planner.heterogeneous.micro_batch_limits import memory_fit
from plait.planner.heterogeneous.replica_memory import MemoryBudget
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.workload import Workload
from plait.planner.search.enumeration import Constraints
from plait.planner.search.layout_cost import bytes_of
from plait.planner.search.model_error import memory_error
from plait.units import format_bytes, format_count


class DoesNotFit(PlaitError):
    """No layout fits the devices; carries what is needed to suggest what would.

    `least_bytes` is what a device must have for the leanest layout, with what the forecast may be off by.
    """

    def __init__(self, workload: Workload, cluster: Cluster, assigner: WorkAssigner, least_bytes: float) -> None:
        have = format_bytes(min(island.device.memory_bytes for island in cluster.islands))
        super().__init__(
            f"a model of {format_count(workload.parameters)} parameters fits no layout of {cluster.name}: the "
            f"leanest needs {format_bytes(least_bytes)} a device (with the {memory_error(workload, cluster):.1%} that "
            f"such forecasts are off by in the median), and {assigner.devices.smallest} has {have}"
        )
        self.workload, self.cluster, self.least_bytes = workload, cluster, least_bytes
        self.profile, self.smallest = assigner.profile, assigner.devices.smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasibleCandidates:
    """Masks of candidates that the devices can hold; arrays over all that were enumerated."""

    on_hosts: NDArray[np.bool_]
    """Mask: no tensor or context group spans two hosts needlessly."""
    fits: NDArray[np.bool_]
    """Mask: every device holds its share."""
    judged_bytes: Reals
    """Bytes on the device with least room left."""
    n_microbatches: Counts
    budget: MemoryBudget

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.on_hosts & self.fits


def sparing_budget(workload: Workload, cluster: Cluster) -> MemoryBudget:
    """Memory that a layout chosen by plait may fill: the forecast's own error stays free."""
    return MemoryBudget.for_chosen_layout(memory_error(workload, cluster))


def feasible_candidates(
    assigner: WorkAssigner, cluster: Cluster, candidates: Candidates, constraints: Constraints
) -> FeasibleCandidates:
    """Judge every candidate; raises DoesNotFit where none fits.

    The forecast's own error stays free; what a person has named may fill a device to the last byte where nothing of it
    fits otherwise.
    """
    anywhere = np.ones(len(candidates), dtype=bool)
    on_hosts = anywhere if constraints.degrees else ~crosses_hosts_needlessly(cluster, candidates)
    budget = sparing_budget(assigner.workload, cluster)
    judged, fits, n_microbatches = _memory_of(assigner, candidates, budget)
    if constraints.degrees and not (on_hosts & fits).any():
        budget = MemoryBudget.for_requested_layout(cluster, assigner.profile)
        judged, fits, n_microbatches = _memory_of(assigner, candidates, budget)
    if not (on_hosts & fits).any():
        least = (judged[on_hosts] if on_hosts.any() else judged).min() / min(budget.share, 1.0)
        raise DoesNotFit(assigner.workload, cluster, assigner, float(least))
    return FeasibleCandidates(
        on_hosts=on_hosts, fits=fits, judged_bytes=judged, n_microbatches=n_microbatches, budget=budget
    )


def _memory_of(
    assigner: WorkAssigner, candidates: Candidates, budget: MemoryBudget
) -> tuple[Reals, NDArray[np.bool_], Counts]:
    """Per candidate: bytes on the device with least room left once shares grow, whether every device holds its share,
    and the micro-batches per step."""
    profile, workload = assigner.profile, assigner.workload
    judged, fits = np.empty(len(candidates)), np.empty(len(candidates), dtype=bool)
    numbers = -(-workload.batch_sequences // (candidates.data_parallel_degree * candidates.micro_sequences))
    for group in assigner.grouped(candidates):
        if not group.needs_memory_per_device:
            needed = bytes_of(workload, group.candidates, profile)
            have = budget.usable_bytes(np.array(min(assigner.devices.memory_bytes), dtype=np.float64))
            judged[group.indices], fits[group.indices] = needed, needed <= have
            continue
        held = memory_fit(workload, group, profile, budget)
        judged[group.indices], fits[group.indices], numbers[group.indices] = held.most, held.fits, held.n_microbatches
    return judged, fits, numbers
