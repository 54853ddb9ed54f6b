"""The search for a request on one cluster: within its constraints, on the hosts in their best order, and with
micro-batches of a size that suits processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

from plait.layout import Layout
from plait.machines.cluster import Cluster
from plait.planner.calibration.constants import constant
from plait.planner.explain.unequal_devices import unequal_shares_of
from plait.planner.heterogeneous.batch_shares import equal_shares
from plait.planner.problem.candidates import RECOMPUTE_MODES, SCHEDULES, SHARDED_STATES
from plait.planner.problem.software_profile import CPU_CACHE_TOKENS, SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.resolve.request import Request, WorkerOption
from plait.planner.search.enumeration import Constraints
from plait.planner.search.feasibility import DoesNotFit
from plait.planner.search.found import Search
from plait.planner.search.host_choice import (
    search_host_orders_that_fit,
    with_best_host_order,
    with_devices_left_out,
)
from plait.planner.search.search import search
from plait.planner.search.validity import layout_of_candidate
from plait.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayout:
    """One layout of a search."""

    layout: Layout
    search: Search
    """The search that it is from. On processors, if its micro-batches were resized, a search for this layout alone."""
    index: int
    """Index of the layout among the search's candidates."""
    notes: tuple[str, ...] = ()
    """Why its micro-batches have another size than usual."""


def constrained_search(
    workload: Workload, cluster: Cluster, profile: SoftwareProfile, constraints: Constraints
) -> Search:
    """Search within constraints, on the hosts in their best order; raises PlaitError where nothing fits.

    With named degrees the search uses no recomputation, and `shard` splits only the optimizer's state, unless nothing
    fits that way: a named layout then means the same on every machine that can run it.
    """
    usual = constraints
    if constraints.degrees:
        knobs = {"recompute": "none"} | ({"shard_what": "optimizer"} if constraints.degrees.shard > 1 else {})
        usual = replace(constraints, knobs={**knobs, **constraints.knobs})
        with suppress(DoesNotFit):
            found = search(workload, cluster, profile=profile, constraints=usual)
            if found.fits_sparingly(found.chosen):
                return with_best_host_order(found)
    try:
        return with_best_host_order(search(workload, cluster, profile=profile, constraints=constraints))
    except DoesNotFit:
        for tried in [usual] if usual is constraints else [usual, constraints]:
            if reordered := search_host_orders_that_fit(workload, cluster, profile, tried):
                return reordered
        raise


def searched_devices(request: Request, option: WorkerOption) -> Search:
    """The search over an option's devices, or over some of them where the others would not make a step shorter.

    Raises PlaitError where no layout of all devices fits.
    """
    found = constrained_search(request.workload, option.cluster, request.profile, request.constraints)
    if option.devices == "some" and not request.constraints.degrees:
        found = with_devices_left_out(found, option.cluster)
    if (part_of := request.part_of) is None:
        return found
    nodes = part_of.nodes if found.left_out is None else tuple(part_of.nodes[node] for node in found.left_out.nodes)
    return replace(found, left_out=replace(part_of, nodes=nodes))


def found_layout(request: Request, found: Search, index: int) -> FoundLayout:
    """One candidate of a search as it would run: on processors with micro-batches of a size that suits them."""
    cut = found.stage_layers(index) if int(found.candidates.pipeline[index]) > 1 else ()
    layout = layout_of_candidate(found.candidates, index, cut)
    on_processors = all(island.device.kind == "cpu" for island in found.cluster.islands)
    if not on_processors or "micro_sequences" in request.constraints.knobs:
        return FoundLayout(layout=layout, search=found, index=index)
    return _with_suitable_micro_batches(request, FoundLayout(layout=layout, search=found, index=index))


def _with_suitable_micro_batches(request: Request, one: FoundLayout) -> FoundLayout:
    """The layout with micro-batches of a size that suits a processor; unchanged if these do not fit."""
    layout, batch = one.layout, request.workload.batch_sequences
    unequal = unequal_shares_of(one.search, one.index)
    shares = unequal or equal_shares(batch, layout.data_parallel_degree)
    usual = usual_micro_sequences(batch, layout, request.workload.sequence)
    best, taken = one.search, 0
    may_grow = bool(unequal) and request.shares_may_change
    for size in micro_sequences_to_try(usual, layout, shares, may_grow=may_grow):
        constraints = _exactly(request, one, size)
        with suppress(DoesNotFit):
            tried = search(request.workload, one.search.cluster, profile=one.search.profile, constraints=constraints)
            if not taken or tried.step_s[tried.chosen] < (1 - LARGER_MICRO_BATCH_COST) * best.step_s[best.chosen]:
                best, taken = tried, size
    if not taken:
        return one
    notes = fewer_gathers_reason(usual, taken, max(shares)) if taken > usual else []
    return replace(one, search=best, index=best.chosen, notes=tuple(notes))


def _exactly(request: Request, one: FoundLayout, micro_sequences: int) -> Constraints:
    """This layout and no other, with micro-batches of one size."""
    candidates, at = one.search.candidates, one.index
    what = SHARDED_STATES[int(candidates.shard_what[at])]
    knobs: dict[str, int | str] = {
        "virtual": int(candidates.virtual[at]),
        "schedule": SCHEDULES[int(candidates.schedule[at])],
        "recompute": RECOMPUTE_MODES[int(candidates.recompute[at])],
        "expert": int(candidates.expert[at]),
    }
    return Constraints(
        degrees=candidates.degrees(at),
        knobs=knobs if what == "nothing" else {**knobs, "shard_what": what},
        stage_layers=request.constraints.stage_layers,
        shares=request.constraints.shares,
        micro_sequences_exactly=micro_sequences,
    )


LARGER_MICRO_BATCH_COST = constant("larger_micro_batch_cost")
"""Share of a step that a micro-batch beyond the caches costs."""
MICRO_BATCHES_PER_STAGE = 4
MICRO_BATCH_HEADROOM = 1.25
"""Factor by which a single micro-batch may exceed its share where the share may grow during the run: a second
micro-batch would cost as many messages again."""


def usual_micro_sequences(batch_sequences: int, layout: Layout, sequence: int) -> int:
    """Sequences of a micro-batch on a processor: as many as fit its caches, and in a pipeline at least
    MICRO_BATCHES_PER_STAGE micro-batches per stage."""
    part = ceil(batch_sequences / layout.data_parallel_degree)
    limit = max(1, CPU_CACHE_TOKENS * layout.context // sequence)
    if layout.pipeline > 1:
        # A pipeline idles (stages - 1) / (micro-batches + stages - 1) of its time (Huang et al. 2019).
        limit = min(limit, max(1, part // (MICRO_BATCHES_PER_STAGE * layout.pipeline)))
    return ceil(part / ceil(part / limit))


def micro_sequences_to_try(
    usual: int, layout: Layout, sequences_per_replica: Sequence[int], *, may_grow: bool
) -> Iterator[int]:
    """Micro-batch sizes to price, `usual` first.

    Sharded parameters are gathered, and their gradients summed, once per micro-batch: over slow links a few large
    micro-batches are worth their memory.
    """
    yield usual
    if layout.shard == 1 or layout.shard_what != "parameters" or layout.pipeline > 1:
        return
    most = max(sequences_per_replica)
    number = ceil(most / usual)
    while number > 1:
        number = ceil(number / 2)
        yield ceil(most * (MICRO_BATCH_HEADROOM if may_grow and number == 1 else 1) / number)


def fewer_gathers_reason(usual: int, chosen: int, largest_share: int) -> list[str]:
    """Why micro-batches are larger than usual, for the rank with the largest share."""
    often, seldom = ceil(largest_share / usual), ceil(largest_share / chosen)
    times = "once a step" if seldom == 1 else f"{seldom} times a step"
    return [
        f"up to {counted(chosen, 'sequence')} at a time, not {usual}: split parameters are gathered {times} "
        f"instead of {often}"
    ]
