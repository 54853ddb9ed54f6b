"""One start of a run beside its plan: says once how close the first steps came, and knows the medians of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

from plait.commands.planning.calibration_store import crowding
from plait.planner.calibration.factors import Calibration, ForecastBasis, StepItems, disturbance_text
from plait.planner.calibration.predicted_vs_measured import (
    Observed,
    comparison_text,
    deviation_text,
    memory_comparison_text,
)
from plait.planner.plan import Plan
from plait.report.metrics import StepReport
from plait.report.receipt import RECEIPT_WARM_UP_STEPS
from plait.report.straggler import RankTimes

FIRST_STEPS = 5
PATIENCE_STEPS = 20
"""How long what ranks tell of the first steps is waited for: it may come late, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a plan says of a step, and its own error."""

    items: StepItems
    """With what earlier runs taught."""
    calibration: Calibration
    basis: ForecastBasis
    error: float
    tensor_bytes: float


Crowding = Callable[[], float | None]
"""Programs that want to run per core; None where that is not known, or says nothing of the run."""


class ForecastMonitor:
    """Watches the steps of one start from `done` steps on; what it has to say of them goes to `say`.

    Steps that are reported together share one time, so those that come with a warm-up step are left out with it, and
    what ranks tell of their steps comes after them.
    """

    def __init__(
        self, foretold: Predicted, done: int, report_every_steps: int, *, say: Callable[[str], None], crowding: Crowding
    ) -> None:
        self.foretold, self._say, self._crowding = foretold, say, crowding
        self._warm_until = ceil((done + RECEIPT_WARM_UP_STEPS) / report_every_steps) * report_every_steps
        self._first_until = self._warm_until + ceil(FIRST_STEPS / report_every_steps) * report_every_steps
        self._reports: list[StepReport] = []
        self._items: dict[int, StepItems] = {}
        self._told = False
        self._memory_seen = False

    def step(self, report: StepReport) -> None:
        """Take a step's report."""
        if report.step > self._warm_until:
            self._reports.append(report)
        if not self._told and report.step > self._first_until:
            complete = self._first_until in self._items
            if complete or report.step > self._first_until + PATIENCE_STEPS:
                self._told = True
                self._tell(self._came_until(self._first_until))

    def end(self) -> None:
        """The start is over; says how close it came where that was still awaited."""
        if not self._told and self._reports:
            self._told = True
            self._tell(self._came_until(self._first_until))

    def times(self, step: int, times: Sequence[RankTimes]) -> None:
        """Take what ranks told of a step that was reported, all of them or rank 0 alone."""
        known = next((report for report in reversed(self._reports) if report.step == step), None)
        if known:
            self._items[step] = _items(known.step_s, times)

    def memory(self, peak_tensor_bytes: Sequence[int]) -> None:
        """Take the peaks of all ranks; says so, once, where they are not what the plan said."""
        if self._memory_seen or not peak_tensor_bytes:
            return
        self._memory_seen = True
        if told := memory_comparison_text(self.foretold.tensor_bytes, max(peak_tensor_bytes)):
            self._say(told)

    @property
    def observed(self) -> Observed | None:
        """The medians of all steps after the first ones; None where there are none."""
        return self._came_until(self._reports[-1].step) if self._reports else None

    def disturbance(self) -> str | None:
        """Why these steps must not teach anything; None where they may."""
        return disturbance_text([report.step_s for report in self._reports], self._crowding())

    def _came_until(self, last_step: int) -> Observed:
        reports = [report for report in self._reports if report.step <= last_step]
        items = [items for step, items in self._items.items() if step <= last_step]
        return Observed(
            steps=len(reports),
            step_s=median(report.step_s for report in reports),
            data_s=median(report.data_wait_s for report in reports),
            items=_medians(items) if items else None,
        )

    def _tell(self, came: Observed) -> None:
        told = self.foretold
        self._say(comparison_text(told.items, came))
        source = "steps" if told.calibration.is_measured else told.basis
        if off := deviation_text(told.items, came, told.error, source):
            self._say(off)


def monitor_of(plan: Plan, done: int, say: Callable[[str], None]) -> ForecastMonitor | None:
    """What watches a start that goes on from `done` steps; None where the plan foretells no items."""
    forecast = plan.forecast
    if forecast is None or forecast.items is None:
        return None
    foretold = Predicted(
        items=forecast.items,
        calibration=forecast.calibration,
        basis=forecast.basis,
        error=forecast.error,
        tensor_bytes=forecast.tensor_bytes,
    )
    others = crowding if plan.device == "cpu" else _nobody
    return ForecastMonitor(foretold, done, plan.report_every_steps, say=say, crowding=others)


def note_message(compared: ForecastMonitor, kind: str, values: Mapping[str, Any]) -> None:
    """Hand on what a worker told."""
    if kind == "step":
        numbers: dict[str, Any] = {key: float(v) if isinstance(v, str) else v for key, v in values.items()}
        compared.step(StepReport(**numbers))
    elif kind == "times":
        # The plan counts waiting inside a part of the batch, for a pipeline's stages say, with its computing.
        compute_s = values["compute_s"] + values["inside_s"]
        times = RankTimes(rank=0, compute_s=compute_s, wait_s=values["wait_s"], data_s=values["data_s"])
        compared.times(values["step"], [times])
    elif kind == "memory":
        compared.memory(values["peak_tensor_bytes"])


def _nobody() -> None:
    """A GPU's programs are not counted."""


def _items(step_s: float, times: Sequence[RankTimes]) -> StepItems:
    """The items of the rank with most to compute, for which the others wait."""
    busiest = max(times, key=lambda rank: rank.compute_s)
    spent = busiest.compute_s + busiest.wait_s + busiest.data_s
    return StepItems(
        compute_s=busiest.compute_s,
        messages_s=busiest.wait_s,
        optimizer_s=max(0.0, step_s - spent),
        data_s=busiest.data_s,
    )


def _medians(items: Sequence[StepItems]) -> StepItems:
    return StepItems(
        compute_s=median(one.compute_s for one in items),
        messages_s=median(one.messages_s for one in items),
        optimizer_s=median(one.optimizer_s for one in items),
        data_s=median(one.data_s for one in items),
    )
