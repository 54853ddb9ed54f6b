"""Why a step takes longer or shorter than forecast: what can explain it, the likeliest first, and how to tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np

from plait.errors import PlaitError
from plait.planner.diagnosis.alternatives import Alternative, alternatives
from plait.planner.diagnosis.layout_price import chosen_layout, layout_bytes, layout_step_s
from plait.planner.diagnosis.sensitivities import Sensitivity, sensitivities
from plait.planner.explain.report import PlanSection
from plait.planner.search.cost_breakdown import model_flops_utilisation
from plait.planner.search.found import Search
from plait.planner.step_time.cost_inputs import CostInputs
from plait.units import compared_text, format_duration, parse_amount

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
    """What can explain a measured step of the chosen layout, as one change of the forecast each."""
    forecast_s = float(found.step_s[found.chosen])
    factor = measured_s / forecast_s
    explained: list[tuple[Explanation, CostInputs]] = []
    excluded: list[Excluded] = []
    if abs(factor - 1) > found.tolerance:
        inputs = chosen_layout(found)
        tried = [_explain_by_figure(inputs, lever, measured_s) for lever in sensitivities(inputs)]
        tried += [_explain_by_setting(swap, measured_s, forecast_s, found.tolerance) for swap in alternatives(inputs)]
        excluded = [one for one in tried if isinstance(one, Excluded)]
        explained = sorted((one for one in tried if isinstance(one, tuple)), key=lambda one: one[0].strain)[
            :EXPLANATIONS_LISTED
        ]
    peak_share, _ = model_flops_utilisation(found, found.chosen)
    return Diagnosis(
        measured_s=measured_s,
        forecast_s=forecast_s,
        error=found.tolerance,
        mfu=peak_share / factor,
        mfu_forecast=peak_share,
        verdict="as forecast" if abs(factor - 1) <= found.tolerance else "slower" if factor > 1 else "faster",
        explanations=tuple(explanation for explanation, _ in explained),
        excluded=tuple(excluded),
        experiment=_experiment([(explanation.name, inputs) for explanation, inputs in explained[:3]]),
    )


SolvedFactor = tuple[Explanation, CostInputs] | Excluded | None


def _explain_by_figure(inputs: CostInputs, lever: Sensitivity, measured_s: float) -> SolvedFactor:
    """How far a figure must be off for the step to be as measured."""
    before_s = layout_step_s(inputs)
    slower = measured_s > before_s
    farthest = lever.usual ** (LARGEST_STRAIN if slower else -LARGEST_STRAIN)
    most_s = layout_step_s(lever.altered(inputs, farthest))
    if abs(most_s / before_s - 1) < CLOSE_ENOUGH:
        return None  # the step does not depend on this figure
    if (most_s < measured_s) if slower else (most_s > measured_s):
        return Excluded(name=lever.name, step_s=most_s, bound="at most" if slower else "at least")
    factor = _solved(lambda f: layout_step_s(lever.altered(inputs, f)), farthest, measured_s)
    there = lever.altered(inputs, factor)
    return (
        Explanation(
            name=lever.name,
            needs=lever.needs(inputs, there),
            look=lever.look,
            strain=abs(log(factor)) / log(lever.usual),
        ),
        there,
    )


def _solved(step_s: Callable[[float], float], farthest: float, measured_s: float) -> float:
    """The factor between 1 and the farthest at which a step takes as long as measured; the step grows with it."""
    low, high = sorted((1.0, farthest))
    while True:
        middle = (low * high) ** 0.5
        now_s = step_s(middle)
        if abs(now_s / measured_s - 1) < CLOSE_ENOUGH or high / low < 1 + CLOSE_ENOUGH:
            return middle
        low, high = (middle, high) if now_s < measured_s else (low, middle)


def _explain_by_setting(swap: Alternative, measured_s: float, forecast_s: float, error: float) -> SolvedFactor:
    """Whether running in another way would take about as long as measured."""
    altered_s = layout_step_s(swap.inputs)
    if (altered_s > forecast_s) != (measured_s > forecast_s) or abs(altered_s / forecast_s - 1) < NOTABLE_DIFFERENCE:
        return None
    if abs(altered_s / measured_s - 1) > error:
        return Excluded(name=swap.name, step_s=altered_s, bound="exactly")
    missed = abs(log(altered_s / measured_s)) / log(1 + error)
    needs = f"a step would take {format_duration(altered_s)}"
    return Explanation(name=swap.name, needs=needs, look=swap.look, strain=1 + missed), swap.inputs


def _experiment(suspects: Sequence[tuple[str, CostInputs]]) -> str:
    """The run whose step would differ most between the explanations, with the step that each leads to."""
    if len(suspects) < 2:
        return ""
    options = [(0.0, "", [0.0])]
    for words, change in _experiments(suspects[0][1]):
        steps = [layout_step_s(change(inputs)) for _, inputs in suspects]
        options.append((max(steps) / min(steps), words, steps))
    spread, words, steps = max(options)
    if spread < LEAST_RATIO_TO_TELL_APART:
        return ""
    each = ", ".join(f"{format_duration(s)} if it is {one[0]}" for one, s in zip(suspects, steps, strict=True))
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
    capacity = min(island.device.memory_bytes for island in inputs.cluster.islands)
    twice = with_micro_sequences(2 * micro)
    if w.batch_sequences // replicas % (2 * micro) == 0 and layout_bytes(twice(inputs)) <= capacity:
        tried.append((f"with layout.micro_sequences = {2 * micro}", twice))
    return tried


def diagnosis_section(diagnosis: Diagnosis) -> PlanSection:
    """The difference for people."""
    return PlanSection(title="measured", lines=(_verdict(diagnosis), *(f"· {line}" for line in _lines(diagnosis))))


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The difference as plain values, for plan's --json."""
    return {**asdict(diagnosis), "factor": diagnosis.factor}


def _verdict(diagnosis: Diagnosis) -> str:
    measured, forecast = format_duration(diagnosis.measured_s), format_duration(diagnosis.forecast_s)
    against = f"{measured} a step, and the layout above was forecast to take {forecast}"
    bar = f"this forecast's error bar of {diagnosis.error:.0%}"
    if diagnosis.verdict == "as forecast":
        return f"{against}: {_far(diagnosis.factor)}, which is inside {bar}: there is nothing to explain"
    return f"{against}: {_far(diagnosis.factor)}, more than {bar}"


def _far(factor: float) -> str:
    return compared_text(factor, "slower", "faster", digits=1)


def _lines(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.verdict == "as forecast":
        return []
    lines = [f"{one.name}: {one.needs}. To know: {one.look}" for one in diagnosis.explanations]
    if not lines:
        lines = ["nothing explains it alone: look whether it was this model, batch and layout, on these machines"]
    if diagnosis.experiment:
        lines.append(diagnosis.experiment)
    if diagnosis.excluded:
        lines.append(f"cannot explain it alone: {', '.join(map(_excluded, diagnosis.excluded))}")
    share = f"{diagnosis.mfu:.1%} of the arithmetic peak (MFU), where {diagnosis.mfu_forecast:.1%} were forecast"
    beyond = "; more than all of it: another model, batch or machine was measured" if diagnosis.mfu > 1 else ""
    return [*lines, f"the measured step makes use of {share}{beyond}"]


def _excluded(one: Excluded) -> str:
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
