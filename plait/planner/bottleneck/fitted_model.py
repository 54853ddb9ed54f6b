"""The planner's cost model fitted to a run: the plan's own layout priced again with what the run measured, and again
with one input changed.

Note [how the model is fitted]: a run measures, on the rank that the others wait for, seconds of computing, of waiting
within a replica, of waiting for messages, and the rest of a step. Computing becomes right by one factor
(Calibration.compute). What is then waited for messages depends on the rate of the slowest links and on what computing
hides, so that rate is searched at which the model waits as long as the run did. What is left after both is a ratio for
each of the four groups, by which the price of a changed plan is multiplied. Data are not in the model: they stay as
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.planner.calibration.constants import constant
from plait.planner.calibration.factors import BETWEEN_GROUP_ITEMS
from plait.planner.derive.resources import on_paper
from plait.planner.derive.training_job import workload_of_job
from plait.planner.explain.changes import LinkPlace, with_faster_links
from plait.planner.plan import Plan
from plait.planner.problem.software_profile import PLAIT_PROFILE, SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.search.cost_breakdown import time_items
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import step_seconds
from plait.planner.search.search import search
from plait.planner.step_time.device_rates import peak_flops

TimeGroup = Literal["compute", "inside", "messages", "rest"]
"""The parts of a step that a run measures separately, apart from data."""
FARTHEST_LINK = 1000.0
"""Links may be found this many times slower or faster than planned."""
CLOSE_LINK = 1.02
"""The rate of the links is searched to within this ratio."""
LEAST_SHARE_TO_FIT = 0.02
"""Waiting for messages must take this share of a step for the links' rate to follow from it."""
PROCESSOR_LAUNCH_FLOPS = constant("processor_launch_flops")
"""The launch of one layer's kernels, forward and backward, on a CPU, as the work of one core."""
PASSES = 3
"""A forward pass, and a backward pass that launches twice as many kernels."""
_INSIDE_ITEMS = ("passes", "bubble")
_COUNTED_AS_COMPUTING = ("tensor", "context", "experts")
"""Messages within every layer, whose waits a run cannot tell from computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """Seconds of a run's step, on the rank that the others wait for."""

    compute_s: float
    inside_s: float
    """Waiting for other ranks of its replica, such as pipeline stages."""
    wait_s: float
    """Waiting for other replicas and their messages."""
    data_s: float
    rest_s: float
    """The optimizer's update, and other work once a step."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.inside_s + self.wait_s + self.data_s + self.rest_s

    def of(self, group: TimeGroup) -> float:
        """Seconds of one group."""
        by_name = {"compute": self.compute_s, "inside": self.inside_s, "messages": self.wait_s, "rest": self.rest_s}
        return by_name[group]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanPrice:
    """One layout with its price: a plan's own layout, or one with an input changed."""

    found: Search
    """A search that found this layout alone."""
    launch_factor: float = 1.0
    """Factor on the time of launching kernels; other computing has its factor in its calibration."""

    @property
    def items(self) -> Mapping[str, float]:
        """Seconds of a step by the items of step_time.py."""
        return time_items(self.found, self.found.chosen)

    @property
    def fits(self) -> bool:
        """Whether the layout fits with a margin for the forecast's own error."""
        return self.found.fits_sparingly(self.found.chosen)

    def groups(self) -> dict[TimeGroup, float]:
        """Seconds of a step by what a run measures."""
        seconds: dict[TimeGroup, float] = dict.fromkeys(("compute", "inside", "messages", "rest"), 0.0)
        piped = int(self.found.candidates.pipeline[self.found.chosen]) > 1
        items = dict(self.items)
        items["host"] *= self.launch_factor
        for name, value in items.items():
            if name in BETWEEN_GROUP_ITEMS:
                seconds["messages"] += value
            elif name in _INSIDE_ITEMS and piped:
                seconds["inside"] += max(value, 0.0)
            else:
                seconds["rest" if name == "optimizer" else "compute"] += value
        return seconds

    def on(self, cluster: Cluster) -> PlanPrice:
        """The same layout on the same devices with other links."""
        return replace(self, found=replace(self.found, cluster=cluster)).priced_again()

    def with_compute(self, factor: float) -> PlanPrice:
        """The same layout where computing takes this many times as long as measured or assumed before the run."""
        profile = self.found.profile
        slower = self._with_profile(replace(profile, calibration=replace(profile.calibration, compute=factor)))
        return replace(slower, launch_factor=factor / profile.calibration.compute)

    def with_transfer(self, *, gradients: bool = False, stages: bool = False) -> PlanPrice:
        """The same layout with gradients, or messages between pipeline stages, in bf16."""
        profile = self.found.profile
        if gradients:
            profile = replace(profile, gradient_transfer="bf16")
        return self._with_profile(replace(profile, stage_transfer="bf16") if stages else profile)

    def _with_profile(self, profile: SoftwareProfile) -> PlanPrice:
        found = self.found
        assigner = replace(found.assigner, profile=profile)
        return replace(self, found=replace(found, profile=profile, assigner=assigner)).priced_again()

    def priced_again(self) -> PlanPrice:
        """The layout with its step time computed again from its machines and profile."""
        found = self.found
        step_s = step_seconds(found.cost_inputs, found.assigner, found.n_microbatches)
        return replace(self, found=replace(found, step_s=step_s))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedModel:
    """The cost model as one run measured it; prices changes of its plan."""

    plan: Plan
    measured: StepMeasured
    price: PlanPrice
    """The plan's own layout, with the measured computing and links."""
    link_factor: float
    """The rate of the slowest links, relative to the planned rate."""

    def step_s(self, other: PlanPrice) -> float:
        """Seconds of a step of a changed plan, with each group corrected by the unchanged plan's error."""
        before, after = self.price.groups(), other.groups()
        total = self.measured.data_s
        for group, said in before.items():
            came = self.measured.of(group)
            # What the model has next to nothing of cannot be scaled.
            known = said > 1e-3 * self.measured.step_s
            total += came / said * after[group] if known else max(0.0, came + after[group] - said)
        return total

    def gain(self, other: PlanPrice) -> float:
        """How many times as fast a step of a changed plan is."""
        return self.measured.step_s / self.step_s(other)

    def changed(
        self, *, memory: Literal["as it is", "enough"] = "as it is", compile: Literal["as it is", "on"] = "as it is",
        **knobs: int | str,
    ) -> PlanPrice | None:  # fmt: skip
        """The plan with other `knobs` of its layout (recompute, schedule, micro_sequences); None if the layout is
        invalid, or does not fit and memory is to stay "as it is"."""
        cluster, profile = self.price.found.cluster, self.price.found.profile
        if compile == "on":
            profile = replace(PLAIT_PROFILE, calibration=profile.calibration, **_transfers(self.plan))
        if memory == "enough":
            cluster = _with_ample_memory(cluster)
        with suppress(PlaitError):
            found = _layout_alone(self.plan, self.price.found.workload, cluster, profile, knobs)
            price = replace(self.price, found=found).priced_again()
            return price if price.fits else None
        return None

    def with_links(self, place: LinkPlace, factor: float) -> PlanPrice:
        """The plan with links of this many times their present rate."""
        return self.price.on(with_faster_links(self.price.found.cluster, place, factor))

    @property
    def link_place(self) -> LinkPlace:
        """The links that messages wait for: between hosts, where there are several."""
        return _link_place(self.price.found.cluster)


def fitted_model(plan: Plan, measured: StepMeasured) -> FittedModel | None:
    """The cost model fitted to a run (Note [how the model is fitted]); None for a plan that does not record its
    machines, as earlier versions wrote."""
    said = priced_plan(plan)
    if said is None:
        return None
    items = said.items
    within_s = sum(items[name] for name in _COUNTED_AS_COMPUTING)
    computing_s = said.groups()["compute"] - within_s
    before = said.found.profile.calibration.compute
    factor = max(measured.compute_s - within_s, 0.1 * measured.compute_s) / max(computing_s, 1e-12)
    # A single device hides no message, so that the ratio of its computing says it all.
    computed = said.with_compute(before * factor) if said.found.cluster.n_devices > 1 else said
    link_factor = _fitted_link(computed, measured)
    cluster = with_faster_links(computed.found.cluster, _link_place(computed.found.cluster), link_factor)
    price = computed.on(cluster) if link_factor != 1 else computed
    return FittedModel(plan=plan, measured=measured, price=price, link_factor=link_factor)


def priced_plan(plan: Plan) -> PlanPrice | None:
    """The plan's layout, priced with the model that planned it; None if its machines are unknown."""
    forecast = plan.forecast
    if forecast is None or forecast.cluster is None:
        return None
    cluster = forecast.cluster
    workload = workload_of_job(plan.job, plan.arithmetic, on_paper(cluster))
    uncompiled = plan.machines.have_accelerators and plan.arithmetic.compile == "off"
    profile = replace(
        PLAIT_PROFILE.uncompiled if uncompiled else PLAIT_PROFILE,
        calibration=replace(forecast.calibration, timed=1.0),
        **_transfers(plan),
    )
    try:
        return PlanPrice(found=_layout_alone(plan, workload, cluster, profile, {})).priced_again()
    except PlaitError:  # a layout that was tried out, and that the forecast of memory does not let in
        with suppress(PlaitError):
            ample = _layout_alone(plan, workload, _with_ample_memory(cluster), profile, {})
            return PlanPrice(found=ample).priced_again()
        return None


def _layout_alone(
    plan: Plan, workload: Workload, cluster: Cluster, profile: SoftwareProfile, changes: Mapping[str, int | str]
) -> Search:
    """A search restricted to a plan's layout, with some knobs changed."""
    placement, layout = plan.placement, plan.placement.layout
    knobs: dict[str, int | str] = {
        "schedule": layout.schedule,
        "recompute": layout.recompute,
        "expert": layout.expert,
        "virtual": layout.virtual_stages,
    }
    if layout.shard > 1:
        knobs["shard_what"] = layout.shard_what
    named = {name: value for name, value in changes.items() if name != "micro_sequences"}
    constraints = Constraints(
        degrees=layout,
        knobs=knobs | named,
        stage_layers=layout.stage_layers if layout.pipeline > 1 else (),
        shares=placement.shares,
        micro_sequences_exactly=int(changes.get("micro_sequences", placement.micro_sequences)),
    )
    found = search(workload, cluster, profile=profile, constraints=constraints)
    return found if plan.machines.have_accelerators else _with_processor_launches(found, plan.placement.threads)


def _with_processor_launches(found: Search, threads: int) -> Search:
    """A CPU computes nothing while it launches a kernel, which is most of the time of tiny micro-batches. (Layer
    times of a probe already include that.)"""
    device = found.cluster.islands[0].device
    layer_s = PROCESSOR_LAUNCH_FLOPS * threads / peak_flops(device, "float32")
    profile = found.profile
    launch_s = layer_s / (PASSES * profile.layer_kernels)
    return replace(
        found, profile=replace(profile, launch_mode="blocking", launch_s=launch_s, micro_s=layer_s, gap_s=0.0)
    )


def _transfers(plan: Plan) -> dict[str, str]:
    arithmetic = plan.arithmetic
    return {"gradient_transfer": arithmetic.gradient_transfer, "stage_transfer": arithmetic.stage_transfer}


def _with_ample_memory(cluster: Cluster) -> Cluster:
    """The cluster with enough memory for everything."""
    islands = (replace(one, device=replace(one.device, memory_bytes=10**15)) for one in cluster.islands)
    return replace(cluster, islands=tuple(islands))


def _link_place(cluster: Cluster) -> LinkPlace:
    return "between" if cluster.n_nodes > 1 else "inside"


def _fitted_link(price: PlanPrice, measured: StepMeasured) -> float:
    """How many times the planned rate the links have, so that the model waits for messages as long as the run did."""
    cluster, place = price.found.cluster, _link_place(price.found.cluster)
    waited_s = measured.wait_s + measured.inside_s
    if cluster.n_devices == 1 or waited_s < LEAST_SHARE_TO_FIT * measured.step_s:
        return 1.0

    def waits(factor: float) -> float:
        groups = price.on(with_faster_links(cluster, place, factor)).groups()
        return groups["messages"] + groups["inside"]

    return _crossing(waits, waited_s)


def _crossing(falling: Callable[[float], float], value: float) -> float:
    """The factor at which a falling function reaches a value; 1 if no rate of the links explains it."""
    low, high = 1 / FARTHEST_LINK, FARTHEST_LINK
    slowest = falling(low)
    if slowest <= value:
        return low if slowest > value / 2 else 1.0
    if falling(high) >= value:
        return 1.0
    while high / low > CLOSE_LINK:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low * high) ** 0.5
