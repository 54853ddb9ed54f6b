"""Why a step takes longer or shorter than forecast: figures of the forecast that may be off and settings that may
differ by mistake, the likeliest first, what each would have to be, and how to tell.

Cost inputs are those of a single candidate here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Literal

import numpy as np

from plait.errors import PlaitError
from plait.machines.catalog import Link
from plait.machines.cluster import Island
from plait.planner.problem.candidates import RECOMPUTE_MODES, Candidates
from plait.planner.search.cost_breakdown import BOTTLENECKS, TIME_NAMES, model_flops_utilisation
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import bytes_of, step_seconds, step_time_of
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.device_rates import STREAM_SHARE, device_rates, peak_flops
from plait.units import compared_text, counted, format_bytes, format_duration, parse_amount, plain_number

LARGEST_STRAIN = 4.0
"""Largest power of its usual error factor that a figure may be off by and still count as an explanation."""
EXPLANATIONS_LISTED = 6
"""Explanations that are listed, at most."""
NOTABLE_DIFFERENCE = 0.02
"""Share of a step by which another way to run must differ to be named."""
LEAST_RATIO_TO_TELL_APART = 1.05
"""How many times longer a step must be by one explanation than by another for a run to tell them apart."""
CLOSE_ENOUGH = 0.002
"""Relative tolerance between the measured step and the step with an altered figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One thing that would make the step as long as measured."""

    name: str
    needs: str
    look: str
    strain: float
    """Deviation of the figure in units of its usual one (logarithms): 1 is common, larger is less likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """One thing that does not explain the measurement by itself, with the step that it would lead to."""

    name: str
    step_s: float
    bound: Literal["at most", "at least", "exactly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A measured step against the forecast, and what can explain it, the likeliest first."""

    measured_s: float
    forecast_s: float
    error: float
    """The forecast's own error bar, as a share."""
    mfu: float
    """Model FLOPs utilisation of the measured step, all attention scores counted."""
    mfu_forecast: float
    verdict: Literal["as forecast", "slower", "faster"]
    explanations: tuple[Explanation, ...]
    excluded: tuple[Excluded, ...]
    experiment: str
    """One run that tells the likeliest explanations apart; empty where there are fewer than two."""

    @property
    def factor(self) -> float:
        return self.measured_s / self.forecast_s


def diagnose(found: Search, measured_s: float) -> Diagnosis:
    """Possible explanations of a measured step of the chosen layout, each as one change of the forecast."""
    forecast_s, error = found.chosen_step_s, found.tolerance
    factor = measured_s / forecast_s
    suspects: list[_Suspect] = []
    excluded: list[Excluded] = []
    if abs(factor - 1) > error:
        inputs = chosen_layout(found)
        tried = [_by_figure(inputs, figure, measured_s) for figure in figures_of(inputs)]
        tried += [_by_setting(other, measured_s, forecast_s, error) for other in settings_that_fit(inputs)]
        excluded = [one for one in tried if isinstance(one, Excluded)]
        suspects = [one for one in tried if isinstance(one, _Suspect)]
        suspects = sorted(suspects, key=lambda one: one.explanation.strain)[:EXPLANATIONS_LISTED]
    mfu, _ = model_flops_utilisation(found, found.chosen)
    return Diagnosis(
        measured_s=measured_s,
        forecast_s=forecast_s,
        error=error,
        mfu=mfu / factor,
        mfu_forecast=mfu,
        verdict="as forecast" if abs(factor - 1) <= error else "slower" if factor > 1 else "faster",
        explanations=tuple(one.explanation for one in suspects),
        excluded=tuple(excluded),
        experiment=_experiment(suspects[:3]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspect:
    """An explanation with the cost inputs by which a step takes as long as measured."""

    explanation: Explanation
    inputs: CostInputs


def _by_figure(inputs: CostInputs, figure: Figure, measured_s: float) -> _Suspect | Excluded | None:
    """How far a figure must be off for the step to be as measured."""
    before_s = layout_step_s(inputs)
    slower = measured_s > before_s
    farthest = figure.usual ** (LARGEST_STRAIN if slower else -LARGEST_STRAIN)
    most_s = layout_step_s(figure.altered(inputs, farthest))
    if abs(most_s / before_s - 1) < CLOSE_ENOUGH:
        return None  # the step does not depend on this figure
    if (most_s < measured_s) if slower else (most_s > measured_s):
        return Excluded(name=figure.name, step_s=most_s, bound="at most" if slower else "at least")
    factor = _solved(lambda f: layout_step_s(figure.altered(inputs, f)), farthest, measured_s)
    there, strain = figure.altered(inputs, factor), abs(log(factor)) / log(figure.usual)
    explanation = Explanation(name=figure.name, needs=figure.needs(inputs, there), look=figure.look, strain=strain)
    return _Suspect(explanation=explanation, inputs=there)


def _solved(step_s: Callable[[float], float], farthest: float, measured_s: float) -> float:
    """The factor between 1 and the farthest at which a step takes as long as measured; the step grows with it."""
    low, high = sorted((1.0, farthest))
    while True:
        middle = (low * high) ** 0.5
        now_s = step_s(middle)
        if abs(now_s / measured_s - 1) < CLOSE_ENOUGH or high / low < 1 + CLOSE_ENOUGH:
            return middle
        low, high = (middle, high) if now_s < measured_s else (low, middle)


def _by_setting(other: Setting, measured_s: float, forecast_s: float, error: float) -> _Suspect | Excluded | None:
    """Whether running in another way would take about as long as measured."""
    altered_s = layout_step_s(other.inputs)
    if (altered_s > forecast_s) != (measured_s > forecast_s) or abs(altered_s / forecast_s - 1) < NOTABLE_DIFFERENCE:
        return None
    if abs(altered_s / measured_s - 1) > error:
        return Excluded(name=other.name, step_s=altered_s, bound="exactly")
    missed = abs(log(altered_s / measured_s)) / log(1 + error)
    needs = f"a step would take {format_duration(altered_s)}"
    explanation = Explanation(name=other.name, needs=needs, look=other.look, strain=1 + missed)
    return _Suspect(explanation=explanation, inputs=other.inputs)


def _experiment(suspects: Sequence[_Suspect]) -> str:
    """The run whose step would differ most between the explanations, with the step that each leads to."""
    if len(suspects) < 2:
        return ""
    options = [(0.0, "", [0.0])]
    for words, change in _experiments(suspects[0].inputs):
        steps = [layout_step_s(change(one.inputs)) for one in suspects]
        options.append((max(steps) / min(steps), words, steps))
    spread, words, steps = max(options)
    if spread < LEAST_RATIO_TO_TELL_APART:
        return ""
    each = ", ".join(
        f"{format_duration(s)} if it is {one.explanation.name}" for one, s in zip(suspects, steps, strict=True)
    )
    return f"to tell the first apart: {words} a step would take {each}"


def _experiments(inputs: CostInputs) -> list[tuple[str, Callable[[CostInputs], CostInputs]]]:
    """Changes of a recipe that a person can make at once, and what they do to the cost inputs."""
    w, c = inputs.workload, inputs.candidates
    micro, replicas = int(c.micro_sequences[0]), int(c.data_parallel_degree[0])

    def halved(other: CostInputs) -> CostInputs:
        return replace(other, workload=replace(other.workload, batch_sequences=w.batch_sequences // 2))

    def with_micro_sequences(size: int) -> Callable[[CostInputs], CostInputs]:
        return lambda other: replace(other, candidates=replace(other.candidates, micro_sequences=np.array([size])))

    tried: list[tuple[str, Callable[[CostInputs], CostInputs]]] = []
    if w.batch_sequences % (2 * replicas * micro) == 0:
        tried.append((f"with train.batch_tokens = {w.batch_tokens // 2}", halved))
    if micro % 2 == 0:
        tried.append((f"with layout.micro_sequences = {micro // 2}", with_micro_sequences(micro // 2)))
    twice = with_micro_sequences(2 * micro)
    if w.batch_sequences // replicas % (2 * micro) == 0 and _fits(twice(inputs)):
        tried.append((f"with layout.micro_sequences = {2 * micro}", twice))
    return tried


def verdict_text(diagnosis: Diagnosis) -> str:
    """The measured step against the forecast."""
    measured, forecast = format_duration(diagnosis.measured_s), format_duration(diagnosis.forecast_s)
    far = compared_text(diagnosis.factor, "slower", "faster", digits=1)
    against = f"{measured} a step, and the layout above was forecast to take {forecast}: {far}"
    bar = f"this forecast's error bar of {diagnosis.error:.0%}"
    if diagnosis.verdict == "as forecast":
        return f"{against}, which is inside {bar}: there is nothing to explain"
    return f"{against}, more than {bar}"


def explanation_lines(diagnosis: Diagnosis) -> list[str]:
    """Explanations of the difference, possible and impossible; empty if there is nothing to explain."""
    if diagnosis.verdict == "as forecast":
        return []
    lines = [f"{one.name}: {one.needs}. To know: {one.look}" for one in diagnosis.explanations]
    if not lines:
        lines = ["nothing explains it alone: look whether it was this model, batch and layout, on these machines"]
    if diagnosis.experiment:
        lines.append(diagnosis.experiment)
    if diagnosis.excluded:
        lines.append(f"cannot explain it alone: {', '.join(map(_excluded_text, diagnosis.excluded))}")
    share = f"{diagnosis.mfu:.1%} of the arithmetic peak (MFU), where {diagnosis.mfu_forecast:.1%} were forecast"
    beyond = "; more than all of it: another model, batch or machine was measured" if diagnosis.mfu > 1 else ""
    return [*lines, f"the measured step makes use of {share}{beyond}"]


def _excluded_text(one: Excluded) -> str:
    bound = "" if one.bound == "exactly" else f" {one.bound}"
    return f"{one.name} ({format_duration(one.step_s)}{bound})"


def seconds_of(text: str) -> float:
    """Read --measured: "412ms", or a duration such as "1.3 s"; raises PlaitError on anything else."""
    try:
        amount = parse_amount(text)
    except PlaitError:
        amount = None
    if amount is None or amount.unit != "seconds":
        raise PlaitError(f'--measured "{text}" is not the duration of a step; write for example 412ms or "1.3 s"')
    return amount.value


def chosen_layout(found: Search) -> CostInputs:
    """The layout that a search chose, with all that its price depends on."""
    return found.cost_inputs.with_candidates(found.candidates.select(np.array([found.chosen])))


def layout_step_s(layout: CostInputs) -> float:
    """Seconds of a step."""
    return float(step_seconds(layout)[0])


def waited_s(layout: CostInputs) -> float:
    """Seconds of a step in which devices wait for messages."""
    items = _items_s(layout)
    return sum(items[name] for name in BOTTLENECKS["links"])


def _items_s(layout: CostInputs) -> dict[str, float]:
    """Seconds of a step by item, by the closed form, and those of messages that arithmetic hides."""
    priced = step_time_of(layout)
    return {name: float(getattr(priced, name)[0]) for name in (*TIME_NAMES, "hidden")}


def _needed_bytes(layout: CostInputs) -> float:
    return float(bytes_of(layout.workload, layout.candidates, layout.profile)[0])


def _fits(layout: CostInputs) -> bool:
    return _needed_bytes(layout) <= min(island.device.memory_bytes for island in layout.cluster.islands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that may have differed from the plan, and the cost inputs with it."""

    name: str
    inputs: CostInputs
    look: str


NAMED_AT_THE_START = "the run's first lines and its plan.json name it"


def settings_that_fit(inputs: CostInputs) -> Iterator[Setting]:
    """Recomputation, micro-batches, schedule, precision and attention: each was once seen to be another by mistake."""
    return (one for one in _other_settings(inputs) if _fits(one.inputs))


def _other_settings(inputs: CostInputs) -> Iterator[Setting]:
    w, row = inputs.workload, inputs.candidates.row(0)

    def with_knobs(name: str, **knobs: int | str) -> Setting:
        candidates = Candidates.from_rows([{**row, **knobs}], inputs.candidates.layer_split)
        return _seen_in_memory(name, inputs, inputs.with_candidates(candidates))

    for recompute in RECOMPUTE_MODES:
        if recompute != row["recompute"]:
            yield with_knobs(f'recompute "{recompute}" in place of "{row["recompute"]}"', recompute=recompute)
    part, micro = w.batch_sequences // int(inputs.candidates.data_parallel_degree[0]), int(row["micro_sequences"])
    for size in dict.fromkeys((1, micro // 2, 2 * micro)):
        if size not in (0, micro) and part % size == 0:
            yield with_knobs(f"{counted(size, 'sequence')} at a time in place of {micro}", micro_sequences=size)
    if row["schedule"] in ("interleaved", "zero-bubble"):
        plain = inputs.with_candidates(Candidates.from_rows([{**row, "schedule": "1f1b", "virtual": 1}], "balanced"))
        name = f'schedule "1f1b" in place of "{row["schedule"]}"'
        yield Setting(name=name, inputs=plain, look=NAMED_AT_THE_START)
    if w.precision in ("bf16", "fp16", "fp8"):
        float32 = replace(inputs, workload=replace(w, precision="float32"))
        name = f"products in float32 in place of {w.precision}"
        yield Setting(name=name, inputs=float32, look=NAMED_AT_THE_START)
    if w.attention == "flash":
        unfused = replace(inputs, workload=replace(w, attention="unfused"))
        yield _seen_in_memory("attention in single products, not in one fused kernel", inputs, unfused)


def _seen_in_memory(name: str, inputs: CostInputs, other: CostInputs) -> Setting:
    needed, planned = format_bytes(_needed_bytes(other)), format_bytes(_needed_bytes(inputs))
    memory = f"a device would have {needed} of memory in use, not {planned}"
    return Setting(name=name, inputs=other, look=memory if needed != planned else NAMED_AT_THE_START)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the cost model that may be off by a factor."""

    name: str
    usual: float
    """Factor by which such a figure is often off: our judgement, which only ranks the explanations."""
    altered: Callable[[CostInputs, float], CostInputs]
    """The cost inputs with which this figure costs this many times the time (below 1: less), as far as physics
    allows."""
    needs: Callable[[CostInputs, CostInputs], str]
    """How the figure would have to differ, in words, from the forecast's layout and the one that explains the
    measurement."""
    look: str
    """Advice on how to tell it apart from other explanations."""


def figures_of(inputs: CostInputs) -> Iterator[Figure]:
    """All figures that play a part for a layout."""
    yield ARITHMETIC_RATE
    yield MEMORY_RATE
    yield HOST_TIME
    if inputs.cluster.n_devices > 1:
        yield ONE_SLOW_DEVICE
        yield OVERLAP
        for link in (LINK_BETWEEN, LINK_INSIDE):
            if _affected_messages(inputs, link.altered(inputs, 2.0)):
                yield link
    yield TIME_OUTSIDE_STEPS


def _affected_messages(inputs: CostInputs, other: CostInputs) -> str:
    """The messages that take longer, or less long, with the other cost inputs, in words."""
    here, there = _items_s(inputs), _items_s(other)
    names = [name for name in BOTTLENECKS["links"] if abs(there[name] - here[name]) > 1e-3 * layout_step_s(inputs)]
    if not names and abs(there["hidden"] - here["hidden"]) > 1e-3 * layout_step_s(inputs):
        return "messages that run under arithmetic"
    return ", ".join(TIME_NAMES[name] for name in names)


def _slowest(inputs: CostInputs) -> Island:
    w, profile = inputs.workload, inputs.profile
    return min(inputs.cluster.islands, key=lambda i: device_rates(i.device, w.precision, profile, i.speed).linear_flops)


def _reached(inputs: CostInputs) -> float:
    """Share of the peak that the largest products reach on the slowest device."""
    island, w = _slowest(inputs), inputs.workload
    rates = device_rates(island.device, w.precision, inputs.profile, island.speed)
    return rates.linear_flops / peak_flops(island.device, w.precision)


def _with_profile(inputs: CostInputs, **changes: float) -> CostInputs:
    return replace(inputs, profile=replace(inputs.profile, **changes))


def _with_arithmetic(inputs: CostInputs, factor: float) -> CostInputs:
    factor, profile = max(factor, _reached(inputs)), inputs.profile
    return _with_profile(inputs, product_share=profile.product_share / factor, flash_share=profile.flash_share / factor)


ARITHMETIC_RATE = Figure(
    name="arithmetic",
    usual=1.25,
    altered=_with_arithmetic,
    needs=lambda here, there: (
        f"large products would have to reach {_reached(there):.0%} of the peak, not {_reached(here):.0%}"
    ),
    look="time one large product on a device (plait probe), and watch the clock, power and heat of a long run",
)


def _with_islands(inputs: CostInputs, change: Callable[[Island], Island]) -> CostInputs:
    return replace(inputs, cluster=replace(inputs.cluster, islands=tuple(map(change, inputs.cluster.islands))))


def _slower(island: Island, memory: float, speed: float = 1.0) -> Island:
    device = replace(island.device, memory_bytes_per_s=island.device.memory_bytes_per_s / memory)
    return replace(island, device=device, speed=island.speed / speed)


def _stream_rate(inputs: CostInputs) -> str:
    return f"{_slowest(inputs).device.memory_bytes_per_s * STREAM_SHARE / 1e9:,.0f} GB/s"


MEMORY_RATE = Figure(
    name="passes over memory",
    usual=1.4,
    altered=lambda inputs, factor: _with_islands(inputs, lambda island: _slower(island, max(factor, STREAM_SHARE))),
    needs=lambda here, there: (
        f"norms, activations and the update would have to stream at {_stream_rate(there)}, not {_stream_rate(here)}"
    ),
    look="look in a profile of one step for many short kernels where fused ones were expected (compile off?)",
)
HOST_TIME = Figure(
    name="the host",
    usual=2.0,
    altered=lambda inputs, factor: _with_profile(
        inputs, launch_s=inputs.profile.launch_s * factor, micro_s=inputs.profile.micro_s * factor
    ),
    needs=lambda here, there: (
        f"a kernel would have to take it {plain_number(there.profile.launch_s * 1e6, 2)} µs to launch, not "
        f"{plain_number(here.profile.launch_s * 1e6, 2)}"
    ),
    look="look at the processor: one core a device at 100 % while the devices are not fully used",
)


def _with_slow_device(inputs: CostInputs, factor: float) -> CostInputs:
    factor = max(factor, 1.0)  # a faster one than the others changes nothing
    return _with_islands(inputs, lambda island: _slower(island, factor, factor))


ONE_SLOW_DEVICE = Figure(
    name="one slow device",
    usual=1.2,
    altered=_with_slow_device,
    needs=lambda here, there: (
        f"one would have to be {compared_text(_slowest(here).speed / _slowest(there).speed, 'slower', 'faster')} "
        "compared with the others: all wait for it"
    ),
    look="compare clocks and heat over the devices, or how long each waits before the sums: the slow one does not",
)
HIDING_SHARES = (
    "hides_tensor",
    "hides_context",
    "hides_pipeline",
    "hides_gradients",
    "hides_updates",
    "hides_parameters",
    "hides_experts",
)


def _with_hiding(inputs: CostInputs, factor: float) -> CostInputs:
    shares = {name: getattr(inputs.profile, name) for name in HIDING_SHARES}
    other = {name: share / factor if factor > 1 else 1 - (1 - share) * factor for name, share in shares.items()}
    return _with_profile(inputs, **other)


OVERLAP = Figure(
    name="messages under arithmetic",
    usual=2.0,
    altered=_with_hiding,
    needs=lambda here, there: (
        f"devices would have to wait {format_duration(waited_s(there))} a step for messages, "
        f"not {format_duration(waited_s(here))}"
    ),
    look="look in a profile of one step whether messages lie under the products or between them",
)


def _link(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s / max(factor, link.reached))


def _with_between(inputs: CostInputs, factor: float) -> CostInputs:
    cluster = replace(inputs.cluster, between=_link(inputs.cluster.between, factor))
    return _with_islands(
        replace(inputs, cluster=cluster),
        lambda island: replace(island, network=_link(island.network, factor) if island.network else None),
    )


def _carried_text(there_bytes_per_s: float, here_bytes_per_s: float) -> str:
    there, here = (plain_number(rate / 1e9, 2) for rate in (there_bytes_per_s, here_bytes_per_s))
    return f"it would have to carry {there} GB/s a device, not {here}"


LINK_BETWEEN = Figure(
    name="the link between nodes",
    usual=2.0,
    altered=_with_between,
    needs=lambda here, there: (
        f"{_carried_text(there.network.between_bytes_per_s, here.network.between_bytes_per_s)} "
        f"({_affected_messages(here, there)})"
    ),
    look="measure it (plait probe), or train on one node alone: is that as fast as plait plan says for it?",
)
LINK_INSIDE = Figure(
    name="the link inside a node",
    usual=1.6,
    altered=lambda inputs, factor: _with_islands(
        inputs, lambda island: replace(island, inside=_link(island.inside, factor))
    ),
    needs=lambda here, there: (
        f"{_carried_text(there.network.inside_bytes_per_s, here.network.inside_bytes_per_s)} "
        f"({_affected_messages(here, there)})"
    ),
    look="measure it (plait probe): devices that do not see each other send their messages through the processor",
)
TIME_OUTSIDE_STEPS = Figure(
    name="reading data, saving, reports",
    usual=4.0,
    altered=lambda inputs, factor: _with_profile(inputs, step_s=inputs.profile.step_s * factor),
    needs=lambda here, there: (
        f"what each step costs beside the model would have to take {format_duration(there.profile.step_s)}, "
        f"not {format_duration(here.profile.step_s)}"
    ),
    look="look for idle devices between two steps; train on text that lies in memory, without saving",
)
