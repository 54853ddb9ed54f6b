"""The receipt of a run as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.layout import Layout
from plait.report.plausibility import efficiency_doubt, mfu_doubt
from plait.report.receipt import ITEM_NAMES, Receipt
from plait.units import compared_text, counted, format_bytes, format_count, format_duration, plain_number

WORTH_NAMING = 0.005
"""Share of a step from which on an item is printed."""


def receipt_table(receipt: Receipt) -> str:
    """A few aligned lines."""
    rows = [(name, text) for name, text in _rows(receipt) if text]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _rows(receipt: Receipt) -> list[tuple[str, str]]:
    degrees: Mapping[str, Any] = receipt.layout
    layout, ranks = Layout(**degrees), receipt.world_size
    speed = f"{format_count(receipt.tokens_per_s)} tokens/s, {format_duration(receipt.step_s_median)} a step (median)"
    held_out = _text(receipt.eval_loss, "{:.4f} nats per token") + _text(
        receipt.eval_nats_per_byte, ", {:.4f} per byte"
    )
    return [
        ("trained", f"{counted(receipt.steps, 'step')}, {format_count(receipt.tokens)} tokens"),
        ("on", f"{receipt.device}, {counted(ranks, 'rank')} ({layout})"),
        ("training loss", f"{receipt.train_loss:.4f} nats per token in the last step"),
        ("held-out loss", held_out),
        ("speed", speed),
        ("forecast", _forecast(receipt)),
        ("step time", _items(receipt)),
        ("speed-up", _speedup(receipt)),
        ("MFU", _mfu(receipt)),
        ("peak of tensors", _peak(receipt.peak_tensor_bytes)),
        ("peak of memory", _peak(receipt.peak_rss_bytes) + _rss_forecast(receipt)),
        ("time", f"{format_duration(receipt.wall_s)}, {plain_number(receipt.device_hours)} device hours"),
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


def _costs(receipt: Receipt) -> str:
    watts_h = receipt.energy_wh
    parts = [
        _text(receipt.cost_usd, "${:,.2f}"),
        "" if watts_h is None else f"{plain_number(watts_h)} Wh of the devices",
    ]
    return ", ".join(part for part in parts if part)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _peak(per_device: Sequence[int]) -> str:
    return f"{format_bytes(max(per_device))} on the fullest device" if per_device else ""
