"""A predicted step beside the measured one, in words: how close, which item is off, and what to do then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from plait.planner.calibration.factors import ForecastBasis, StepItems
from plait.units import compared_text, counted, format_bytes, format_duration

ForecastSource = ForecastBasis | Literal["steps"]
"""The basis of a forecast; "steps" are real steps, timed before the run."""
ITEM_TEXTS: Mapping[str, str] = {
    "compute_s": "computing",
    "waiting_s": "messages",
    "optimizer_s": "optimizer",
    "data_s": "data",
}
LEAST_SHARE_TO_NAME = 0.005
"""Smallest share of a step for an item to be named."""
LEAST_SHARE_WITHIN_TO_NAME = 0.02
"""Share of a step above which waiting within a group of ranks is named together with its computing."""
LEAST_MEMORY_ERROR_TO_MENTION = 0.05
"""Relative difference of the peak tensor memory from which on it gets a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Medians over some measured steps, with the items of a step where ranks reported them."""

    steps: int
    step_s: float
    data_s: float
    items: StepItems | None


def comparison_text(predicted: StepItems, observed: Observed) -> str:
    """Predicted and measured step in a line.

    For example "the plan said 1.61 s a step (1.45 s computing, …); 5 steps took 1.56 s each (…): 3 % faster".
    """
    grouped = predicted.within_s + predicted.bubble_s > LEAST_SHARE_WITHIN_TO_NAME * predicted.step_s
    computing = "computing and waiting within groups" if grouped else ITEM_TEXTS["compute_s"]
    said = f"the plan said {format_duration(predicted.step_s)} a step{_items_in_brackets(predicted, computing)}"
    each = " each" if observed.steps > 1 else ""
    known = _items_in_brackets(observed.items, computing) if observed.items else ""
    return (
        f"{said}; {counted(observed.steps, 'step')} took {format_duration(observed.step_s)}{each}{known}: "
        f"{_difference_text(observed.step_s / predicted.step_s - 1, 'slower', 'faster')}"
    )


def deviation_text(predicted: StepItems, observed: Observed, error: float, source: ForecastSource) -> str | None:
    """The item that explains most of a difference beyond the plan's error, and what to do; None if there is none."""
    off = observed.step_s / predicted.step_s - 1
    if abs(off) <= error:
        return None
    if observed.items is None:
        name = "data_s" if observed.data_s > (observed.step_s - predicted.step_s) / 2 > 0 else "step_s"
        predicted_s, took_s = (0.0, observed.data_s) if name == "data_s" else (predicted.step_s, observed.step_s)
    else:
        said, took = predicted.measurable_items(), observed.items.measurable_items()
        name = max(took, key=lambda item: (took[item] - said[item]) * (1 if off > 0 else -1))
        predicted_s, took_s = said[name], took[name]
    text = f"{_ITEM_SUBJECTS[name]} {format_duration(took_s)}, and the plan said {format_duration(predicted_s)}"
    if off < 0:
        return f"{text}: {_FASTER_TEXTS[source]}"
    return f"{text}: {_CAUSE_TEXTS[name](source)}"


def memory_comparison_text(predicted_bytes: float, peak_bytes: float) -> str | None:
    """A sentence where the peak of tensors on the fullest device is not what the plan said; None where it is."""
    off = peak_bytes / predicted_bytes - 1
    if abs(off) <= LEAST_MEMORY_ERROR_TO_MENTION:
        return None
    advice = "; a smaller layout.micro_sequences needs less, if memory is short" if off > 0 else ""
    return (
        f"tensors take up to {format_bytes(peak_bytes)} a device, and the plan said {format_bytes(predicted_bytes)}: "
        f"{_difference_text(off, 'more', 'less')}{advice}"
    )


_ITEM_SUBJECTS: Mapping[str, str] = {
    "step_s": "a step takes",
    "compute_s": "computing takes",
    "waiting_s": "waiting for messages and other ranks takes",
    "optimizer_s": "the optimizer and the rest of a step take",
    "data_s": "waiting for samples takes",
}


def _busy_machine_text(source: ForecastSource) -> str:
    return f"another program may be running on these machines; if none is, {_REMEDIES[source]}"


def _slow_link_text(source: ForecastSource) -> str:
    if source == "clock":
        return "others use the link, or it has become slower; stop and give the command again, which probes it again"
    return f"messages were not timed one by one before this run; {_REMEDIES[source]}"


_FASTER_TEXTS: Mapping[ForecastSource, str] = {
    "clock": "the next plan here takes it into account, unless something disturbs this run",
    "formulas": "the next plan here takes it into account, unless something disturbs this run",
    "steps": "another program may have been running while steps were timed; --replan times them again",
}
_REMEDIES: Mapping[ForecastSource, str] = {
    "clock": "stop and give the command again, which probes the hosts again",
    "formulas": "the formulas are off here, and the next plan takes that into account",
    "steps": "stop and give the command again with --replan, which times steps again",
}
_CAUSE_TEXTS: Mapping[str, Callable[[ForecastSource], str]] = {
    "step_s": _busy_machine_text,
    "compute_s": _busy_machine_text,
    "waiting_s": _slow_link_text,
    "optimizer_s": _busy_machine_text,
    "data_s": lambda _: "the disk with the prepared tokens is slow; move .plait to a faster one",
}


def _items_in_brackets(items: StepItems, computing: str) -> str:
    names = {**ITEM_TEXTS, "compute_s": computing}
    named = {
        names[item]: spent
        for item, spent in items.measurable_items().items()
        if spent >= LEAST_SHARE_TO_NAME * items.step_s
    }
    return (
        f" ({', '.join(f'{format_duration(spent)} {name}' for name, spent in named.items())})" if len(named) > 1 else ""
    )


def _difference_text(off: float, more: str, less: str) -> str:
    return compared_text(1 + off, more, less) if abs(off) >= 0.005 else "as planned"
