"""The receipt of a run: what it did, how well and how fast, as a value, a JSON file and a table for people."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, Literal

from plait.errors import PlaitError
from plait.layout import Layout
from plait.report.atomic import replace_file
from plait.report.metrics import StepReport
from plait.units import counted, format_bytes, format_count, format_duration, more_or_less

RECEIPT_WARM_UP_STEPS = 3
DERIVED = ("step_error", "memory_error", "rss_error", "speedup_vs_one", "efficiency")
"""Keys that are written for people who read the file, and computed again when it is read."""
ITEM_NAMES = {
    "compute_s": "computing",
    "waiting_s": "messages and other ranks",
    "optimizer_s": "optimizer and the rest",
    "data_s": "data",
}
WORTH_NAMING = 0.005
"""Share of a step from which on an item is printed."""


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

    def table(self) -> str:
        """A few aligned lines for people."""
        rows = [(name, text) for name, text in _rows(self) if text]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


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
    return Speed(
        step_s_median=median(report.step_s for report in kept),
        tokens_per_s=median(report.tokens_per_s for report in kept),
        mfu=median(mfus) if mfus else None,
    )


def _off(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None or not measured > 0 else predicted / measured - 1


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _rows(receipt: Receipt) -> list[tuple[str, str]]:
    degrees: Mapping[str, Any] = receipt.layout
    layout, ranks = Layout(**degrees), receipt.world_size
    speed = f"{format_count(receipt.tokens_per_s)} tokens/s, {format_duration(receipt.step_s_median)} a step (median)"
    held_out = _text(receipt.eval_loss, "{:.4f} nats per token") + _text(
        receipt.eval_nats_per_byte, ", {:.4f} per byte"
    )
    return [
        ("trained", f"{counted(receipt.steps, 'step')}, {format_count(receipt.tokens)} tokens"),
        ("on", f"{receipt.device}, {ranks} {'rank' if ranks == 1 else 'ranks'} ({layout})"),
        ("training loss", f"{receipt.train_loss:.4f} nats per token in the last step"),
        ("held-out loss", held_out),
        ("speed", speed),
        ("forecast", _forecast(receipt)),
        ("where it went", _items(receipt)),
        ("speed-up", _speedup(receipt)),
        ("MFU", _text(receipt.mfu, "{:.1%}") + _text(receipt.mfu_causal, " ({:.1%} with causal attention)")),
        ("peak of tensors", _peak(receipt.peak_tensor_bytes)),
        ("peak of memory", _peak(receipt.peak_rss_bytes) + _rss_forecast(receipt)),
        ("time", f"{format_duration(receipt.wall_s)}, {receipt.device_hours:.3g} device hours"),
        ("costs", _costs(receipt)),
        ("versions", ", ".join(f"{name} {version}" for name, version in receipt.versions.items())),
    ]


def _forecast(receipt: Receipt) -> str:
    if receipt.predicted_step_s is None or receipt.step_error is None:
        return ""
    text = f"{format_duration(receipt.predicted_step_s)} a step, {_apart(receipt.step_error)}"
    if receipt.untimed_step_s is not None:
        text += f", timed before it began; the formulas said {format_duration(receipt.untimed_step_s)}"
    if receipt.taught_by_runs:
        text += f" (taught by {counted(receipt.taught_by_runs, 'run')})"
    timed_error = _off(receipt.timed_step_s, receipt.step_s_median)
    if timed_error and receipt.untimed_step_s is None:
        text += f"; {format_duration(receipt.timed_step_s or 0.0)} as timed before it began, {_apart(timed_error)}"
    if receipt.predicted_peak_bytes_per_device is None or receipt.memory_error is None:
        return text
    peak = format_bytes(receipt.predicted_peak_bytes_per_device)
    return f"{text}; {peak} of tensors, {_apart(receipt.memory_error)}"


def _items(receipt: Receipt) -> str:
    """The items of a step, measured and predicted, in words."""
    predicted, measured = receipt.predicted_items, receipt.measured_items
    if predicted is None or measured is None:
        return ""
    named = [n for n in ITEM_NAMES if max(predicted[n], measured[n]) >= WORTH_NAMING * sum(measured.values())]
    return ", ".join(
        f"{ITEM_NAMES[n]} {format_duration(measured[n])} (forecast {format_duration(predicted[n])})" for n in named
    )


def _rss_forecast(receipt: Receipt) -> str:
    if receipt.predicted_rss_bytes is None or receipt.rss_error is None:
        return ""
    return f"; forecast {format_bytes(receipt.predicted_rss_bytes)}, {_apart(receipt.rss_error)}"


def _apart(error: float) -> str:
    return f"{more_or_less(error)} than measured"


def _speedup(receipt: Receipt) -> str:
    if receipt.world_size == 1 or receipt.speedup_vs_one is None or receipt.efficiency is None:
        return ""
    source = {"measurement": " from its measured speed", "formulas": " from formulas", None: ""}
    return (
        f"{receipt.speedup_vs_one:.2f} times one device alone, as the plan expects that to be"
        f"{source[receipt.one_device_from]}: {receipt.efficiency:.0%} of {receipt.world_size}"
    )


def _costs(receipt: Receipt) -> str:
    parts = [_text(receipt.cost_usd, "${:.2f}"), _text(receipt.energy_wh, "{:.3g} Wh of the devices")]
    return ", ".join(part for part in parts if part)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _peak(per_device: Sequence[int]) -> str:
    return f"{format_bytes(max(per_device))} on the fullest device" if per_device else ""
