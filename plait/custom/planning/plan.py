"""The plan for a person's own program: which layouts were measured, what each takes, and which one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from plait.custom.layouts.description import CustomLayout
from plait.errors import PlaitError
from plait.planner.problem.candidates import Candidates, Counts
from plait.planner.search.complexity import COMPLEXITY_TABLE
from plait.planner.search.model_error import MEASURED_ERROR
from plait.planner.search.search import simplest
from plait.units import format_bytes, format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayout:
    """One layout of a program on this many workers, as measured; `refused` says in words why it cannot be."""

    layout: CustomLayout
    workers: int
    step_s: float = float("inf")
    """Seconds of a step of the whole batch: the slowest worker's, the median of a few."""
    bytes_per_worker: float = 0.0
    """Weights, gradients, optimizer state and what is kept for backward: the fullest worker's."""
    refused: str = ""

    @property
    def name(self) -> str:
        """As a person says it."""
        return "one worker" if self.workers == 1 else f"{self.layout} × {self.workers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomPlan:
    """The layout that suits a program on these workers, chosen as the planner chooses: the simplest of those that fit
    and are about as fast as the fastest."""

    measured: tuple[MeasuredLayout, ...]
    chosen: int
    """Place of the chosen one among them."""
    memory_bytes: float
    """Memory that a worker may use."""
    reasons: tuple[str, ...]

    @property
    def layout(self) -> CustomLayout:
        """The value for `plait.spread(…, layout=…)`."""
        return self.measured[self.chosen].layout

    @property
    def workers(self) -> int:
        """The value for `plait run --workers`."""
        return self.measured[self.chosen].workers

    def __str__(self) -> str:
        """A line for each layout, then the choice with its reasons."""
        rows = [(one.name, *_figures(one), _mark(self, number)) for number, one in enumerate(self.measured)]
        rows = [("layout", "a step", "a worker", ""), *rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join([*lines, *(f"why      {reason}" for reason in self.reasons)])

    def _repr_html_(self) -> str:
        """The plan as a notebook shows it."""
        return f"<pre>{escape(str(self))}</pre>"


def choose_measured(measured: Sequence[MeasuredLayout], memory_bytes: float) -> CustomPlan:
    """The simplest layout within the planner's tolerance of the fastest, of those that memory holds.

    Raises PlaitError where none fits, naming the leanest.
    """
    possible = [number for number, one in enumerate(measured) if not one.refused]
    fitting = [number for number in possible if measured[number].bytes_per_worker <= memory_bytes]
    if not fitting:
        leanest = min((measured[number] for number in possible), key=lambda one: one.bytes_per_worker)
        raise PlaitError(
            f"no layout fits: {leanest.name} takes {format_bytes(leanest.bytes_per_worker)} of "
            f"{format_bytes(memory_bytes)} a worker; take a smaller batch, accumulate= more parts, or more workers"
        )
    step_s = np.array([measured[number].step_s for number in fitting])
    workers = np.array([measured[number].workers for number in fitting])
    points = _points([measured[number] for number in fitting])
    chosen = fitting[simplest(step_s, points, MEASURED_ERROR, workers)]
    reasons = _reasons(measured, chosen, fitting, memory_bytes)
    return CustomPlan(measured=tuple(measured), chosen=chosen, memory_bytes=memory_bytes, reasons=reasons)


def _points(measured: Sequence[MeasuredLayout]) -> Counts:
    """Complexity of each, from the planner's own table."""
    rows = [
        {"replicate": one.workers}
        if one.layout == "replicate" or one.workers == 1
        else {"shard": one.workers, "shard_what": one.layout.removeprefix("shard ")}
        for one in measured
    ]
    candidates = Candidates.from_rows(rows)
    most = max(one.workers for one in measured)
    return np.asarray(sum(row.points * row.holds(candidates, most) for row in COMPLEXITY_TABLE), dtype=np.int64)


def _reasons(
    measured: Sequence[MeasuredLayout], chosen: int, fitting: Sequence[int], memory_bytes: float
) -> tuple[str, ...]:
    one = measured[chosen]
    fastest = min((measured[number] for number in fitting), key=lambda other: other.step_s)
    reasons = []
    if one is fastest:
        reasons.append(f"{one.name} is the fastest that fits: {format_duration(one.step_s)} a step, measured")
    else:
        slower = one.step_s / fastest.step_s - 1
        reasons.append(
            f"{one.name} is the simplest within {MEASURED_ERROR:.0%} of the fastest: {fastest.name} takes "
            f"{format_duration(fastest.step_s)}, it takes {slower:.1%} more"
        )
    alone = next((other for other in measured if other.workers == 1 and not other.refused), None)
    if alone is not None and one.workers > 1:
        gain = alone.step_s / one.step_s
        reasons.append(f"{one.workers} workers are {gain:.2f} × as fast as one")
    if one.workers == 1 and len(measured) > 1:
        several = min((other.step_s for other in measured if other.workers > 1), default=float("inf"))
        reasons.append(f"several workers would take {format_duration(several)} a step, for sums of gradients cost time")
    reasons.append(
        f"it takes {format_bytes(one.bytes_per_worker)} of the {format_bytes(memory_bytes)} that a worker may use"
    )
    reasons += [f"{other.name} was not measured: {other.refused}" for other in measured if other.refused]
    return tuple(reasons)


def _figures(one: MeasuredLayout) -> tuple[str, str]:
    return ("", "") if one.refused else (format_duration(one.step_s), format_bytes(one.bytes_per_worker))


def _mark(plan: CustomPlan, number: int) -> str:
    one = plan.measured[number]
    if one.refused:
        return "refused"
    if number == plan.chosen:
        return "chosen"
    return "does not fit" if one.bytes_per_worker > plan.memory_bytes else ""
