"""From a request to a plan: fills in every "auto" of the recipe and says why.

Pure. `draft` decides all but the layout among several and, for a time budget, the steps; `settle` takes what was timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, TypeAlias

from plait.errors import PlaitError
from plait.model.shape import parameter_count
from plait.model.weights import training_flops_per_token
from plait.planner.calibration.factors import (
    LEAST_MESSAGE_SHARE_TO_LEARN,
    MEASURED_STEP_ERROR,
    Calibration,
    with_calibration,
    without_calibration,
)
from plait.planner.derive.derived import Derived
from plait.planner.derive.hyperparameters import warmup_steps
from plait.planner.derive.intervals import (
    EVALUATIONS_AT_MOST,
    balance_every_steps,
    checkpoint_every,
    parse_step_interval,
    report_every_steps,
    steps_in_budget,
)
from plait.planner.derive.model_size import (
    CorpusFacts,
    TrainingRate,
    chosen_size,
    expected_loss,
    has_open_size,
    larger_size,
    smaller_size,
)
from plait.planner.derive.published_rules import REPEATS_DECAY, training_flops_of_weights
from plait.planner.derive.resources import Resources
from plait.planner.derive.training_job import SizedJob, rate_before_pricing
from plait.planner.explain.changes import error_with_suggestions
from plait.planner.explain.choice import warnings_of
from plait.planner.memory.state_copies import with_copies_reasoned
from plait.planner.plan import Cadence, Forecast, Machines, Plan
from plait.planner.resolve.bf16_part import (
    is_preferred,
    may_leave_out_for_bf16,
    resources_with_bf16,
    seen_from_whole,
)
from plait.planner.resolve.constrained_search import usual_micro_sequences
from plait.planner.resolve.named import with_named_workers
from plait.planner.resolve.request import Request, request_of
from plait.planner.resolve.worker_layouts import (
    MEASURED_TOLERANCE,
    WorkerLayout,
    choose,
    forecast_rate,
    used_peak_flops,
    worker_layouts,
)
from plait.planner.search.feasibility import DoesNotFit
from plait.recipe.schema import RunConfig
from plait.units import Every, counted, format_count, format_duration, format_si, parse_every

EVALUATION_SHARE = 0.06  # of a run's work, at most, goes into evaluating the held-out text along the way


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan but for its layout and, for a time budget, its steps; with the layouts worth measuring."""

    request: Request
    plan: Plan
    layouts: tuple[WorkerLayout, ...]
    evaluations: Every | Literal["auto"]
    heldout_tokens: int


def draft(
    config: RunConfig,
    corpus: CorpusFacts,
    resources: Resources,
    *,
    recipe_hash: str,
    begun: Plan | SizedJob | None = None,
    worth_measuring: Callable[[Request], tuple[WorkerLayout, ...]] = worker_layouts,
) -> Draft:
    """Everything but what waits for timed steps; a `begun` run's job is its plan's. Raises PlaitError.

    A budget of time is sized at the rate that such machines usually reach, then at those that forecasts promise.
    """
    resources = with_named_workers(config, resources)
    sizing = _Sizing(config=config, corpus=corpus, resources=resources, worth_measuring=worth_measuring)
    found = sizing.sized(begun) if isinstance(begun, Plan) else sizing.by_forecast(begun)
    request, layouts = found.request, found.layouts
    machine, first = resources.machine, layouts[0]
    balance, saving = _balance(config, resources, first), checkpoint_every(config)
    plan = Plan(
        job=request.job,
        placement=first.placement,
        arithmetic=request.arithmetic,
        machines=Machines(
            device=machine.device,
            gpus=machine.gpus,
            peak_flops=used_peak_flops(resources, first),
            fingerprint=machine.fingerprint(),
        ),
        cadence=Cadence(
            checkpoint_every=saving.value,
            checkpoint_keep=config.checkpoint.keep,
            checkpoint_keep_s=parse_every(config.checkpoint.keep_for).value,
            report_every_steps=report_every_steps(config, machine.device),
            evaluate_every_steps=0,
            balance_every_steps=balance.value,
        ),
        forecast=first.forecast,
        step_s=None,
        recipe_hash=recipe_hash,
        reasons=(
            *request.notes,
            *lines_without_effect(config, layouts),
            *balance.reasons,
            *request.training_notes,
            *saving.reasons,
        ),
        faster_arithmetic=resources.arithmetic.headline if resources.arithmetic else "",
        warnings=request.warnings,
    )
    return Draft(
        request=request,
        plan=plan,
        layouts=layouts,
        evaluations="auto" if config.report.evaluate == "auto" else parse_step_interval(config.report.evaluate),
        heldout_tokens=corpus.heldout_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sized:
    """A request whose model fits the machines, its layouts, and the rate from which it was sized."""

    request: Request
    layouts: tuple[WorkerLayout, ...]
    rate: TrainingRate


NextSize: TypeAlias = Callable[[RunConfig, CorpusFacts, TrainingRate], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizing:
    """Finds the size of a recipe's job on some machines."""

    config: RunConfig
    corpus: CorpusFacts
    resources: Resources
    worth_measuring: Callable[[Request], tuple[WorkerLayout, ...]]

    def sized(self, begun: Plan | SizedJob | None, rate: TrainingRate | None = None) -> _Sized:
        """The request at this rate, with its layouts; where plait chooses the model's size and no layout holds that
        one, the largest that fits. Raises PlaitError, with what would help, where none does."""
        rate = rate or rate_before_pricing(self.resources)
        while True:
            request = request_of(self.config, self.corpus, self.resources, begun, rate)
            try:
                on_all = _Sized(request=request, layouts=self.worth_measuring(request), rate=rate)
                return on_all if isinstance(begun, Plan) else self._where_bf16_is(on_all, begun)
            except DoesNotFit as error:
                size = "" if isinstance(begun, Plan) else smaller_size(self.config, self.corpus, rate)
                if not size:
                    starts_from = "a base model" if request.job.base_fingerprint else "nothing"
                    raise error_with_suggestions(
                        error, request.constraints, request.profile, starts_from=starts_from
                    ) from None
                rate = replace(rate, size=size, too_large=chosen_size(self.config, self.corpus, rate))

    def _where_bf16_is(self, on_all: _Sized, begun: SizedJob | None) -> _Sized:
        """The same job on the nodes that have bf16, where others keep all of them from it and are worth less than that;
        unchanged elsewhere."""
        request, rate = on_all.request, on_all.rate
        if not may_leave_out_for_bf16(self.config, request):
            return on_all
        cluster = request.options[0].cluster
        if (found := resources_with_bf16(self.resources, cluster)) is None:
            return on_all
        resources, nodes = found
        left_out = seen_from_whole(cluster, nodes, on_all.layouts)
        part = replace(request_of(self.config, self.corpus, resources, begun, rate), part_of=left_out)
        try:
            layouts = self.worth_measuring(part)
        except DoesNotFit:
            return on_all
        is_better = is_preferred(layouts, on_all.layouts)
        return _Sized(request=part, layouts=layouts, rate=rate) if is_better else on_all

    def by_forecast(self, begun: SizedJob | None) -> _Sized:
        """The job sized by the forecast of its own steps, where its budget is a time and steps can be forecast."""
        found = self.sized(begun)
        if not (rate := self._own_rate(found)):
            return found
        if has_open_size(self.config, self.corpus):
            rate = self._best_rate(found, rate, smaller_size) or self._best_rate(found, rate, larger_size) or rate
        return self.sized(None, rate)

    def _best_rate(self, found: _Sized, rate: TrainingRate, next_size: NextSize) -> TrainingRate | None:
        """The rate of the best size in one direction, each at the rate that its own forecast promises, as small models
        reach less of the machines' peak; None if the first size there learns less or does not go with the recipe."""
        best, loss = None, self._expected_loss(found, rate)
        while size := next_size(self.config, self.corpus, rate):
            try:
                other = self.sized(None, replace(rate, size=size))
            except PlaitError:  # what the recipe names does not suit that size, say its heads
                break
            if other.rate.too_large == size:
                return replace(rate, too_large=size)
            rate = self._own_rate(other) or rate
            if (other_loss := self._expected_loss(other, rate)) >= loss:
                break
            best, loss = rate, other_loss
        return best

    def _own_rate(self, found: _Sized) -> TrainingRate | None:
        rate = forecast_rate(found.request, self.resources, found.layouts)
        if rate is None or not has_open_size(self.config, self.corpus):
            return rate
        size = chosen_size(self.config, self.corpus, found.rate)
        return replace(rate, size=size, too_large=found.rate.too_large)

    def _expected_loss(self, found: _Sized, rate: TrainingRate) -> float:
        shape = found.request.job.shape
        tokens_per_s = rate.flops_per_s / training_flops_of_weights(shape)
        return expected_loss(self.config, self.corpus, shape, tokens_per_s)


def with_layout(plan: Plan, split: WorkerLayout) -> Plan:
    """The plan with another layout."""
    return replace(
        plan,
        placement=split.placement,
        step_s=split.step_s,
        forecast=split.forecast and updated_forecast(split.forecast, split.forecast.calibration, split.step_s),
    )


def settle(config: RunConfig, draft: Draft, measured: Sequence[WorkerLayout]) -> Plan:
    """The finished plan: the simplest of the measured layouts that is about as fast as the fastest, and a time
    budget turned into steps."""
    best = choose(measured)
    plan = settled_on(config, draft, best)
    return replace(plan, reasons=(*_choice_reasons(measured, best), *best.reasons, *plan.reasons))


def settled_on(config: RunConfig, draft: Draft, best: WorkerLayout) -> Plan:
    """The finished plan with this layout but for the reasons for it, which take dozens of searches."""
    plan = with_layout(draft.plan, best)
    length = _run_length(draft, plan)
    warmup = warmup_steps(config, length.value.steps)
    optimizer = replace(plan.job.optimizer, warmup_steps=warmup.value)
    plan = replace(
        plan,
        job=replace(plan.job, steps=length.value.steps, optimizer=optimizer),
        cadence=replace(plan.cadence, evaluate_every_steps=length.value.evaluate_every_steps),
        reasons=(
            *plan.reasons,
            *_micro_batch_reasons(config, plan),
            *length.reasons,
            *warmup.reasons,
        ),
        warnings=(*plan.warnings, *(warnings_of(best.search) if best.search else ())),
    )
    return with_copies_reasoned(config.recover, plan, best.search.cluster.n_nodes if best.search else 1)


def _micro_batch_reasons(config: RunConfig, plan: Plan) -> list[str]:
    """Why micro-batches are not larger; empty if the recipe names their size or a reason about it exists already."""
    part = max(plan.sequences_per_replica)
    usual = usual_micro_sequences(plan.job.batch_sequences, plan.placement.layout, plan.job.sequence)
    more = plan.machines.device == "cpu" and plan.placement.micro_sequences > usual
    if (
        config.layout.micro_sequences != "auto"
        or plan.placement.micro_limits
        or more
        or part <= plan.placement.micro_sequences
    ):
        return []
    return [
        f"micro-batches of {plan.placement.micro_sequences} of a worker's {counted(part, 'sequence')}: "
        "what its memory holds well"
    ]


def lines_without_effect(config: RunConfig, layouts: Sequence[WorkerLayout]) -> list[str]:
    """Keys of [layout] that were named although no layout has the axis that they are about."""
    about = (("schedule", "pipeline"), ("virtual_stages", "pipeline"), ("shard_what", "shard"))
    return [
        f"layout.{key} changes nothing: layout.{axis} is 1"
        for key, axis in about
        if getattr(config.layout, key) != "auto" and all(one.layout.degrees[axis] == 1 for one in layouts)
    ]


def _balance(config: RunConfig, resources: Resources, split: WorkerLayout) -> Derived[int]:
    """Steps between changes of the shares while the run goes on, 0 for never."""
    here = resources.machine
    several_hosts = split.search is not None and split.search.cluster.n_nodes > 1
    unlike = (several_hosts or split.placement.shares or here.unlike) and split.layout.expert == 1
    every = balance_every_steps(config, "unequal" if unlike else "alike")
    unequal = f"beside {here.name} it has {', '.join(here.unlike)}" if here.unlike else "they are not equal"
    reason = "machines of a run over several hosts may slow down" if several_hosts else unequal
    if not every or config.balance.every != "auto":
        return Derived(value=every)
    often, reasons = f"every {counted(every, 'step')}: {reason}", tuple[str, ...]()
    if split.layout.data_parallel_degree > 1:
        reasons = (f"shares of the batch may change {often} (balance.every)",)
    elif split.layout.pipeline > 1 and split.layout.virtual_stages == 1:
        measured = "or be faster than they were while they were measured"
        reasons = (f"layers may move between stages {often}, {measured} (balance.every)",)
    return Derived(value=every, reasons=reasons)


def _choice_reasons(measured: Sequence[WorkerLayout], best: WorkerLayout) -> list[str]:
    if len(measured) < 2 or any(split.step_s is None for split in measured):
        return []
    are_equal = len({split.workers for split in measured}) < len(measured)
    words = [_layout_words(split) if are_equal else f"{split.workers}" for split in measured]
    text = ", ".join(
        f"{name} × {counted(split.placement.threads, 'thread')} {format_duration(split.step_s or 0)}"
        for split, name in sorted(zip(measured, words, strict=True), key=lambda pair: pair[0].workers)
    )
    winner = _layout_words(best) if are_equal else counted(best.workers, "worker")
    if best.step_s == min(split.step_s or 0.0 for split in measured):
        return [f"{winner}: fastest step of those timed ({text})"]
    return [f"{winner}: the simplest within {MEASURED_TOLERANCE:.0%} of the fastest step of those timed ({text})"]


def _layout_words(split: WorkerLayout) -> str:
    what = f" splitting {split.layout.shard_what}" if split.layout.shard > 1 else ""
    return f"{split.layout}{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunLength:
    steps: int
    evaluate_every_steps: int
    """0: only at the end."""


def _run_length(draft: Draft, plan: Plan) -> Derived[_RunLength]:
    budget, why = plan.job.budget, list[str]()
    # An evaluation is a forward pass, a third of a step's work, over the held-out tokens.
    evaluation_steps = draft.heldout_tokens / (3 * plan.batch_tokens)
    step_s = plan.step_s or (plan.forecast.step_s if plan.forecast else None)
    rough = steps_in_budget(budget, plan.batch_tokens, step_s=step_s)
    rounds = (
        max(1, min(EVALUATIONS_AT_MOST, int(EVALUATION_SHARE * rough / evaluation_steps))) if evaluation_steps else 0
    )
    requested = None if draft.evaluations == "auto" else round(draft.evaluations.value)
    steps = rough
    if budget.unit == "seconds" and step_s:
        spent = rounds * evaluation_steps if requested is None else _evaluating(rough, requested, evaluation_steps)
        steps = max(1, round(rough - spent))
        known = "measured" if plan.step_s else "predicted"
        reason = f"{budget} at {format_duration(step_s)} a step, as {known}, evaluations included"
        if plan.job.most_tokens is not None and steps * plan.batch_tokens > plan.job.most_tokens:
            steps = ceil(plan.job.most_tokens / plan.batch_tokens)
            reason = _short_text_reason(plan, steps * step_s)
        why.append(f"{counted(steps, 'step')}: {reason}")
    if evaluation_steps > 0.2 * steps:
        why.append(
            "measuring the held-out loss adds over a fifth to the training time; a smaller data.holdout is faster"
        )
    between = (ceil(steps / rounds) if rounds > 1 else 0) if requested is None else requested
    return Derived(value=_RunLength(steps=steps, evaluate_every_steps=between), reasons=tuple(why))


def _short_text_reason(plan: Plan, duration_s: float) -> str:
    passes = 1 + round(REPEATS_DECAY)
    return (
        f"this text is small: {passes} passes, {format_duration(duration_s)}, learn it, and training for "
        f"{plan.job.budget} would only memorise it (Muennighoff 2023)"
    )


def _evaluating(rough: int, every: int, evaluation_steps: float) -> float:
    """Evaluation time in steps, within a time of `rough` steps: one evaluation at the end, and one each `every` steps
    unless 0."""
    if not every:
        return evaluation_steps
    steps = (rough - evaluation_steps) / (1 + evaluation_steps / every)
    return rough - steps


def plan_summary(plan: Plan) -> str:
    """One line on what will be trained, for people."""
    shape = plan.job.shape
    return (
        f"{format_count(parameter_count(shape))} parameters ({counted(shape.layers, 'layer')}, width "
        f"{shape.width}, {counted(shape.heads, 'head')}, vocabulary {shape.vocabulary}), "
        f"{counted(plan.job.steps, 'step')} of {plan.job.batch_sequences} × {plan.job.sequence} "
        f"tokens, {format_si(training_flops_per_token(shape, plan.job.sequence, 'full'), 'FLOP')} a token"
    )


def updated_forecast(forecast: Forecast, runs: Calibration, step_s: float | None) -> Forecast:
    """The forecast with the factors of `runs` and, where a step was timed (`step_s`), scaled to it.

    See note [steps that were timed before the run] in calibration/factors.py. Forecasts without items, of earlier
    versions, stay as they are.
    """
    if forecast.items is None:
        return forecast
    said, before = without_calibration(forecast.items, forecast.calibration), forecast.calibration
    as_before = step_s is None and (runs.compute, runs.messages) == (before.compute, before.messages)
    now = replace(runs, timed=before.timed if as_before else 1.0)  # of steps that were timed for an earlier run
    measured = step_s if forecast.basis == "formulas" else None
    if measured is not None:
        now = replace(now, timed=measured / with_calibration(said, now).step_s)
    if math.isclose(now.timed, before.timed) and replace(now, timed=before.timed) == before:
        return forecast  # removing and reapplying the same factor would only add rounding errors
    items, alone_s = with_calibration(said, now), forecast.one_device_step_s
    moved = now.compute / before.compute
    if items.messages_s + items.within_s + items.bubble_s <= LEAST_MESSAGE_SHARE_TO_LEARN * items.step_s:
        moved *= now.timed / before.timed  # nearly all is computing, which one device alone does, too
    return replace(
        forecast,
        step_s=items.step_s,
        items=items,
        calibration=now,
        one_device_step_s=None if alone_s is None else alone_s * moved,
        error=forecast.error if measured is None else min(MEASURED_STEP_ERROR, forecast.error),
    )
