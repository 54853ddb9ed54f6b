"""The receipt of a run: what it did, how well and how fast, as a value and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, Literal

from plait.errors import PlaitError
from plait.report.atomic import replace_file
from plait.report.metrics import StepReport

RECEIPT_WARM_UP_STEPS = 3
DERIVED = ("step_error", "memory_error", "rss_error", "speedup_vs_one", "efficiency")
"""Keys that are written for people who read the file, and computed again when it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """All that a run is judged by; lists hold one entry per device, MFU are fractions or None, times are seconds.

    `mfu` counts the whole attention matrix as work, `mfu_causal` only the half that a causal model needs. What was
    predicted is the plan's forecast from before the first step; cost and energy are those of the devices alone, at
    public prices and full board power, and None where nobody publishes them.
    """

    steps: int
    tokens: int
    world_size: int
    layout: Mapping[str, int]
    train_loss: float
    eval_loss: float | None
    eval_nats_per_byte: float | None
    step_s_median: float
    predicted_step_s: float | None
    tokens_per_s: float
    mfu: float | None
    mfu_causal: float | None
    peak_tensor_bytes: Sequence[int]
    predicted_peak_bytes_per_device: float | None
    """Predicted peak of tensors on a device."""
    peak_rss_bytes: Sequence[int]
    wall_s: float
    device_hours: float
    one_device_step_s: float | None
    """Step time that the plan expects of the first device alone with the same batch; never run."""
    cost_usd: float | None
    energy_wh: float | None
    versions: Mapping[str, str]
    device: str
    one_device_from: Literal["measurement", "formulas"] | None = None
    """Basis of `one_device_step_s`: a probe's measurements, or formulas alone."""
    predicted_items: Mapping[str, float] | None = None
    """Predicted seconds of a step by item, as a clock can tell them apart, on the rank with most to compute: its
    waiting within a pipeline or tensor group counts as computing."""
    measured_items: Mapping[str, float] | None = None
    """The same items as measured: medians of the last start's steps after the first ones; None where ranks sent no
    times."""
    predicted_rss_bytes: float | None = None
    """Predicted size of a worker's process with its tensors; None on GPUs, where tensors are in another memory."""
    taught_by_runs: int = 0
    """Number of earlier runs whose observations the forecast uses."""
    timed_step_s: float | None = None
    """Step time measured before the run, where the layout was timed."""
    untimed_step_s: float | None = None
    """Step time by formulas and earlier runs, where the prediction is the step that was timed."""

    @property
    def step_error(self) -> float | None:
        """Relative error of the predicted step time: predicted / measured - 1."""
        return _off(self.predicted_step_s, self.step_s_median)

    @property
    def timed_error(self) -> float | None:
        """Relative error of the step that was timed before the run."""
        return _off(self.timed_step_s, self.step_s_median)

    @property
    def speedup_vs_one(self) -> float | None:
        """How many times faster than one device alone would be."""
        if self.one_device_step_s is None or not self.step_s_median > 0:
            return None
        return self.one_device_step_s / self.step_s_median

    @property
    def efficiency(self) -> float | None:
        """The speed-up over the number of devices."""
        return None if self.speedup_vs_one is None else self.speedup_vs_one / self.world_size

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted tensor peak, on the fullest device: predicted / measured - 1."""
        return _off(self.predicted_peak_bytes_per_device, max(self.peak_tensor_bytes, default=0))

    @property
    def rss_error(self) -> float | None:
        """Relative error of the predicted process size, of the largest worker: predicted / measured - 1."""
        return _off(self.predicted_rss_bytes, max(self.peak_rss_bytes, default=0))

    def write(self, path: Path) -> None:
        """Write receipt.json in one piece; raises RunFailed on a full disk."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        for name in DERIVED:
            values[name] = _plain(getattr(self, name))
        replace_file(path, (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians over the steps of a run."""

    step_s_median: float
    tokens_per_s: float
    mfu: float | None


def read_receipt(path: Path) -> Receipt:
    """Read receipt.json; raises PlaitError where it is missing or is not one."""
    known = fields(Receipt)
    try:
        values: Any = json.loads(path.read_bytes())
        # What has a default came later than the first receipts.
        found = {f.name: values[f.name] for f in known if f.default is MISSING or f.name in values}
    except FileNotFoundError:
        raise PlaitError(f"{path} is missing: the run has not finished; give its command again") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise PlaitError(f"{path} is not a receipt; delete it and give the run's command again") from None
    for name in ("train_loss", "step_s_median", "tokens_per_s"):
        found[name] = nan if found[name] is None else found[name]
    return Receipt(**found)


def median_speed(reports: Sequence[StepReport], starts: Collection[int] = (0,)) -> Speed:
    """The run's typical speed; `starts` are the numbers of steps done at which a process started or went on.

    The first steps of each start are left out, for they also warm caches up, unless nothing else is there.
    """
    warming = {start + offset for start in starts for offset in range(1, RECEIPT_WARM_UP_STEPS + 1)}
    kept = [report for report in reports if report.step not in warming] or list(reports)
    if not kept:
        return Speed(step_s_median=nan, tokens_per_s=nan, mfu=None)
    mfus = [report.mfu for report in kept if report.mfu is not None]
    step_s, tokens_per_s = median(one.step_s for one in kept), median(one.tokens_per_s for one in kept)
    return Speed(step_s_median=step_s, tokens_per_s=tokens_per_s, mfu=median(mfus) if mfus else None)


def _off(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None or not measured > 0 else predicted / measured - 1


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
