"""The planner's layout for each way to divide the machines into workers, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plait.errors import PlaitError
from plait.layout import Layout
from plait.partition.matrix_owners import CopiesCompute
from plait.planner.calibration.factors import step_items
from plait.planner.derive.model_size import TrainingRate
from plait.planner.derive.published_rules import training_flops_of_weights
from plait.planner.derive.resources import Resources, probe_digest
from plait.planner.explain.choice import short_reasons
from plait.planner.explain.compared_layouts import runners_up
from plait.planner.explain.unequal_devices import memory_limit_lines, unequal_shares_of
from plait.planner.heterogeneous.host_permutations import node_alone
from plait.planner.plan import Forecast, Placement
from plait.planner.resolve.constrained_search import found_layout, searched_devices
from plait.planner.resolve.request import Request, WorkerOption
from plait.planner.search.cost_breakdown import cluster_peak_flops, time_items
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.search import search, simplest
from plait.planner.step_time.orthogonalization import orthogonalization_time

MEASURED_TOLERANCE = 0.05
"""A simpler layout may take so much longer than the fastest where steps of all of them were timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayout:
    """One layout of a training job over workers, what the planner predicts of it, and how long its step took."""

    placement: Placement
    complexity: int
    """Complexity, in the points of `plait plan --terms`."""
    forecast: Forecast | None
    """None where the devices are not in the catalogue."""
    notes: tuple[str, ...]
    """Remarks on the layout itself, in addition to the reasons for it."""
    step_s: float | None = None
    """Seconds of a measured step; None where none was timed."""
    granted: float = 1.0
    """Share of the time in which its workers had their cores while that step was timed."""
    search: Search | None = field(default=None, compare=False, repr=False)
    """The search that it is from, with this layout as the chosen one; for explanations."""
    chosen_in: Search | None = field(default=None, compare=False, repr=False)
    """The search whose choice `reasons` explains; None where it chose another layout."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it was chosen, and its notes: dozens of searches, so only for the layout of a plan."""
        return (*(short_reasons(self.chosen_in) if self.chosen_in else ()), *self.notes)

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def workers(self) -> int:
        return self.layout.world_size


def worker_layouts(request: Request) -> tuple[WorkerLayout, ...]:
    """The layout that the search chooses for each worker option; raises the first option's PlaitError where none works.

    Layouts that another one beats in both simplicity and forecast speed are left out.
    """
    layouts: list[WorkerLayout] = []
    refusal: PlaitError | None = None
    free = _with_layout_open(request) if request.constraints else None
    for option in request.options:
        try:
            layouts.append(_searched(request, option, free))
        except PlaitError as error:  # as two devices a processor may hold no model that it holds as one
            refusal = refusal or error
    if not layouts:
        assert refusal is not None
        raise refusal
    return tuple(one for one in layouts if not any(_is_beaten(one, other) for other in layouts))


def best_layouts(request: Request, count: int) -> tuple[WorkerLayout, ...]:
    """The layouts worth a trial: the planner's choices, then those of other kinds of which the forecast is best."""
    chosen = worker_layouts(request)
    if request.constraints.degrees:
        return chosen
    others: list[WorkerLayout] = []
    for option, found in ((option, searched_devices(request, option)) for option in request.options):
        if found.cluster.n_devices in {layout.workers for layout in chosen}:
            others += [_worker_layout(request, option, found, index) for index in runners_up(found, count)]
    known = [one.layout for one in chosen]
    fresh = [one for one in others if one.layout not in known]
    return (*_by_forecast(chosen), *_by_forecast(fresh))[:count]


def choose(layouts: Sequence[WorkerLayout]) -> WorkerLayout:
    """The simplest of those about as fast as the fastest: by their measured steps, or by the forecast where one of them
    was not measured; without a forecast the first."""
    measured = [one.step_s for one in layouts if one.step_s is not None]
    predicted = [one.forecast.step_s for one in layouts if one.forecast is not None]
    error = layouts[0].forecast.error if layouts[0].forecast else 0.0
    step_s, tolerance = (measured, MEASURED_TOLERANCE) if len(measured) == len(layouts) else (predicted, error)
    if len(step_s) < len(layouts):
        return layouts[0]
    points, workers = np.array([one.complexity for one in layouts]), np.array([one.workers for one in layouts])
    return layouts[simplest(np.array(step_s), points, tolerance, workers)]


def forecast_rate(request: Request, resources: Resources, layouts: Sequence[WorkerLayout]) -> TrainingRate | None:
    """How fast a job of about this size trains by the forecast, from which a time budget is sized once more.

    None where the budget is not a time, and where hosts were probed for the job as it is: for another one they would
    have to be probed again.
    """
    forecast, job = choose(layouts).forecast, request.job
    is_probed = resources.probe is not None or (
        resources.cluster is not None and resources.cluster.measured is not None
    )
    if job.budget.unit != "seconds" or forecast is None or is_probed:
        return None
    flops = float(training_flops_of_weights(job.shape)) * job.batch_sequences * job.shape.sequence
    return TrainingRate(flops_per_s=flops / forecast.step_s, source="forecast")


def used_peak_flops(resources: Resources, split: WorkerLayout) -> float | None:
    """Arithmetic peak of the devices that a layout uses."""
    found = split.search
    if resources.peak_flops is None:
        return None
    if found is not None and found.workload.precision == "fp16" and resources.machine.device != "cpu":
        return cluster_peak_flops(found.cluster, "fp16")  # the resources' own is float32's where bf16 is missing
    present = resources.peak_flops * resources.requested.share_of(resources.machine, split.workers)
    if found is None or found.left_out is None:
        return present
    whole = cluster_peak_flops(found.left_out.cluster, found.left_out.whole.workload.precision)
    return present * cluster_peak_flops(found.cluster, found.workload.precision) / whole


def _is_beaten(one: WorkerLayout, other: WorkerLayout) -> bool:
    """Whether another layout is simpler and, as far as a forecast can tell, faster."""
    if one.forecast is None or other.forecast is None or other.complexity >= one.complexity:
        return False
    return other.forecast.step_s * (1 + other.forecast.error) < one.forecast.step_s


def _by_forecast(layouts: Sequence[WorkerLayout]) -> list[WorkerLayout]:
    return sorted(layouts, key=lambda one: one.forecast.step_s if one.forecast else 0.0)


def _with_layout_open(request: Request) -> Search | PlaitError:
    """The layout that would be chosen for the same job, by forecast, if the recipe named no layout."""
    try:
        found = choose(worker_layouts(replace(request, constraints=Constraints(), options=request.open_options))).search
    except PlaitError as error:
        return error
    assert found is not None
    return found


def _searched(request: Request, option: WorkerOption, free: Search | PlaitError | None) -> WorkerLayout:
    found = replace(searched_devices(request, option), with_layout_open=free)
    chosen = _worker_layout(request, option, found, found.chosen)
    own = chosen.search if request.constraints and chosen.search else found
    return replace(chosen, chosen_in=own)


def _worker_layout(request: Request, option: WorkerOption, whole: Search, index: int) -> WorkerLayout:
    """A candidate of a search as a layout that can run."""
    one = found_layout(request, whole, index)
    found, index = one.search, one.index
    limits = found.micro_sequences(index)
    return WorkerLayout(
        placement=Placement(
            layout=one.layout,
            threads=option.threads,
            micro_sequences=max(limits),
            micro_limits=limits if len(limits) > 1 else (),
            shares=unequal_shares_of(found, index),
            host_order=whole.hosts_in_rank_order,
            copies_compute=_copies_compute(found, index),
        ),
        complexity=int(found.complexity[index]),
        forecast=_forecast(request, option, found, index) if request.has_forecast else None,
        notes=(*memory_limit_lines(found, index), *one.notes),
        search=whole.with_layout(found, index),
    )


def _copies_compute(found: Search, index: int) -> CopiesCompute:
    """The cheaper way by the forecast. One owner sends the same bits to all, which copies on unlike machines need."""
    hosts = found.cluster.measured.devices if found.cluster.measured else ()
    unlike = len({(host.name, host.threads) for host in hosts}) > 1
    return "one for all" if unlike else orthogonalization_time(found.cost_inputs).copies_compute(index)


def _forecast(request: Request, option: WorkerOption, found: Search, index: int) -> Forecast:
    fullest = found.memory_of_fullest(index)
    return Forecast(
        step_s=float(found.step_s[index]),
        tensor_bytes=float(fullest.allocated[0]),
        bytes_per_device=float(fullest.reserved[0]),
        one_device_step_s=_one_device_step_s(found),
        error=found.tolerance,
        basis=request.basis,
        items=step_items(time_items(found, index)),
        calibration=found.profile.calibration,
        probe_digest=probe_digest(option.cluster),
        embedding_cost_in_layers=found.assigner.devices.embedding_cost_in_layers,
        head_cost_in_layers=found.assigner.devices.head_cost_in_layers,
        cluster=found.cluster,
    )


def _one_device_step_s(found: Search) -> float | None:
    """The time of a step on only the first of the devices."""
    try:
        alone = search(found.workload, node_alone(found.cluster, 0, 1), profile=found.profile)
    except PlaitError:
        return None
    return float(alone.step_s[alone.fastest])
