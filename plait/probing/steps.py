"""Times whole steps of a plan's layouts, by the loop that trains; and what such steps took in earlier runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from plait.errors import OutOfTime
from plait.launch.values.job import Job
from plait.machines.measured import LEAST_UNDISTURBED_SHARE
from plait.model.shape import ModelShape
from plait.planner.calibration.factors import without_calibration
from plait.planner.derive.arithmetic import arithmetic_name
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.planner.resolve.resolve import updated_forecast, with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.private_folder import job_folder
from plait.probing.kept import KeptFactor, KeptTimings, is_similar, nearest
from plait.probing.measuring_time import UNLIMITED, MeasuringTime
from plait.recipe.load import recipe_text
from plait.recipe.schema import RunConfig
from plait.screen.screen import ShowProgress, ignore_progress
from plait.workers import TIMING_ENTRY, WorkerPool, ask_rank_0, modules_needed

LAYOUT_S, ARITHMETIC_S = 1.0, 1.0
"""Least seconds of timed steps: to choose among layouts, or in each round between two precisions."""
LONGEST_TIMED_STEP_S = 4.0
"""A step that takes longer by forecast is timed with fewer micro-batches."""
FIRST_SHARE = 0.7
"""Part of the time for all layouts that the first may take."""
COOPERATIVE_SHARE = 0.8
"""Part of its time after which a rank answers with what it has; at the end of it the rank is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """How long a step took, and the share of the time in which the workers that wanted to compute could: the rest went
    to other programs."""

    step_s: float
    granted: float


def measure(
    config: RunConfig,
    plan: Plan,
    workers: WorkerPool,
    layouts: tuple[WorkerLayout, ...],
    show: ShowProgress = ignore_progress,
    limit: MeasuringTime = UNLIMITED,
) -> list[WorkerLayout]:
    """Time real steps of each layout, as far as the time allows: the others come back without a timed step.

    The first one has most of the time: how fast it is says the most about the others, too.
    """
    measured = []
    for number, split in enumerate(layouts):
        show(number, len(layouts), f"timing steps of layout {number + 1} of {len(layouts)}")
        left = len(layouts) - number
        part = limit.part(max(FIRST_SHARE, 1 / left) if number == 0 else 1 / left)
        try:
            timed = time_plan(config, with_layout(plan, split), workers, least_s=LAYOUT_S, limit=part)
            measured.append(replace(split, step_s=timed.step_s, granted=timed.granted))
        except OutOfTime:
            measured.append(split)
    return measured


def time_plan(
    config: RunConfig, plan: Plan, workers: WorkerPool, *, least_s: float, limit: MeasuringTime = UNLIMITED
) -> TimedStep:
    """Median seconds of a plan's steps, of which at least `least_s` are timed; fewer where the time is up before.
    Raises OutOfTime where it does not allow for one timed step.

    A step with very many micro-batches is timed with a few and with half as many: all others take what the difference
    took, and what a step does once is in both.
    """
    few = micro_batches_to_time(plan)
    if few is None:
        return _time_steps(config, plan, workers, least_s, limit)
    of_one = plan.placement.layout.data_parallel_degree * plan.placement.micro_sequences
    more, less = (
        _time_steps(
            config, replace(plan, job=replace(plan.job, batch_sequences=of_one * count)), workers, least_s, part
        )
        for count, part in ((few, limit.part(2 / 3)), (few // 2, limit))
    )
    each_s = max(0.0, more.step_s - less.step_s) / (few - few // 2)
    step_s = more.step_s + (plan.job.batch_sequences / of_one - few) * each_s
    return TimedStep(step_s=step_s, granted=min(more.granted, less.granted))


def micro_batches_to_time(plan: Plan) -> int | None:
    """How many micro-batches of each data-parallel rank's are timed; None where a whole step is."""
    if plan.forecast is None or plan.forecast.step_s <= LONGEST_TIMED_STEP_S or plan.placement.shares:
        return None
    there = plan.job.batch_sequences // (plan.placement.layout.data_parallel_degree * plan.placement.micro_sequences)
    rounds = int(there * LONGEST_TIMED_STEP_S / plan.forecast.step_s) // (2 * plan.placement.layout.pipeline)
    few = (
        2 * plan.placement.layout.pipeline * max(2, rounds)
    )  # half of them, too, go through a pipeline in whole rounds
    return few if 4 * few <= there else None  # else it spares little, and the difference is amplified noise


def _time_steps(config: RunConfig, plan: Plan, workers: WorkerPool, least_s: float, limit: MeasuringTime) -> TimedStep:
    with job_folder("plait-measure-") as folder:
        write_plan(plan, folder / "plan.json")
        (folder / "recipe.toml").write_text(recipe_text(config))
        asked = {"folder": str(folder), "least_s": least_s, "most_s": COOPERATIVE_SHARE * limit.left_s}
        job = Job(
            entry=TIMING_ENTRY,
            argument=json.dumps(asked),
            world_size=plan.world_size,
            threads=plan.placement.threads,
            log_dir=str(folder),
            needs=modules_needed(plan),
            at_stop="abandon",
        )
        found = ask_rank_0(workers, limit.limited(job), "measured")
    if found["step_s"] is None:
        raise OutOfTime("no step could be timed within the time for measuring")
    return TimedStep(step_s=found["step_s"], granted=found.get("granted", 1.0))


# What is kept of timed steps, for runs of similar models: kept.py, Note [similar sizes].


ALMOST_EQUAL, SIMILAR_STEP_ERROR = 1.3, 0.2
"""Sizes within this factor (first) make a kept step as good as a timed one; others leave this relative error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """What the time of a step depends on, beside what the cost model knows of it: two names, for steps and for their
    gain by bf16, and sizes."""

    name: str
    bf16_name: str
    sizes: tuple[int, ...]

    @staticmethod
    def of(plan: Plan) -> StepKey:
        job, placement, shape = plan.job, plan.placement, plan.job.shape
        arithmetic = plan.arithmetic
        how = ", ".join(
            (
                arithmetic_name(arithmetic.product_precision, arithmetic.matmul_backend),
                f"{arithmetic.gradient_transfer} gradients, {arithmetic.stage_transfer} stages",
                "deterministic" if arithmetic.deterministic else "fastest",
                f"{job.documents} documents",
            )
        )
        work = f"{kind_of(shape)}, {job.optimizer.kind}, {plan.arithmetic.compile}"
        options = f"{placement.layout.shard_what}, {placement.layout.schedule}, {placement.layout.recompute}"
        sizes = sizes_of(shape, placement.micro_sequences * job.sequence)
        return StepKey(
            name=f"step, {how}, {work}, {placement.layout}, {placement.threads}, {options}",
            bf16_name=f"bf16, {plan.arithmetic.matmul_backend}, {work}, {placement.layout}, {placement.threads}",
            sizes=(*sizes, shape.layers, job.sequence),
        )


def kind_of(shape: ModelShape) -> str:
    """The kinds of layers in a model; models of one kind differ only in size."""
    adapter = shape.adapter and f"{shape.adapter.variant} {shape.adapter.rank}"
    experts = shape.mixture and f"{shape.mixture.experts_per_token} of {shape.mixture.experts} experts"
    return ", ".join(part for part in (shape.activation, adapter, experts, shape.latent and "latent") if part)


def sizes_of(shape: ModelShape, tokens: int) -> tuple[int, ...]:
    """The sizes of a model's products; of the tokens the cube root, as speed changes little with their number."""
    return max(1, round(tokens ** (1 / 3))), shape.width, shape.ffn, shape.size_of("heads"), shape.vocabulary


def with_kept_step(plan: Plan, split: WorkerLayout, timings: KeptTimings) -> WorkerLayout | None:
    """The layout with the step that earlier ones of about its sizes took while nothing else ran, or with a forecast
    that others of similar sizes corrected; None where none were timed."""
    forecast, peak = split.forecast, plan.machines.peak_flops
    key = StepKey.of(with_layout(plan, split))
    known = nearest(timings.factors, key.name, key.sizes)
    if known is None or forecast is None or forecast.items is None or peak is None or forecast.basis != "formulas":
        return None
    step_s = known.value * without_calibration(forecast.items, forecast.calibration).step_s / peak
    corrected = updated_forecast(forecast, forecast.calibration, step_s)
    if known.granted >= LEAST_UNDISTURBED_SHARE and is_similar(known.sizes, key.sizes, within=ALMOST_EQUAL):
        return replace(split, step_s=step_s, forecast=corrected)
    return replace(split, forecast=replace(corrected, error=min(SIMILAR_STEP_ERROR, forecast.error)))


def with_ratio_of_timed(layouts: Sequence[WorkerLayout]) -> list[WorkerLayout]:
    """Layouts of which only some were timed, to be compared by forecast: that of a timed one is its step, and that of
    another is as far off as those of the timed ones were, unless it was corrected by earlier runs already."""
    ratios = [one.step_s / one.forecast.step_s for one in layouts if one.step_s and one.forecast]
    if not ratios:
        return list(layouts)
    ratio = geometric_mean(ratios)

    def corrected(one: WorkerLayout) -> WorkerLayout:
        if (forecast := one.forecast) is None or forecast.calibration.is_measured:
            return one
        found = updated_forecast(forecast, forecast.calibration, one.step_s or ratio * forecast.step_s)
        return replace(
            one, forecast=found if one.step_s else replace(found, error=min(SIMILAR_STEP_ERROR, forecast.error))
        )

    return [corrected(one) for one in layouts]


def kept_steps(plan: Plan, measured: Sequence[WorkerLayout]) -> list[KeptFactor]:
    """What to keep of timed steps: how they compare with the formulas. A formula's seconds go by the machine's peak,
    which may be measured again, so each ratio is kept times the peak."""
    found = []
    for split in measured:
        forecast, peak = split.forecast, plan.machines.peak_flops
        if split.step_s and forecast and forecast.items and forecast.basis == "formulas" and peak:
            key = StepKey.of(with_layout(plan, split))
            said_s = without_calibration(forecast.items, forecast.calibration).step_s
            ratio = split.step_s / said_s * peak
            found.append(KeptFactor(name=key.name, sizes=key.sizes, value=ratio, granted=split.granted))
    return found
