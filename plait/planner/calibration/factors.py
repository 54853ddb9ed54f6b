"""What earlier runs teach a forecast: the items of a step, two factors for the next forecast, and which runs may teach.

Note [two kinds of items] Computing and messages are calibrated apart, each by one factor for all layouts: a factor of
one layout would need that layout to be tried, and noise could turn the choice. Waiting for other pipeline stages (the
bubble) and the optimizer go with computing. A clock cannot tell a rank's computing from its waiting for messages within
its group; where that waiting is a large share, a run teaches nothing. An observation is measured / predicted *before*
any factor, so that observations of several runs agree however many were known when each was planned.

Note [steps that were timed before the run] Formulas may be far off on a CPU that they were never compared with, and a
layout whose real steps were timed a moment ago needs no formulas: all items are scaled to the timed step. Where a
probe's times are the basis they stay: the probe timed computing and messages one by one, and a whole step does not tell
which of them is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Literal

from plait.units import compared_text, format_duration

ForecastBasis = Literal["clock", "formulas"]
"""The source of a forecast: a probe's times, or the formulas and a catalogue."""

WITHIN_GROUP_ITEMS = ("tensor", "context", "experts", "passes")
"""Items of step_time.py that are messages within a group of ranks with the same samples."""
BETWEEN_GROUP_ITEMS = ("parameters", "gradients")
"""Items of step_time.py that are messages between such groups."""
MESSAGE_ITEMS = (*WITHIN_GROUP_ITEMS, *BETWEEN_GROUP_ITEMS)
"""All items of step_time.py that are messages."""
OBSERVATIONS_USED = 5
"""How many of the newest observations count; their median is taken."""
SHRINKAGE_EXPONENTS = {1: 0.5, 2: 0.75}
"""Exponent of the observations' median, by their number; with more observations it is 1."""
LARGEST_CORRECTION = 2.0
"""Largest factor, and its inverse the smallest: a larger deviation comes from another program or from a bug of ours."""
LEAST_STEPS_TO_LEARN = 10
LARGEST_STEP_TIME_SPREAD = 0.15
"""Interquartile range of a run's steps over their median above which the run teaches nothing."""
LARGEST_LOAD_PER_CORE = 1.15
"""Runnable programs per core above which other programs took this run's time."""
LEAST_MESSAGE_SHARE_TO_LEARN = 0.05
"""Share of a step that messages between groups must take to teach their factor."""
LARGEST_SHARE_WITHIN_GROUPS = 0.25
"""Share of a step that messages within groups may take for a run to count; they are assumed to be as predicted."""
LEAST_CHANGE_TO_MENTION = 0.01
MEASURED_STEP_ERROR = 0.10
"""How far a run's steps may be from steps timed before it on the same machine, at most; on a processor shared with
others they were 3 to 8 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItems:
    """Seconds of one step by item, on the busiest device."""

    compute_s: float
    """Forward and backward passes."""
    messages_s: float
    """Waiting for gradients and parameters of other groups of ranks."""
    optimizer_s: float
    """The optimizer's update, and other work once per step."""
    within_s: float = 0.0
    """Waiting for messages within the group that shares samples; measured, it is in `compute_s`."""
    bubble_s: float = 0.0
    """Waiting for other stages of a pipeline; measured, it is in `compute_s`."""
    data_s: float = 0.0
    """Waiting for samples; never predicted."""

    @property
    def step_s(self) -> float:
        return sum(self.measurable_items().values())

    def measurable_items(self) -> dict[str, float]:
        """The items that a clock can tell apart."""
        return {
            "compute_s": self.compute_s + self.within_s + self.bubble_s,
            "waiting_s": self.messages_s,
            "optimizer_s": self.optimizer_s,
            "data_s": self.data_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors that correct a forecast, learned from earlier runs on the same machines."""

    ground: str = ""
    """Key of the observations: machines, software, precision and basis; empty where nothing is learned."""
    compute: float = 1.0
    messages: float = 1.0
    runs: int = 0
    """How many runs the factors come from."""
    timed: float = 1.0
    """Seconds of a step timed before this run, or of similar ones before an earlier run, divided by the forecast with
    both factors; 1 if none was timed."""

    @property
    def is_measured(self) -> bool:
        """Whether the forecast is a timed step."""
        return self.timed != 1.0

    def message_factor(self, item: str) -> float:
        """The factor of one item of step_time.py that is a message; computing has its factor in already
        (device_time.py)."""
        return self.messages if item in MESSAGE_ITEMS else 1.0


UNCALIBRATED = Calibration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured over predicted time of one run. `messages` is None where messages took too little time, or cannot
    be separated from computing."""

    date: str
    compute: float
    messages: float | None


def step_items(seconds_by_item: Mapping[str, float]) -> StepItems:
    """The items of a forecast by the names of step_time.py, summed up."""
    between_s, within_s = (
        sum(seconds_by_item[name] for name in names) for names in (BETWEEN_GROUP_ITEMS, WITHIN_GROUP_ITEMS)
    )
    optimizer_s, bubble_s = seconds_by_item["optimizer"], max(0.0, seconds_by_item["bubble"])
    return StepItems(
        compute_s=sum(seconds_by_item.values()) - between_s - within_s - optimizer_s - bubble_s,
        messages_s=between_s,
        optimizer_s=optimizer_s,
        within_s=within_s,
        bubble_s=bubble_s,
    )


def with_calibration(items: StepItems, calibration: Calibration) -> StepItems:
    """The items with the calibration's factors applied."""
    return _scale_items(items, calibration.compute * calibration.timed, calibration.messages * calibration.timed)


def without_calibration(items: StepItems, calibration: Calibration) -> StepItems:
    """The items with the calibration's factors taken out."""
    return _scale_items(
        items, 1 / (calibration.compute * calibration.timed), 1 / (calibration.messages * calibration.timed)
    )


def _scale_items(items: StepItems, compute: float, messages: float) -> StepItems:
    return replace(
        items,
        compute_s=items.compute_s * compute,
        messages_s=items.messages_s * messages,
        within_s=items.within_s * messages,
        optimizer_s=items.optimizer_s * compute,
        bubble_s=items.bubble_s * compute,
    )


def observation_of_items(predicted: StepItems, measured: StepItems, date: str) -> Observation | None:
    """The observation of a run whose items were measured; `predicted` are its items by the formulas, without any
    factor. None where collectives within groups take so much of the step that computing cannot be told apart."""
    if predicted.within_s > LARGEST_SHARE_WITHIN_GROUPS * predicted.step_s:
        return None
    computed_s = measured.compute_s + measured.optimizer_s - predicted.within_s
    compute = computed_s / (predicted.compute_s + predicted.bubble_s + predicted.optimizer_s)
    reported = predicted.messages_s >= LEAST_MESSAGE_SHARE_TO_LEARN * predicted.step_s
    messages = max(measured.messages_s / predicted.messages_s, 1 / LARGEST_CORRECTION) if reported else None
    return Observation(date=date, compute=max(compute, 1 / LARGEST_CORRECTION), messages=messages)


def observation_of_step(predicted: StepItems, step_s: float, date: str) -> Observation | None:
    """The observation of a run of which only whole steps were timed; None unless nearly all of a step is computing."""
    messages_s = predicted.messages_s + predicted.within_s
    if messages_s > LEAST_MESSAGE_SHARE_TO_LEARN * predicted.step_s:
        return None
    compute = (step_s - messages_s) / (predicted.step_s - messages_s)
    return Observation(date=date, compute=max(compute, 1 / LARGEST_CORRECTION), messages=None)


def calibration_from(key: str, observations: Sequence[Observation]) -> Calibration:
    """The factors that the newest observations agree on; few observations count in part
    (WEIGHT_OF_FEW_OBSERVATIONS)."""
    compute = [observation.compute for observation in observations][-OBSERVATIONS_USED:]
    messages = [observation.messages for observation in observations if observation.messages is not None][
        -OBSERVATIONS_USED:
    ]
    return Calibration(
        ground=key,
        compute=_shrunk_median(compute),
        messages=_shrunk_median(messages),
        runs=min(len(observations), OBSERVATIONS_USED),
    )


def _shrunk_median(factors: Sequence[float]) -> float:
    if not factors:
        return 1.0
    middle = min(LARGEST_CORRECTION, max(1 / LARGEST_CORRECTION, median(factors)))
    return middle ** SHRINKAGE_EXPONENTS.get(len(factors), 1.0)


def disturbance_text(steps_s: Sequence[float], load_per_core: float | None) -> str | None:
    """Why nothing may be learned from a run, as the end of a sentence; None for an undisturbed run.

    `load_per_core` is the number of runnable programs per core during it, None where that says nothing of this run.
    """
    if len(steps_s) < LEAST_STEPS_TO_LEARN:
        return f"it had fewer than {LEAST_STEPS_TO_LEARN} steps after the first ones"
    first, middle, last = quantiles(steps_s, n=4)
    if last - first > LARGEST_STEP_TIME_SPREAD * middle:
        return f"the times of its steps differed by {(last - first) / middle:.0%}"
    if load_per_core is not None and load_per_core > LARGEST_LOAD_PER_CORE:
        return "other programs were running"
    return None


def observation_text(observation: Observation, basis: ForecastBasis) -> str:
    """The observation as a sentence for the run's last lines."""
    lines = [f"computing took {observation.compute:.2f}"]
    if observation.messages is not None:
        lines.append(f"messages {observation.messages:.2f}")
    times = "times what the probe's times said" if basis == "clock" else "times what the formulas said"
    return f"{' and '.join(lines)} {times}: the next plan here takes it in"


def calibration_text(calibration: Calibration, items: StepItems | None, basis: ForecastBasis) -> str | None:
    """How far timed steps or earlier runs moved a forecast of these items, as a reason; None where they did not."""
    if items is None:
        return None
    runs = f"the last {calibration.runs} runs" if calibration.runs > 1 else "the last run"
    if abs(calibration.timed - 1) >= LEAST_CHANGE_TO_MENTION:
        text = f"the formulas and {runs} here said" if calibration.runs else "the formulas said"
        without = format_duration(items.step_s / calibration.timed)
        return f"the step time is based on steps timed on this machine; {text} {without}"
    moved = items.step_s / without_calibration(items, calibration).step_s
    if not calibration.runs or abs(moved - 1) < LEAST_CHANGE_TO_MENTION:
        return None
    text = "the probe's times say" if basis == "clock" else "the formulas say"
    half = ", and half of what it said is taken until there are more" if calibration.runs == 1 else ""
    than = compared_text(moved, "longer", "shorter", than=text)
    return f"the forecast is {than}: {runs} here taught it{half}"
