"""Compares one start of a run with its plan's forecast: logs once how close the first steps came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any, Literal

from plait.planner.calibration.factors import Calibration, ForecastBasis, StepItems, disturbance_text
from plait.planner.calibration.predicted_vs_measured import (
    Observed,
    comparison_text,
    deviation_text,
    memory_comparison_text,
)
from plait.planner.plan import Plan
from plait.probing.calibration_store import load_per_core
from plait.report.metrics import RECEIPT_WARM_UP_STEPS, StepReport
from plait.report.straggler import RankTimes

FIRST_STEPS_COMPARED = 5
RANK_TIMES_WAIT_STEPS = 20
"""Steps to wait for the ranks' times of the first steps: they may come late, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A plan's forecast of a step, and the error that it expects of itself."""

    items: StepItems
    """The step's items, corrected by earlier runs."""
    calibration: Calibration
    basis: ForecastBasis
    error: float
    tensor_bytes: float


CompareWhen = Literal["always", "when off", "never"]
"""When the first steps are logged beside the forecast: once in any case, only beyond the forecast's error, or not."""
LoadPerCore = Callable[[], float | None]
"""Returns the runnable programs per core; None where it is unknown or says nothing about the run."""


class ForecastMonitor:
    """Compares the steps of one start, from `steps_done` on, with the forecast; sentences about them go to `log`.

    Steps that are reported together share one time, so those reported with a warm-up step are left out with it. The
    ranks' own times of a step arrive after its report.
    """

    def __init__(
        self,
        predicted: Predicted,
        steps_done: int,
        report_every_steps: int,
        *,
        log: Callable[[str], None],
        load_per_core: LoadPerCore,
        compare: CompareWhen = "always",
    ) -> None:
        self._compare = compare
        self.predicted, self._log, self._load_per_core = predicted, log, load_per_core
        self._warm_until = ceil((steps_done + RECEIPT_WARM_UP_STEPS) / report_every_steps) * report_every_steps
        self._first_until = self._warm_until + ceil(FIRST_STEPS_COMPARED / report_every_steps) * report_every_steps
        self._reports: list[StepReport] = []
        self._items: dict[int, StepItems] = {}
        self._has_reported = False
        self._has_compared_memory = False

    def add_step_report(self, report: StepReport) -> None:
        """Take a step's report."""
        if report.step > self._warm_until:
            self._reports.append(report)
        if not self._has_reported and report.step > self._first_until:
            complete = self._first_until in self._items
            if complete or report.step > self._first_until + RANK_TIMES_WAIT_STEPS:
                self._has_reported = True
                self._report(self._observed_until(self._first_until))

    def finish(self) -> None:
        """End the comparison; logs how close the forecast came if it still waited for the ranks' times."""
        if not self._has_reported and self._reports:
            self._has_reported = True
            self._report(self._observed_until(self._first_until))

    def add_rank_times(self, step: int, times: Sequence[RankTimes]) -> None:
        """Add the ranks' times of a step that was reported, those of all ranks or of rank 0 alone."""
        known = next((report for report in reversed(self._reports) if report.step == step), None)
        if known:
            self._items[step] = _items_of_busiest_rank(known.step_s, times)

    def add_memory_peaks(self, peak_tensor_bytes: Sequence[int]) -> None:
        """Add the memory peaks of all ranks; logs once where they differ from the plan's forecast."""
        if self._has_compared_memory or not peak_tensor_bytes:
            return
        self._has_compared_memory = True
        if self._compare != "never" and (
            comparison := memory_comparison_text(self.predicted.tensor_bytes, max(peak_tensor_bytes))
        ):
            self._log(comparison)

    @property
    def observed(self) -> Observed | None:
        """The medians of all steps after the first ones; None where there are none."""
        return self._observed_until(self._reports[-1].step) if self._reports else None

    def why_not_to_learn(self) -> str | None:
        """Why nothing may be learned from these steps; None where it may."""
        return disturbance_text([report.step_s for report in self._reports], self._load_per_core())

    def _observed_until(self, last_step: int) -> Observed:
        reports = [report for report in self._reports if report.step <= last_step]
        items = [items for step, items in self._items.items() if step <= last_step]
        return Observed(
            steps=len(reports),
            step_s=median(report.step_s for report in reports),
            data_s=median(report.data_wait_s for report in reports),
            items=_median_items(items) if items else None,
        )

    def _report(self, observed: Observed) -> None:
        predicted = self.predicted
        source = "steps" if predicted.calibration.is_measured else predicted.basis
        off = deviation_text(predicted.items, observed, predicted.error, source)
        if self._compare == "never":
            return
        if off or self._compare == "always":
            self._log(comparison_text(predicted.items, observed))
        if off:
            self._log(off)


def monitor_of(
    plan: Plan, steps_done: int, log: Callable[[str], None], compare: CompareWhen = "always"
) -> ForecastMonitor | None:
    """The monitor of a start that continues from `steps_done`; None where the plan has no forecast items."""
    forecast = plan.forecast
    if forecast is None or forecast.items is None:
        return None
    predicted = Predicted(
        items=forecast.items,
        calibration=forecast.calibration,
        basis=forecast.basis,
        error=forecast.error,
        tensor_bytes=forecast.tensor_bytes,
    )
    others = load_per_core if plan.machines.device == "cpu" else _unknown_load
    return ForecastMonitor(
        predicted, steps_done, plan.cadence.report_every_steps, log=log, load_per_core=others, compare=compare
    )


def pass_to_monitor(monitor: ForecastMonitor, kind: str, values: Mapping[str, Any]) -> None:
    """Pass a worker's message on to the monitor."""
    if kind == "step":
        numbers: dict[str, Any] = {key: float(v) if isinstance(v, str) else v for key, v in values.items()}
        monitor.add_step_report(StepReport(**numbers))
    elif kind == "times":
        # The plan counts waiting inside a part of the batch, for a pipeline's stages say, with its computing.
        compute_s = values["compute_s"] + values["inside_s"]
        times = RankTimes(rank=0, compute_s=compute_s, wait_s=values["wait_s"], data_s=values["data_s"])
        monitor.add_rank_times(values["step"], [times])
    elif kind == "memory":
        monitor.add_memory_peaks(values["peak_tensor_bytes"])


def _unknown_load() -> None:
    """The load of a GPU: None, as its programs are not counted."""


def _items_of_busiest_rank(step_s: float, times: Sequence[RankTimes]) -> StepItems:
    """The items of the rank with most to compute, for which the others wait."""
    busiest = max(times, key=lambda rank: rank.compute_s)
    spent = busiest.compute_s + busiest.wait_s + busiest.data_s
    return StepItems(
        compute_s=busiest.compute_s,
        messages_s=busiest.wait_s,
        optimizer_s=max(0.0, step_s - spent),
        data_s=busiest.data_s,
    )


def _median_items(items: Sequence[StepItems]) -> StepItems:
    return StepItems(
        compute_s=median(one.compute_s for one in items),
        messages_s=median(one.messages_s for one in items),
        optimizer_s=median(one.optimizer_s for one in items),
        data_s=median(one.data_s for one in items),
    )
