"""The search: every layout is listed, refused with a reason or priced; of those about as fast as the fastest the
simplest is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import Cluster
from plait.planner.heterogeneous.assignment import WorkAssigner
from plait.planner.heterogeneous.device_speeds import device_speeds_of
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import PLAIT_PROFILE, SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.search.complexity import complexity_of
from plait.planner.search.enumeration import Constraints, enumerate_layouts
from plait.planner.search.feasibility import feasible_candidates, sparing_budget
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import step_seconds
from plait.planner.search.layout_kinds import kinds_that_never_fit, leanest_of_kinds
from plait.planner.search.model_error import stated_error
from plait.planner.search.validity import STAGES_WITHOUT_PIPELINE, check_shares
from plait.planner.step_time.cost_inputs import CostInputs

EXCEEDS_MEMORY = "needs more memory than a device has"
CROSSES_HOSTS = "a group that cuts matrices or sequences would straddle two machines"
RECOMPUTES_NEEDLESSLY = "would recompute although everything fits"


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    profile: SoftwareProfile = PLAIT_PROFILE,
    constraints: Constraints | None = None,
    tolerance: float | Literal["stated"] = "stated",
) -> Search:
    """The simplest layout within `tolerance` of the fastest; raises PlaitError where none can be or none fits.

    "stated" is the model's own error where nothing was measured: less is no evidence.
    """
    profile, constraints = profile.for_cluster(cluster), constraints or Constraints()
    _check_constraints(workload, constraints)
    devices = device_speeds_of(workload, cluster, profile)
    assigner = WorkAssigner(
        workload=workload,
        devices=devices,
        profile=profile,
        named_shares=constraints.shares,
        usable_memory=sparing_budget(workload, cluster).share,
    )
    listed = enumerate_layouts(workload, cluster.n_devices, constraints, profile)
    fit = feasible_candidates(assigner, cluster, listed.candidates, constraints)
    needless = _needless(listed.candidates, fit.kept, fit.n_microbatches)
    priced = fit.kept & ~needless
    candidates, n_microbatches = listed.candidates.select(priced), fit.n_microbatches[priced]
    inputs = CostInputs(workload=workload, cluster=cluster, candidates=candidates, profile=profile)
    step_s = step_seconds(inputs, assigner, n_microbatches)
    complexity = complexity_of(candidates, inputs.network)
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


def with_other_links(found: Search, cluster: Cluster) -> Search:
    """The search on the same devices with other links: only step times change, so the layouts and their memory
    needs are not computed again."""
    step_s = step_seconds(replace(found.cost_inputs, cluster=cluster), found.assigner, found.n_microbatches)
    chosen = simplest(step_s, found.complexity, found.tolerance)
    return replace(found, cluster=cluster, step_s=step_s, chosen=chosen, fastest=int(step_s.argmin()))


def _check_constraints(workload: Workload, constraints: Constraints) -> None:
    """Raise PlaitError where named stages or shares do not go with the named degrees and the batch."""
    degrees = constraints.degrees or Layout()
    if constraints.stage_layers and degrees.pipeline == 1:
        raise PlaitError(STAGES_WITHOUT_PIPELINE)
    if constraints.shares and not constraints.degrees:
        raise PlaitError(
            f"layout.shares = {list(constraints.shares)} divides batches among copies or shards that the recipe does "
            "not name; name layout.replicate or layout.shard, too, or leave the shares out"
        )
    check_shares(constraints.shares, degrees, workload.batch_sequences)


def simplest(step_s: Reals, points: Counts, tolerance: float, workers: Counts | int = 1) -> int:
    """Index of the simplest layout within the tolerance of the fastest: fewest points first, one worker before
    several, then the fastest. Every choice uses this rule, whether times are forecast or measured."""
    enough = np.flatnonzero(step_s <= step_s.min() * (1 + tolerance))
    several = np.broadcast_to(np.asarray(workers) > 1, step_s.shape)
    return int(enough[np.lexsort((step_s[enough], several[enough], points[enough]))[0]])


def _needless(candidates: Candidates, kept: np.ndarray, numbers: Counts) -> np.ndarray:
    """Mask of candidates that recompute more than another row that fits, differs in nothing else and needs no more
    micro-batches."""
    first = candidates.recompute[0]
    if len(np.unique(candidates.recompute)) == 1:
        return np.zeros(len(candidates), dtype=bool)
    assert first == 0
    own = numbers.reshape(-1, 3)
    before = np.minimum.accumulate(np.where(kept, numbers, np.iinfo(np.int64).max).reshape(-1, 3), axis=1)
    none = np.zeros(len(own), dtype=bool)
    return np.stack([none, before[:, 0] <= own[:, 1], before[:, 1] <= own[:, 2]], axis=1).ravel()
