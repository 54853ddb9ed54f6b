"""From the lines of finished cases to what the planner is judged by: regret, price of simplicity, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import mean, median, quantiles

from benchmarks.lab.contenders import Line, Measured, measured, turns_of
from benchmarks.lab.cut import QUIET
from benchmarks.lab.wiring import Rate

LARGE_PARAMETERS = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How well the planner did in one case; shares, 0.05 is 5 %."""

    case: str
    hosts: int
    rate: Rate
    fastest: str
    """As measured."""
    step_s: float
    """Of that."""
    regret: float | None
    """Of the predicted fastest over the measured fastest; None where it did not run."""
    simplicity_paid: float | None
    """Of the choice over the predicted fastest, measured; below 0 where the choice was faster."""
    simplicity_said: float
    step_errors: tuple[float, ...]
    """Predicted over measured - 1, of every layout that was priced and measured to the end."""
    choice_error: float | None
    memory_errors: tuple[float, ...]
    """Of live tensors on the fullest rank, of a model large enough to be judged by."""
    process_errors: tuple[float, ...]
    """Of its whole process."""
    over_floor: float | None
    """The choice's time over the floor: of all layouts the least of the longer of a host's computation, taken right
    beside it, and its bytes. None where hosts differ, or nothing was measured."""
    baselines: Mapping[str, float]
    """Their time over the choice's."""
    disturbed: float
    """Share of the turns during which programs outside the lab took a noticeable part of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Over all cases: (median, 90th percentile, worst) of each figure; None without figures."""

    regret: tuple[float, float, float] | None
    simplicity_paid: tuple[float, float, float] | None
    simplicity_over_said: tuple[float, float, float] | None
    step_error: tuple[float, float, float] | None
    step_bias: float | None
    """Median over cases of the median error of a case's layouts, with its sign: below 0, forecasts are too short."""
    choice_error: tuple[float, float, float] | None
    memory_error: tuple[float, float, float] | None
    process_error: tuple[float, float, float] | None
    over_floor: tuple[float, float, float] | None
    baseline_ratio_least: float | None
    disturbed: float
    """Of the turns, the mean share over cases."""


def verdict(line: Line) -> Verdict:
    """Judge one case; raises ValueError where no layout ran."""
    found = {one.name: one for one in measured(line)}
    layouts = {name: found[name] for name in line["layouts"]}
    exact = [one for one in layouts.values() if one.bound == "exact"]
    if not exact:
        raise ValueError(f"no layout of {line['case']['name']} ran")
    best = min(exact, key=lambda one: one.step_s)
    first, choice = layouts[line["fastest"]], layouts[line["chosen"]]
    priced = [one for one in exact if one.predicted_s]
    assert choice.predicted_s and first.predicted_s
    return Verdict(
        case=line["case"]["name"],
        hosts=len(line["case"]["cores"]),
        rate=line["case"]["rate"],
        fastest=best.name,
        step_s=best.step_s,
        regret=_over(first, best.step_s),
        simplicity_paid=_over(choice, first.step_s) if first.bound != "failed" else None,
        simplicity_said=choice.predicted_s / first.predicted_s - 1,
        step_errors=tuple((one.predicted_s or 0) / one.step_s - 1 for one in priced),
        choice_error=choice.predicted_s / choice.step_s - 1 if choice.bound == "exact" else None,
        memory_errors=tuple(one.tensor_error for one in priced if one.tensor_error is not None and _large(line)),
        process_errors=tuple(one.process_error for one in priced if one.process_error is not None),
        over_floor=_over_floor(line, choice, exact),
        baselines={
            name: found[name].step_s / choice.step_s
            for name in line["baselines"]
            if "failed" not in (found[name].bound, choice.bound)
        },
        disturbed=_disturbed(line),
    )


def summary(verdicts: Sequence[Verdict]) -> Summary:
    """All cases together; errors by their size."""
    said = [(v.simplicity_paid, v.simplicity_said) for v in verdicts if v.simplicity_paid is not None]
    ratios = [ratio for one in verdicts for ratio in one.baselines.values()]
    return Summary(
        regret=_spread([one.regret for one in verdicts if one.regret is not None]),
        simplicity_paid=_spread([paid for paid, _ in said]),
        simplicity_over_said=_spread([paid - promise for paid, promise in said]),
        step_error=_spread([abs(error) for one in verdicts for error in one.step_errors]),
        step_bias=median(biases) if (biases := [median(v.step_errors) for v in verdicts if v.step_errors]) else None,
        choice_error=_spread([abs(one.choice_error) for one in verdicts if one.choice_error is not None]),
        memory_error=_spread([abs(error) for one in verdicts for error in one.memory_errors]),
        process_error=_spread([abs(error) for one in verdicts for error in one.process_errors]),
        over_floor=_spread([one.over_floor for one in verdicts if one.over_floor is not None]),
        baseline_ratio_least=min(ratios, default=None),
        disturbed=mean(one.disturbed for one in verdicts),
    )


def case_table(line: Line) -> str:
    """A case as a Markdown table, the fastest first."""
    marks = {line["fastest"]: "predicted fastest", line["chosen"]: "choice"}
    if line["fastest"] == line["chosen"]:
        marks[line["chosen"]] = "predicted fastest, choice"
    rows = [("layout", "s a step", "least … greatest", "predicted", "")]
    for one in sorted(measured(line), key=lambda one: one.step_s if one.bound != "failed" else float("inf")):
        predicted = f"{one.predicted_s:.3g}" if one.predicted_s else ""
        if one.bound == "failed":
            rows.append((one.name, "failed", "", predicted, one.sentence))
            continue
        sign = "> " if one.bound == "at least" else ""
        spread = f"{min(one.seconds):.3g} … {max(one.seconds):.3g}"
        rows.append((one.name, f"{sign}{one.step_s:.3g}", spread, predicted, marks.get(one.name, "")))
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ("---",) * 5, *rows[1:]])


def verdict_text(one: Verdict) -> str:
    """A case's judgement in a line or two."""
    parts = [
        f"regret of the predicted fastest {_percent(one.regret)}",
        f"simplicity paid {_percent(one.simplicity_paid)} (said {_percent(one.simplicity_said)})",
        f"step time off by {_percent(one.choice_error)}",
        f"the choice takes {_percent(one.over_floor)} more than the floor",
        *(f"{name} takes {ratio:.2f} × the choice" for name, ratio in one.baselines.items()),
    ]
    return f"fastest: {one.fastest}, {one.step_s:.3g} s; " + "; ".join(parts)


def summary_text(one: Summary) -> str:
    """The summary as a Markdown table."""
    rows = ["| over all cases | median | 90th percentile | worst |", "| --- | --- | --- | --- |"]
    for field in fields(one):
        value = getattr(one, field.name)
        if isinstance(value, tuple):
            rows.append(f"| {field.name.replace('_', ' ')} | " + " | ".join(map(_percent, value)) + " |")
    if one.step_bias is not None:
        rows.append(f"\nForecasts of step times are off by {one.step_bias:+.1%}, median over cases.")
    if one.baseline_ratio_least is not None:
        rows.append(f"\nThe fastest baseline took {one.baseline_ratio_least:.2f} times the choice's step.")
    if one.disturbed:
        rows.append(f"\nOther programs disturbed {one.disturbed:.0%} of the turns: do not trust these figures.")
    return "\n".join(rows)


def _large(line: Line) -> bool:
    """Whether the model is large enough that its memory is judged: below, what is small beside weights counts, too."""
    shape = line["case"]["shape"]
    about = 12 * shape["layers"] * shape["width"] ** 2 + shape["vocabulary"] * shape["width"]
    return about >= LARGE_PARAMETERS


def _over_floor(line: Line, choice: Measured, exact: Sequence[Measured]) -> float | None:
    if len(set(line["case"]["cores"])) > 1 or choice.bound != "exact":
        return None
    rate = line["case"]["rate"]
    bits_per_s = min(line["carried_bits_per_s"]) if rate == "unshaped" else rate
    wire_s = 8 * min(one.sent_bytes for one in exact) / bits_per_s
    over = [step_s / max(alone_s, wire_s) for step_s, alone_s in _beside(line, choice)]
    return mean(over) - 1 if over else None


def _beside(line: Line, choice: Measured) -> list[tuple[float, float]]:
    """Of each turn of the choice, its step and that of hosts which compute their parts alone right afterwards."""
    if not line["alone"] or isinstance(line["alone"][0], dict):  # as it was written before: once, at the end
        found = [turn for turn in turns_of(line, line["alone"]) if turn.ended == "finished"]
        return [(choice.step_s, mean(turn.step_s for turn in found))] if found else []
    pairs: list[tuple[float, float]] = []
    for taken, hosts in zip(line["layouts"][choice.name]["turns"], line["alone"], strict=True):
        turns = turns_of(line, (taken, *hosts))
        if turns[0].ended in ("finished", "cut") and all(turn.ended == "finished" for turn in turns[1:]):
            pairs.append((turns[0].step_s, mean(turn.step_s for turn in turns[1:])))
    return pairs


def _disturbed(line: Line) -> float:
    turns = [turn for one in line["layouts"].values() for turn in one["turns"]]
    return mean(turn["others"] > QUIET for turn in turns)


def _over(one: Measured, base_s: float) -> float | None:
    return one.step_s / base_s - 1 if one.bound != "failed" else None


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    if not values:
        return None
    ninth = quantiles(values, n=10, method="inclusive")[8] if len(values) > 1 else values[0]
    return median(values), ninth, max(values)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
