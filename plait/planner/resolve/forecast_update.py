"""A forecast brought up to date: with what runs have taught since, and with steps that were timed before this run."""

from __future__ import annotations

import math
from dataclasses import replace

from plait.planner.calibration.factors import (
    LEAST_MESSAGE_SHARE_TO_LEARN,
    MEASURED_STEP_ERROR,
    Calibration,
    with_calibration,
    without_calibration,
)
from plait.planner.plan import Forecast


def updated_forecast(forecast: Forecast, runs: Calibration, step_s: float | None) -> Forecast:
    """The forecast with the factors of `runs` and, where a step was timed (`step_s`), scaled to it.

    See note [steps that were timed before the run] in calibration/factors.py. Forecasts without items, of earlier
    versions, stay as they are.
    """
    if forecast.items is None:
        return forecast
    said, before, now = (
        without_calibration(forecast.items, forecast.calibration),
        forecast.calibration,
        replace(runs, timed=1.0),
    )
    measured = step_s if forecast.basis == "formulas" else None
    if measured is not None:
        now = replace(now, timed=measured / with_calibration(said, now).step_s)
    if math.isclose(now.timed, before.timed) and replace(now, timed=before.timed) == before:
        return forecast  # removing and reapplying the same factor would only add rounding errors
    items, alone_s = with_calibration(said, now), forecast.one_device_step_s
    moved = now.compute / before.compute
    if items.messages_s + items.within_s + items.bubble_s <= LEAST_MESSAGE_SHARE_TO_LEARN * items.step_s:
        moved *= now.timed / before.timed  # nearly all is computing, which one device alone does, too
    return replace(
        forecast,
        step_s=items.step_s,
        items=items,
        calibration=now,
        one_device_step_s=None if alone_s is None else alone_s * moved,
        error=forecast.error if measured is None else min(MEASURED_STEP_ERROR, forecast.error),
    )
