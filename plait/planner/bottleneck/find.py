"""What limits a run: each thing that may, the changes that would relieve it, and the one of which most is to be gained.

Pure: values of a run in, one value out. Gains come from the fitted cost model (fitted_model.py) where a change is one
of the layout or the links, and from the ranks' own times where it is about a slow host, the data or starting up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from plait.planner.bottleneck import words
from plait.planner.bottleneck.fitted_model import FittedModel, PlanPrice, StepMeasured, fitted_model
from plait.planner.plan import Plan
from plait.report.bottleneck import LEAST_REMEDY_GAIN, BottleneckCause, Remedy, RunBottleneck

SLOW_HOST_EXCESS = 1.15
"""A host is slow if it computes this many times as long as the slowest of the others."""
BUDGET_MULTIPLES = (2, 5, 10, 20, 50)
"""Factors by which a longer run may be suggested: the first after which the start takes SETTLED_START_SHARE of it."""
SETTLED_START_SHARE = 0.1
LEAST_START_S = 10
"""Seconds of starting below which a run is not said to be limited by it."""
START_SHARE_TO_NAME = 1 / 3
"""A start that takes a smaller share of the run is named only if nothing else is found, because a longer run is
another job."""
LINK_MULTIPLES = (2.0, 5.0, 10.0, 25.0, 100.0)
"""Factors by which faster links may be suggested: the first that brings MOST_OF_A_GAIN of what unlimited links
would."""
MOST_OF_A_GAIN = 0.8
LARGER_MICRO_BATCHES = (2, 4, 8, 16, 32, 64)
AS_GOOD = 0.02
"""A larger change is preferred only if it saves more than this share of a step."""
_WORK: dict[BottleneckCause, tuple[str, ...]] = {
    "products": ("products",),
    "attention": ("scores",),
    "head": ("head",),
    "memory rate": ("stream",),
    "kernel launches": ("host",),
    "recomputation": ("recompute",),
    "optimizer": ("optimizer",),
}
"""Work that every run must do, and the items of the cost model that measure it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """How a run spent its time: each rank's seconds of a step by what it did, medians over steps."""

    compute_s: tuple[float, ...]
    """Forward and backward, without the waits below."""
    wait_s: tuple[float, ...]
    inside_s: tuple[float, ...]
    data_s: tuple[float, ...]
    rest_s: tuple[float, ...]
    """What is left of a step: the optimizer's update, and other work once a step."""
    start_s: float = 0.0
    """From the start of the workers to their first steps, including the extra time of the first steps."""

    @property
    def critical_rank(self) -> int:
        """The rank that the others wait for."""
        busy = [sum(parts) for parts in zip(self.compute_s, self.data_s, strict=True)]
        return max(range(len(busy)), key=busy.__getitem__)

    @property
    def step_s(self) -> float:
        """A whole step."""
        return self.of_critical_rank.step_s

    @property
    def of_critical_rank(self) -> StepMeasured:
        """A step of that rank."""
        at = self.critical_rank
        return StepMeasured(
            compute_s=self.compute_s[at],
            inside_s=self.inside_s[at],
            wait_s=self.wait_s[at],
            data_s=self.data_s[at],
            rest_s=self.rest_s[at],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """One thing that limits a run."""

    bottleneck: RunBottleneck
    run_gain: float
    """How many times as fast the whole run would be, its start included, with the best change."""


def find_bottleneck(plan: Plan, run: MeasuredRun, named: Collection[str]) -> RunBottleneck:
    """What limits a run. `named` are the recipe keys that the user set: plait does not advise against its own
    choices, except where memory forced them."""
    measured = run.of_critical_rank
    model = fitted_model(plan, measured)
    findings = [*_of_data(measured), *_of_hosts(plan, run), *_of_model(plan, model, named)]
    stepping_s = plan.job.steps * measured.step_s
    found = [_finding(one, stepping_s, run.start_s) for one in findings if one.remedies]
    start = _of_start(plan, run.start_s, measured.step_s)
    if start and run.start_s >= LEAST_START_S and (not found or start.bottleneck.share > START_SHARE_TO_NAME):
        found.append(start)
    if found:
        return max(found, key=lambda one: one.run_gain).bottleneck
    return _work(model, measured, plan)


def _finding(one: RunBottleneck, stepping_s: float, start_s: float) -> _Finding:
    best = max(remedy.gain for remedy in one.remedies)
    return _Finding(bottleneck=one, run_gain=(start_s + stepping_s) / (start_s + stepping_s / best))


def _remedies(*tried: Remedy | None) -> tuple[Remedy, ...]:
    """The remedies that gain enough, the best first."""
    kept = [one for one in tried if one is not None and one.gain >= LEAST_REMEDY_GAIN]
    return tuple(sorted(kept, key=lambda one: -one.gain))


def _of_start(plan: Plan, start_s: float, step_s: float) -> _Finding | None:
    """A run that ends soon after its start; the planned number of steps counts."""
    steps = plan.job.steps
    whole_s = start_s + steps * step_s
    enough = [
        times for times in BUDGET_MULTIPLES if start_s <= SETTLED_START_SHARE * (start_s + times * steps * step_s)
    ]
    times = min(enough, default=BUDGET_MULTIPLES[-1])
    gain = whole_s * times / (start_s + times * steps * step_s)
    if not (remedies := _remedies(words.longer_run(plan, times, gain))):
        return None
    share = start_s / whole_s
    sentence = words.start_sentence(share, start_s)
    found = RunBottleneck(cause="start-up", share=share, sentence=sentence, remedies=remedies)
    return _Finding(bottleneck=found, run_gain=gain)


def _of_data(measured: StepMeasured) -> Iterator[RunBottleneck]:
    """Reading is one step ahead of computing, so the run waits only if reading takes longer than the rest of a step."""
    rest_s = measured.step_s - measured.data_s
    if measured.data_s <= 0 or rest_s <= 0:
        return
    gain = measured.step_s / rest_s
    share = measured.data_s / measured.step_s
    yield RunBottleneck(
        cause="data",
        share=share,
        sentence=words.data_sentence(share),
        remedies=_remedies(words.faster_reading(gain)),
    )


def _of_hosts(plan: Plan, run: MeasuredRun) -> Iterator[RunBottleneck]:
    """A host or GPU that the others wait for, because it computes longer in total and per unit of work: stages may
    hold different numbers of layers, and slower machines have smaller shares."""
    homes = [place for place, host in enumerate(plan.machines.hosts) for _ in range(host.workers)]
    if plan.machines.have_accelerators and len(set(homes)) < 2:
        homes = list(range(len(run.compute_s)))
    slowest, computed = run.critical_rank, run.compute_s
    if len(homes) != len(computed) or len(set(homes)) < 2 or min(computed) <= 0:
        return
    home = homes[slowest]
    each = [seconds / _work_of(plan, rank) for rank, seconds in enumerate(computed)]
    excess = min(_times_as_long(values, homes, home) for values in (computed, each))
    if excess < SLOW_HOST_EXCESS:
        return
    # Its update takes as many times as long; the others wait for that, too, before they begin another step.
    step_s, own_s = run.step_s, computed[slowest] + min(run.rest_s)
    saved_s = own_s - own_s / excess
    name = words.host_name(plan, home, slowest)
    even = Remedy(change=words.as_fast_as_others(name), gain=step_s / (step_s - saved_s))
    share = saved_s / step_s
    yield RunBottleneck(
        cause="slow host",
        share=share,
        sentence=words.host_sentence(name, excess, share),
        remedies=_remedies(even, *_other_shares(plan, run, home, homes, excess)),
    )


def _times_as_long(seconds: Sequence[float], homes: Sequence[int], home: int) -> float:
    """How many times as long as the slowest other host one host computes."""
    of = {place: median(s for s, at in zip(seconds, homes, strict=True) if at == place) for place in homes}
    return of.pop(home) / max(of.values())


def _work_of(plan: Plan, rank: int) -> float:
    """A rank's part of the work, in layers times sequences; head and embedding count as the plan priced them."""
    layout, forecast = plan.placement.layout, plan.forecast
    stage = layout.coordinates(rank)["pipeline"]
    layers = float(sum(layout.stage_layers[stage :: layout.pipeline]) or plan.job.shape.layers)
    if forecast is not None and stage == layout.pipeline - 1:
        layers += forecast.head_cost_in_layers or 0.0
    if forecast is not None and stage == 0:
        layers += forecast.embedding_cost_in_layers
    return layers * plan.sequences_per_replica[layout.data_parallel_rank(rank)]


def _other_shares(
    plan: Plan, run: MeasuredRun, home: int, homes: Sequence[int], excess: float
) -> Iterator[Remedy | None]:
    """Less work for a slow host: shares in proportion to the measured speeds, or none at all."""
    shares, layout, measured = plan.sequences_per_replica, plan.placement.layout, run.of_critical_rank
    if layout.world_size != layout.data_parallel_degree:
        return
    step_s, beside_s, batch = measured.step_s, measured.step_s - measured.compute_s, sum(shares)
    speeds = [count / seconds for count, seconds in zip(shares, run.compute_s, strict=True)]
    if plan.cadence.balance_every_steps == 0:
        counts = [max(1, round(batch * speed / sum(speeds))) for speed in speeds]
        longest_s = max(count / speed for count, speed in zip(counts, speeds, strict=True))
        yield words.balanced(step_s / (beside_s + longest_s))
    if plan.machines.hosts:
        kept = [speed for speed, at in zip(speeds, homes, strict=True) if at != home]
        # A single worker that is left sends no messages; several still send theirs to each other.
        update_s = min(run.rest_s)
        saved_s = update_s - update_s / excess + (measured.wait_s if len(kept) == 1 else 0.0)
        name = words.host_name(plan, home, run.critical_rank)
        yield Remedy(change=words.left_out(name), gain=step_s / (beside_s - saved_s + batch / sum(kept)))


def _of_model(plan: Plan, model: FittedModel | None, named: Collection[str]) -> Iterator[RunBottleneck]:
    """The bottlenecks that the fitted model can price a change for."""
    if model is None:
        return
    if model.measured.compute_s > 0:
        yield from _of_layout(plan, model, named)
    if model.price.found.cluster.n_devices > 1:
        yield _of_network(plan, model)


def _of_layout(plan: Plan, model: FittedModel, named: Collection[str]) -> Iterator[RunBottleneck]:
    layout = plan.placement.layout
    if layout.recompute != "none":
        price = model.changed(recompute="none")
        if price is not None and "layout.recompute" in named:
            remedy = words.without_recomputation(model.gain(price))
            yield _excess("recomputation", remedy, words.recomputation_sentence(layout.recompute, _share(remedy)))
        elif price is None and (price := model.changed(memory="enough", recompute="none")) is not None:
            remedy = words.more_memory(price.found, model.gain(price))
            yield _excess("memory", remedy, words.memory_sentence(f"{layout.recompute} recomputation", _share(remedy)))
    yield from _of_micro_batches(plan, model, named)
    if layout.pipeline > 1 and "layout.schedule" in named:
        others = [name for name in ("1f1b", "zero-bubble") if name != layout.schedule]
        priced = [(name, price) for name in others if (price := model.changed(schedule=name)) is not None]
        if priced:
            name, price = min(priced, key=lambda one: model.step_s(one[1]))
            remedy = words.other_schedule(name, model.gain(price))
            yield _excess("pipeline", remedy, words.pipeline_sentence(_inside_share(model)))
    launches = plan.machines.have_accelerators and plan.arithmetic.compile == "off" and "train.compile" in named
    if launches and (price := model.changed(compile="on")) is not None:
        remedy = words.compiled(model.gain(price))
        yield _excess("kernel launches", remedy, words.launch_sentence(_share(remedy)))


def _of_micro_batches(plan: Plan, model: FittedModel, named: Collection[str]) -> Iterator[RunBottleneck]:
    """Micro-batches that are too small for a device to work at its rate, or too few to fill a pipeline."""
    own, part = plan.placement.micro_sequences, max(plan.sequences_per_replica)
    is_named = "layout.micro_sequences" in named
    larger = [size for times in LARGER_MICRO_BATCHES if (size := min(own * times, part)) > own]
    sizes = list(dict.fromkeys(larger))
    if plan.placement.layout.pipeline > 1:
        sizes += [own // by for by in (2, 4) if own % by == 0]
    priced = [(size, price) for size in sizes if (price := model.changed(micro_sequences=size)) is not None]
    if is_named and priced:
        size, price = _least_change(model, priced)
        remedy = words.other_micro_batch(size, model.gain(price))
        if size > own:
            yield _excess("micro-batch", remedy, words.micro_sentence(own, _share(remedy)))
        else:
            yield _excess("pipeline", remedy, words.pipeline_sentence(_inside_share(model)))
    elif len(priced) < len(sizes):
        ample = [
            (size, price)
            for size in sizes
            if size > own and (price := model.changed(memory="enough", micro_sequences=size)) is not None
        ]
        if ample:
            _, price = _least_change(model, ample)
            remedy = words.more_memory(price.found, model.gain(price))
            yield _excess("memory", remedy, words.memory_sentence(words.micro_text(own), _share(remedy)))


def _least_change(model: FittedModel, priced: Sequence[tuple[int, PlanPrice]]) -> tuple[int, PlanPrice]:
    """Of the prices about as good as the best, the first, which changes the least."""
    best_s = min(model.step_s(price) for _, price in priced)
    return next(one for one in priced if model.step_s(one[1]) <= (1 + AS_GOOD) * best_s)


def _of_network(plan: Plan, model: FittedModel) -> RunBottleneck:
    """Waiting for messages: faster links between hosts, or smaller messages."""
    layout, arithmetic, measured = plan.placement.layout, plan.arithmetic, model.measured
    share = (measured.wait_s + measured.inside_s) / measured.step_s
    tried: list[Remedy | None] = []
    between = model.link_place == "between"
    if between:
        endless = model.gain(model.with_links("between", 1e6)) - 1
        gains = [(times, model.gain(model.with_links("between", times))) for times in LINK_MULTIPLES]
        times, gain = next((one for one in gains if one[1] - 1 >= MOST_OF_A_GAIN * endless), gains[-1])
        tried.append(words.faster_links(model.price.found.cluster, times, gain))
    if between or plan.machines.have_accelerators:
        if layout.data_parallel_degree > 1 and arithmetic.gradient_transfer == "float32":
            tried.append(words.smaller_gradients(model.gain(model.price.with_transfer(gradients=True))))
        if layout.pipeline > 1 and arithmetic.stage_transfer == "float32":
            tried.append(words.smaller_stages(model.gain(model.price.with_transfer(stages=True))))
    return RunBottleneck(
        cause="network",
        share=share,
        sentence=words.network_sentence(plan, share, link=model.link_place),
        remedies=_remedies(*tried),
    )


def _excess(cause: BottleneckCause, remedy: Remedy, sentence: str) -> RunBottleneck:
    return RunBottleneck(cause=cause, share=_share(remedy), sentence=sentence, remedies=_remedies(remedy))


def _share(remedy: Remedy) -> float:
    """The share of a step that a change would save."""
    return max(0.0, 1 - 1 / remedy.gain)


def _inside_share(model: FittedModel) -> float:
    return model.measured.inside_s / model.measured.step_s


def _work(model: FittedModel | None, measured: StepMeasured, plan: Plan) -> RunBottleneck:
    """The largest part of a step, when no known change would gain much."""
    waiting: dict[BottleneckCause, float] = {"network": measured.wait_s, "pipeline": measured.inside_s}
    waiting["data"] = measured.data_s
    computing = _computing(model, measured)
    cause, seconds = max((waiting | computing).items(), key=lambda one: one[1])
    share = min(1.0, seconds / measured.step_s) if measured.step_s > 0 else 0.0
    return RunBottleneck(cause=cause, share=share, sentence=words.work_sentence(cause, share, plan))


def _computing(model: FittedModel | None, measured: StepMeasured) -> dict[BottleneckCause, float]:
    """Measured seconds of computing by kind of work, split as the model predicts; all of it as products if there is
    no model."""
    if model is None:
        return {"products": measured.compute_s, "optimizer": measured.rest_s}
    items = model.price.items
    said: dict[BottleneckCause, float] = {cause: sum(items[name] for name in names) for cause, names in _WORK.items()}
    whole = sum(seconds for cause, seconds in said.items() if cause != "optimizer")
    shared: dict[BottleneckCause, float] = {
        cause: measured.compute_s * seconds / whole for cause, seconds in said.items() if whole > 0
    }
    shared["optimizer"] = measured.rest_s
    return shared
