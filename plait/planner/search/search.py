"""The search: every layout is listed, refused with a reason or priced; of those about as fast as the fastest the
simplest is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.cluster.cluster import Cluster
from plait.errors import PlaitError
from plait.layout import Layout
from plait.planner.heterogeneous.assignment import WorkAssigner
from plait.planner.heterogeneous.device_speeds import device_speeds_of
from plait.planner.heterogeneous.host_permutations import crosses_hosts_needlessly
from plait.planner.heterogeneous.micro_batch_limits import MemoryBudget, memory_fit
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import PLAIT, SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.search.complexity import complexity_of
from plait.planner.search.constraints import Constraints
from plait.planner.search.enumeration import enumerate_layouts
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import bytes_of, step_seconds
from plait.planner.search.layout_kinds import kinds_that_never_fit, leanest_of_kinds
from plait.planner.search.model_error import stated_error
from plait.planner.search.validity import STAGES_WITHOUT_PIPELINE, check_shares
from plait.planner.step_time.network_model import network_of
from plait.units import format_bytes, format_count

EXCEEDS_MEMORY = "needs more memory than a device has"
CROSSES_HOSTS = "a group that cuts matrices or sequences would straddle two machines"
RECOMPUTES_NEEDLESSLY = "computes again what fits in memory anyway"


class DoesNotFit(PlaitError):
    """No layout fits the devices; carries what is needed to find out what would."""

    def __init__(self, workload: Workload, cluster: Cluster, assigner: WorkAssigner, least_bytes: float) -> None:
        have = format_bytes(min(island.device.memory_bytes for island in cluster.islands))
        super().__init__(
            f"a model of {format_count(workload.parameters)} parameters fits no layout of {cluster.name}: the "
            f"leanest needs {format_bytes(least_bytes)} a device, and {assigner.devices.smallest} has {have}"
        )
        self.workload, self.cluster, self.least_bytes = workload, cluster, least_bytes
        self.profile, self.smallest = assigner.profile, assigner.devices.smallest


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    profile: SoftwareProfile = PLAIT,
    constraints: Constraints | None = None,
    tolerance: float | Literal["stated"] = "stated",
) -> Search:
    """The simplest layout within `tolerance` of the fastest; raises PlaitError where none can be or none fits.

    "stated" is the model's own error where nothing was measured: less is no evidence.
    """
    profile, constraints = profile.on(cluster), constraints or Constraints()
    _check_constraints(workload, constraints)
    devices = device_speeds_of(workload, cluster, profile)
    assigner = WorkAssigner(workload=workload, devices=devices, profile=profile, named_shares=constraints.shares)
    listed = enumerate_layouts(workload, cluster.devices, constraints, profile)
    fit = _fit(assigner, cluster, listed.candidates, constraints)
    needless = _needless(listed.candidates, fit.kept, fit.n_microbatches)
    priced = fit.kept & ~needless
    candidates, n_microbatches = listed.candidates.select(priced), fit.n_microbatches[priced]
    step_s = step_seconds(workload, cluster, candidates, profile, assigner, n_microbatches)
    complexity = complexity_of(candidates, network_of(cluster))
    enough = stated_error(workload, cluster) if tolerance == "stated" else tolerance
    refused = {
        **listed.refused,
        CROSSES_HOSTS: int((~fit.on_hosts).sum()),
        EXCEEDS_MEMORY: int((fit.on_hosts & ~fit.fits).sum()),
        RECOMPUTES_NEEDLESSLY: int((fit.kept & needless).sum()),
    }
    return Search(
        workload=workload,
        cluster=cluster,
        profile=profile,
        constraints=constraints,
        tolerance=enough,
        candidates=candidates,
        step_s=step_s,
        judged_bytes=fit.judged_bytes[priced],
        n_microbatches=n_microbatches,
        complexity=complexity,
        chosen=simplest(step_s, complexity, enough),
        fastest=int(step_s.argmin()),
        refused={reason: count for reason, count in refused.items() if count},
        leanest_bytes=leanest_of_kinds(listed.candidates, fit.judged_bytes),
        kinds_too_large=kinds_that_never_fit(listed.candidates, fit.fits),
        assigner=assigner,
        memory_budget=fit.budget,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Which candidates fit the devices; arrays over all that were listed."""

    on_hosts: NDArray[np.bool_]
    """Mask: no tensor or context group spans two hosts needlessly."""
    fits: NDArray[np.bool_]
    """Mask: every device holds its part."""
    judged_bytes: Reals
    """Bytes on the device with least room left."""
    n_microbatches: Counts
    budget: MemoryBudget

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.on_hosts & self.fits


def _fit(assigner: WorkAssigner, cluster: Cluster, candidates: Candidates, constraints: Constraints) -> _Fit:
    """Judge every candidate; raises DoesNotFit where none fits.

    What a person has named may fill a device to the last byte where nothing of it fits otherwise.
    """
    anywhere = np.ones(len(candidates), dtype=bool)
    on_hosts = anywhere if constraints.degrees else ~crosses_hosts_needlessly(cluster, candidates)
    budget = MemoryBudget()
    judged, fits, n_microbatches = _held(assigner, candidates, budget)
    if constraints.degrees and not (on_hosts & fits).any():
        budget = MemoryBudget.for_requested_layout(cluster, assigner.profile)
        judged, fits, n_microbatches = _held(assigner, candidates, budget)
    if not (on_hosts & fits).any():
        least = judged[on_hosts].min() if on_hosts.any() else judged.min()
        raise DoesNotFit(assigner.workload, cluster, assigner, float(least))
    return _Fit(on_hosts=on_hosts, fits=fits, judged_bytes=judged, n_microbatches=n_microbatches, budget=budget)


def _check_constraints(workload: Workload, constraints: Constraints) -> None:
    """Raise PlaitError, with the mend, where named stages or shares do not go with the named degrees and the batch."""
    degrees = constraints.degrees or Layout()
    if constraints.stage_layers and degrees.pipeline == 1:
        raise PlaitError(STAGES_WITHOUT_PIPELINE)
    if constraints.shares and not constraints.degrees:
        raise PlaitError(
            f"layout.shares = {list(constraints.shares)} deals batches out to copies or shards that nobody named; name "
            "layout.replicate or layout.shard, too, or leave the shares out"
        )
    check_shares(constraints.shares, degrees, workload.batch_sequences)


def _held(
    assigner: WorkAssigner, candidates: Candidates, budget: MemoryBudget
) -> tuple[Reals, NDArray[np.bool_], Counts]:
    """Bytes on the tightest device of every candidate when shares grow, whether each of its devices holds what falls
    to it, and the micro-batches that this makes."""
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


def simplest(step_s: Reals, points: Counts, tolerance: float, workers: Counts | int = 1) -> int:
    """Index of the simplest layout within the tolerance of the fastest: fewest points first, one worker before
    several, then the fastest. The one rule of choice: by forecasts or by measured steps."""
    enough = np.flatnonzero(step_s <= step_s.min() * (1 + tolerance))
    several = np.broadcast_to(np.asarray(workers) > 1, step_s.shape)
    return int(enough[np.lexsort((step_s[enough], several[enough], points[enough]))[0]])


def _needless(candidates: Candidates, kept: np.ndarray, numbers: Counts) -> np.ndarray:
    """Where more is computed again than in the row before, though that fits, in no more micro-batches, and differs in
    nothing else."""
    first = candidates.recompute[0]
    if len(np.unique(candidates.recompute)) == 1:
        return np.zeros(len(candidates), dtype=bool)
    assert first == 0
    own = numbers.reshape(-1, 3)
    before = np.minimum.accumulate(np.where(kept, numbers, np.iinfo(np.int64).max).reshape(-1, 3), axis=1)
    none = np.zeros(len(own), dtype=bool)
    return np.stack([none, before[:, 0] <= own[:, 1], before[:, 1] <= own[:, 2]], axis=1).ravel()
