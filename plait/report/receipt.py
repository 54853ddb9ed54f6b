"""The receipt of a run: what it did, how well and how fast, as a value and a JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, Literal

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.errors import PlaitError
from plait.layout import AXES
from plait.partition.execution import MatmulBackend
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file

DERIVED = ("step_error", "memory_error", "rss_error", "speedup_vs_one", "efficiency")
"""Keys that are written for people who read the file, and computed again when it is read."""
NULL_IF_NAN = ("train_loss", "step_s_median", "tokens_per_s")
"""Keys that are null in the file where the run has no such number; other keys are null where there is none."""
_ABOVE_ZERO = (
    "step_s_median", "predicted_step_s", "timed_step_s", "untimed_step_s", "one_device_step_s",
    "predicted_peak_bytes_per_device", "predicted_rss_bytes",
)  # fmt: skip
_SMALLEST, _LARGEST = 1e-15, 1e30
"""Beyond these nothing is measured, and ratios of two figures could be more than a float holds."""
ITEM_NAMES = {
    "compute_s": "computing",
    "waiting_s": "messages and other ranks",
    "optimizer_s": "optimizer and the rest",
    "data_s": "data",
}


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
    matmul_backend: MatmulBackend = "default"
    """The library by which processors multiplied float32 matrices."""
    matmul_flops: float | None = None
    """FLOP/s of the run's matrix products on one device, as measured before it; None on GPUs."""
    matmul_error: float | None = None
    """Largest relative error of those products against float64."""
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
        replace_file(path, sealed_text(values).encode())


def read_receipt(path: Path) -> Receipt:
    """Read receipt.json; raises PlaitError where it is missing or is not one."""
    try:
        values = parse_object(read_regular_file(path))
        lost = {name: nan for name in NULL_IF_NAN if values.get(name, 0.0) is None}
        kept = {name: value for name, value in values.items() if name not in DERIVED}
        return _checked(replace(typed_value(Receipt, kept | dict.fromkeys(lost, 0.0)), **lost))
    except FileNotFoundError:
        raise PlaitError(f"{path} is missing: the run has not finished; give its command again") from None
    except (OSError, ValueError) as error:
        raise PlaitError(f"{path} is not a receipt ({error}); delete it and give the run's command again") from None


def _checked(receipt: Receipt) -> Receipt:
    """Raise ValueError for keys that no layout or step has, and for a run of no ranks."""
    items = [items.keys() for items in (receipt.predicted_items, receipt.measured_items) if items is not None]
    if receipt.layout.keys() - set(AXES) or any(keys != ITEM_NAMES.keys() for keys in items):
        raise ValueError("its layout or its items have other keys than plait writes")
    if receipt.world_size < 1 or min(receipt.layout.values(), default=1) < 1:
        raise ValueError("its layout has fewer than one rank")
    for field in fields(receipt):
        value = getattr(receipt, field.name)
        for one in value if isinstance(value, list) else [value]:
            least = _SMALLEST if field.name in _ABOVE_ZERO else 0.0
            if isinstance(one, int | float) and not (isnan(one) or least <= one <= _LARGEST):
                raise ValueError(f"{field.name} is {one:g}, which no run comes to")
    return receipt


def _off(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None or not measured > 0 else predicted / measured - 1


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
