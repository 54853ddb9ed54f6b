"""The receipt of a run as a value: what it did, how well and how fast; its text is a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from plait.checked_json import printable
from plait.layout import Layout
from plait.partition.execution import MatmulBackend
from plait.report.bottleneck import RunBottleneck, bottleneck_lines
from plait.report.plausibility import efficiency_doubt, mfu_doubt
from plait.units import compared_text, counted, format_bytes, format_count, format_duration, plain_number

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
    public prices and full board power, and None where they are not published.
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
    """The items as measured: medians of the last start's steps after the first ones; None where ranks sent no
    times."""
    predicted_rss_bytes: float | None = None
    """Predicted size of a worker's process with its tensors; None on GPUs, where tensors are in another memory."""
    taught_by_runs: int = 0
    """Number of earlier runs whose observations the forecast uses."""
    timed_step_s: float | None = None
    """Step time measured before the run, where the layout was timed."""
    optimizer: Mapping[str, str | float] | None = None
    """Kind, peak learning rates, and in what numbers Muon orthogonalized; None in receipts of earlier versions."""
    matmul_backend: MatmulBackend = "default"
    """The library by which processors multiplied float32 matrices."""
    matmul_flops: float | None = None
    """FLOP/s of the run's matrix products on one device, as measured before it; None on GPUs."""
    matmul_error: float | None = None
    """Largest relative error of those products against float64."""
    untimed_step_s: float | None = None
    """Step time by formulas and earlier runs, where the prediction is the step that was timed."""
    choices_accuracy: float | None = None
    """Share of the recipe's multiple-choice questions (report.choices) that the last evaluation answered right."""
    choices_accuracy_per_byte: float | None = None
    """Accuracy if log-probabilities are divided by the bytes of a choice."""
    pair_accuracy: float | None = None
    """Share of pairs of answers that the last evaluation ranked right, or the last step where nothing is held out."""
    incidents: tuple[str, ...] = ()
    """A sentence for each failure that ended workers of the run."""
    useful_share: float | None = None
    """Seconds of the steps that count over `wall_s`; the rest went to starts, saves, evaluations and failures."""
    samples_skipped: int = 0
    """Samples that the run left out on purpose, because loss or gradient were bad twice at their step."""
    updates_skipped: int | None = None
    """Updates skipped because a gradient exceeded float16's range; None in other precisions."""
    loss_scale: float | None = None
    """Scale of losses in the last step; None but in float16."""
    copy_every_steps: float | None = None
    copy_share: float | None = None
    """Steps between copies of the state in memory, on average, and the share of `wall_s` that they held workers up."""
    lost_by_cause: Mapping[str, float] | None = None
    """Seconds that failures cost, by their cause: found, back at work, and steps done again."""
    bottleneck: RunBottleneck | None = None
    """The run's bottleneck at its end, and the gain from changes; None if no rank sent its times."""

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

    def __str__(self) -> str:
        """A few aligned lines, as `plait train --verbose` prints them."""
        rows = [(name, printable(text)) for name, text in receipt_rows(self) if text]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _repr_html_(self) -> str:
        """The receipt as a notebook shows it."""
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in receipt_rows(self) if text
        )
        return f"<table>{rows}</table>"


def receipt_rows(receipt: Receipt) -> list[tuple[str, str]]:
    """A receipt's contents, as names and texts; a text is empty if its value is unknown."""
    degrees: Mapping[str, Any] = receipt.layout
    layout, ranks = Layout(**degrees), receipt.world_size
    speed = f"{format_count(receipt.tokens_per_s)} tokens/s, {format_duration(receipt.step_s_median)} a step (median)"
    unit = "nats per token" if receipt.pair_accuracy is None else "a pair"
    held_out = _text(receipt.eval_loss, f"{{:.4f}} {unit}") + _text(receipt.eval_nats_per_byte, ", {:.4f} per byte")
    held_out += _text(receipt.pair_accuracy if held_out else None, ", {:.1%} of pairs ranked right")
    copied = _text(receipt.copy_every_steps, "copied every {:.3g} steps")
    return [
        ("trained", f"{counted(receipt.steps, 'step')}, {format_count(receipt.tokens)} tokens"),
        ("on", f"{receipt.device}, {counted(ranks, 'rank')} ({layout})"),
        ("training loss", f"{receipt.train_loss:.4f} {unit} in the last step"),
        ("held-out loss", held_out),
        ("float16", _float16(receipt)),
        ("speed", speed),
        ("forecast", _forecast(receipt)),
        ("step time", _items(receipt)),
        ("bottleneck", _bottleneck(receipt.bottleneck)),
        ("speed-up", _speedup(receipt)),
        ("MFU", _mfu(receipt)),
        ("peak of tensors", _peak(receipt.peak_tensor_bytes)),
        ("peak of memory", _peak(receipt.peak_rss_bytes) + _rss_forecast(receipt)),
        ("time", f"{format_duration(receipt.wall_s)}, {plain_number(receipt.device_hours)} device hours"),
        ("useful time", _text(receipt.useful_share, "{:.1%} in steps that count")),
        ("state in memory", copied + _text(receipt.copy_share, ", {:.1%} of the time")),
        *(("failure", sentence) for sentence in receipt.incidents),
        ("lost to failures", _lost(receipt)),
        ("cost", _costs(receipt)),
        ("versions", ", ".join(f"{name} {version}" for name, version in receipt.versions.items())),
    ]


def _forecast(receipt: Receipt) -> str:
    if receipt.predicted_step_s is None or receipt.step_error is None:
        return ""
    text = f"{format_duration(receipt.predicted_step_s)} a step{_sources(receipt)}: the run was "
    text += _difference(receipt.step_error, "slower", "faster")
    if receipt.timed_error is not None and receipt.untimed_step_s is None:
        difference = _difference(receipt.timed_error, "slower", "faster", than="timed")
        text += f"; timed before the run {format_duration(receipt.timed_step_s or 0.0)}: {difference}"
    if receipt.predicted_peak_bytes_per_device is None or receipt.memory_error is None:
        return text
    peak = format_bytes(receipt.predicted_peak_bytes_per_device)
    return f"{text}; {peak} of tensors: {_difference(receipt.memory_error, 'more', 'less')}"


def _sources(receipt: Receipt) -> str:
    """In brackets what the forecast of a step rests on, where that is not formulas alone."""
    parts = []
    if receipt.untimed_step_s is not None:
        parts.append(f"timed before the run, formulas said {format_duration(receipt.untimed_step_s)}")
    if receipt.taught_by_runs:
        parts.append(f"corrected by {counted(receipt.taught_by_runs, 'earlier run')}")
    return f" ({'; '.join(parts)})" if parts else ""


def _items(receipt: Receipt) -> str:
    """The items of a step, measured and predicted, in words."""
    predicted, measured = receipt.predicted_items, receipt.measured_items
    if predicted is None or measured is None:
        return ""
    named = [n for n in ITEM_NAMES if max(predicted[n], measured[n]) >= WORTH_NAMING * sum(measured.values())]
    return ", ".join(
        f"{ITEM_NAMES[n]} {format_duration(measured[n])} (forecast {format_duration(predicted[n])})" for n in named
    )


def _bottleneck(found: RunBottleneck | None) -> str:
    sentence, *remedies = bottleneck_lines(found) or [""]
    return sentence + (f" Faster would be {'; '.join(remedies)}." if remedies else "")


def _rss_forecast(receipt: Receipt) -> str:
    if receipt.predicted_rss_bytes is None or receipt.rss_error is None:
        return ""
    return f"; forecast {format_bytes(receipt.predicted_rss_bytes)}: {_difference(receipt.rss_error, 'more', 'less')}"


def _difference(error: float, above: str, below: str, *, than: str = "forecast") -> str:
    """How measured compares with predicted, from predicted / measured - 1."""
    ratio = 1 / (1 + error)
    return f"as {than}" if abs(ratio - 1) < 0.0005 else compared_text(ratio, above, below, digits=1, than=than)


def _mfu(receipt: Receipt) -> str:
    causal = _text(receipt.mfu_causal, " ({:.1%} with causal attention)")
    return _text(receipt.mfu, "{:.1%}") + causal + mfu_doubt(receipt.mfu)


def _speedup(receipt: Receipt) -> str:
    if receipt.world_size == 1 or receipt.speedup_vs_one is None or receipt.efficiency is None:
        return ""
    source = {"measurement": " from its measured speed", "formulas": " by formulas", None: ""}
    return (
        f"{receipt.speedup_vs_one:.2f} times one device alone (estimated{source[receipt.one_device_from]}): "
        f"{receipt.efficiency:.0%} of {receipt.world_size} workers"
        f"{efficiency_doubt(receipt.efficiency, receipt.world_size)}"
    )


def _float16(receipt: Receipt) -> str:
    if receipt.updates_skipped is None or receipt.loss_scale is None:
        return ""
    skipped = f"{receipt.updates_skipped:,} of {counted(receipt.steps, 'update', ',')} skipped"
    return f"{skipped}; loss scale {receipt.loss_scale:,.0f} in the last step"


def _lost(receipt: Receipt) -> str:
    parts = [f"{format_duration(seconds)} {cause}" for cause, seconds in (receipt.lost_by_cause or {}).items()]
    if receipt.samples_skipped:
        parts.append(f"{counted(receipt.samples_skipped, 'sample')} skipped on purpose")
    return ", ".join(parts)


def _costs(receipt: Receipt) -> str:
    watts_h = receipt.energy_wh
    energy = "" if watts_h is None else f"{plain_number(watts_h)} Wh of the devices"
    parts = [_text(receipt.cost_usd, "${:,.2f}"), energy]
    return ", ".join(part for part in parts if part)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _peak(per_device: Sequence[int]) -> str:
    return f"{format_bytes(max(per_device))} on the fullest device" if per_device else ""


def _off(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None or not measured > 0 else predicted / measured - 1
