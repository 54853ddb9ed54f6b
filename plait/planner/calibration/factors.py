"""What runs teach of forecasts: the items of a step, factors for the next forecast, and when a run may teach.

Note [two kinds of items]
  Computing and messages are learnt apart, each by one factor for all layouts: a factor of one layout would have to be
  learnt by trying it, and noise could turn the choice. Waiting for other stages of a pipeline (the bubble), and the
  optimizer, go with computing. A clock cannot tell a rank's computing from what it waits for within its group; where
  that is much, a run teaches nothing. A lesson is measured / foretold *before* any factor, so that lessons of several
  runs agree however many were known when each was planned.

Note [steps that were timed before the run]
  Formulas may be far off on a processor that nobody held them against, and a layout whose real steps were timed a
  moment ago has no need of them: all items are scaled to what those took. Where a probe's times are the basis they
  stay: it timed computing and messages one by one, and a whole step does not tell which of them is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Literal

from plait.units import format_duration

Basis = Literal["clock", "formulas"]
"""What a forecast comes from: a probe's times, or the formulas and a catalogue."""

WITHIN = ("tensor", "context", "experts", "passes")
BETWEEN = ("parameters", "gradients")
MESSAGE_ITEMS = (*WITHIN, *BETWEEN)
"""Of step_time.py's items, those that are messages: within a group of ranks that shares samples, and between groups."""
KEPT_LESSONS = 5
"""The last ones, whose median is taken."""
TRUST = {1: 0.5, 2: 0.75}
"""Power of the median of so few lessons; more count in full."""
BOUND = 2.0
"""No factor goes beyond this or its inverse: what is further off is another program, or an error of ours."""
ENOUGH_STEPS = 10
STEADY = 0.15
"""Distance of a run's quartiles over its median step from which on it teaches nothing."""
CROWDED = 1.15
"""Programs that want to run per core from which on other ones than this run take its time."""
TELLING = 0.05
"""Share of a step that messages between groups must take to teach something of them."""
BLURRING = 0.25
"""Share of a step that messages within a group may take, which are taken as foretold."""
WORTH_A_WORD = 0.01
TIMED_ERROR = 0.10
"""How far a run's steps may be from those that were timed before it on the same machine, at the most: those of a
processor that others share were 3 to 8 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItems:
    """Where the seconds of one step go, on the device that has most to do."""

    compute_s: float
    """Forward and backward passes."""
    messages_s: float
    """Waiting for gradients and parameters of other groups of ranks."""
    optimizer_s: float
    """The update, and what a step does beside."""
    within_s: float = 0.0
    """Waiting for messages within the group that shares samples; measured, it is in `compute_s`."""
    bubble_s: float = 0.0
    """Waiting for other stages of a pipeline; measured, it is in `compute_s`."""
    data_s: float = 0.0
    """Waiting for samples; never foretold."""

    @property
    def step_s(self) -> float:
        return sum(self.by_clock().values())

    def by_clock(self) -> dict[str, float]:
        """The items that a clock can tell apart."""
        return {
            "compute_s": self.compute_s + self.within_s + self.bubble_s,
            "waiting_s": self.messages_s,
            "optimizer_s": self.optimizer_s,
            "data_s": self.data_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors that earlier runs on the same machines give to a forecast, and the name that their lessons go by."""

    ground: str = ""
    """Of machines, software, precision and basis; empty: nothing is learnt here."""
    compute: float = 1.0
    messages: float = 1.0
    runs: int = 0
    """How many taught it."""
    timed: float = 1.0
    """What steps took that were timed before the run, over what basis and runs say; 1 where none were."""

    @property
    def is_timed(self) -> bool:
        """Whether a forecast with these factors is what steps took that were timed."""
        return self.timed != 1.0

    def of_messages(self, item: str) -> float:
        """The factor of one of step_time.py's items; computing has its own in already, from device_time.py."""
        return self.messages if item in MESSAGE_ITEMS else 1.0


UNTAUGHT = Calibration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What one run teaches: measured over foretold. `messages` is None where they were too few, or not told apart."""

    date: str
    compute: float
    messages: float | None


def step_items(seconds: Mapping[str, float]) -> StepItems:
    """The items of a forecast by the names of step_time.py, summed up."""
    between_s, within_s = (sum(seconds[name] for name in names) for names in (BETWEEN, WITHIN))
    optimizer_s, bubble_s = seconds["optimizer"], max(0.0, seconds["bubble"])
    return StepItems(
        compute_s=sum(seconds.values()) - between_s - within_s - optimizer_s - bubble_s,
        messages_s=between_s,
        optimizer_s=optimizer_s,
        within_s=within_s,
        bubble_s=bubble_s,
    )


def taught(items: StepItems, calibration: Calibration) -> StepItems:
    """The items with what was learnt in them."""
    return _times(items, calibration.compute * calibration.timed, calibration.messages * calibration.timed)


def untaught(items: StepItems, calibration: Calibration) -> StepItems:
    """The items without what was learnt."""
    return _times(items, 1 / (calibration.compute * calibration.timed), 1 / (calibration.messages * calibration.timed))


def _times(items: StepItems, compute: float, messages: float) -> StepItems:
    return replace(
        items,
        compute_s=items.compute_s * compute,
        messages_s=items.messages_s * messages,
        within_s=items.within_s * messages,
        optimizer_s=items.optimizer_s * compute,
        bubble_s=items.bubble_s * compute,
    )


def lesson_of(foretold: StepItems, measured: StepItems, date: str) -> Lesson | None:
    """What a run teaches whose items were measured; `foretold` are those before any factor.

    None where messages within groups take so much that computing is not seen behind them.
    """
    if foretold.within_s > BLURRING * foretold.step_s:
        return None
    computed_s = measured.compute_s + measured.optimizer_s - foretold.within_s
    compute = computed_s / (foretold.compute_s + foretold.bubble_s + foretold.optimizer_s)
    telling = foretold.messages_s >= TELLING * foretold.step_s
    messages = max(measured.messages_s / foretold.messages_s, 1 / BOUND) if telling else None
    return Lesson(date=date, compute=max(compute, 1 / BOUND), messages=messages)


def lesson_of_whole(foretold: StepItems, step_s: float, date: str) -> Lesson | None:
    """What a run teaches of which only whole steps were timed: something where nearly all of one is computing."""
    messages_s = foretold.messages_s + foretold.within_s
    if messages_s > TELLING * foretold.step_s:
        return None
    compute = (step_s - messages_s) / (foretold.step_s - messages_s)
    return Lesson(date=date, compute=max(compute, 1 / BOUND), messages=None)


def calibration_of(ground: str, lessons: Sequence[Lesson]) -> Calibration:
    """The factors that the last lessons agree on; few of them count in part."""
    compute = [lesson.compute for lesson in lessons][-KEPT_LESSONS:]
    messages = [lesson.messages for lesson in lessons if lesson.messages is not None][-KEPT_LESSONS:]
    return Calibration(
        ground=ground, compute=_agreed(compute), messages=_agreed(messages), runs=min(len(lessons), KEPT_LESSONS)
    )


def _agreed(factors: Sequence[float]) -> float:
    if not factors:
        return 1.0
    middle = min(BOUND, max(1 / BOUND, median(factors)))
    return middle ** TRUST.get(len(factors), 1.0)


def disturbance(steps_s: Sequence[float], crowding: float | None) -> str | None:
    """Why a run must not teach, in words that end a sentence; None for a quiet one.

    `crowding` is how many programs wanted to run per core while it went on, None where that says nothing of this run.
    """
    if len(steps_s) < ENOUGH_STEPS:
        return f"it had fewer than {ENOUGH_STEPS} steps after the first ones"
    first, middle, last = quantiles(steps_s, n=4)
    if last - first > STEADY * middle:
        return f"its steps differed by {(last - first) / middle:.0%}"
    if crowding is not None and crowding > CROWDED:
        return "other programs were running"
    return None


def lesson_words(lesson: Lesson, basis: Basis) -> str:
    """What a run taught, for its end."""
    told = [f"computing took {lesson.compute:.2f}"]
    if lesson.messages is not None:
        told.append(f"messages {lesson.messages:.2f}")
    times = "times what the probe's times said" if basis == "clock" else "times what the formulas said"
    return f"{' and '.join(told)} {times}: the next plan here takes it in"


def taught_words(calibration: Calibration, items: StepItems | None, basis: Basis) -> str | None:
    """How far a forecast of such items was moved by steps that were timed, or by what runs taught, as a reason.

    None where that is no news.
    """
    if items is None:
        return None
    runs = f"the last {calibration.runs} runs" if calibration.runs > 1 else "the last run"
    if abs(calibration.timed - 1) >= WORTH_A_WORD:
        told = f"the formulas and {runs} here said" if calibration.runs else "the formulas said"
        without = format_duration(items.step_s / calibration.timed)
        return f"so long took the steps that were timed here when this was planned; {told} {without}"
    moved = items.step_s / untaught(items, calibration).step_s - 1
    if not calibration.runs or abs(moved) < WORTH_A_WORD:
        return None
    told = "the probe's times say" if basis == "clock" else "the formulas say"
    half = ", and half of what it said is taken until there are more" if calibration.runs == 1 else ""
    than = f"{abs(moved):.0%} {'longer' if moved > 0 else 'shorter'} than {told}"
    return f"the forecast is {than}: {runs} here taught it{half}"
