"""Measurements as a text table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from plait.cluster.measured import MeasuredDevice, MeasuredLink, Measurements, WorkKind, WorkTiming
from plait.units import format_bytes, format_si, plain_number

LINK_KIND_TEXTS = {
    "send": "send, from one to another",
    "all_reduce": "all-reduce, everybody gets the sum",
    "all_gather": "all-gather, everybody gets all parts",
    "reduce_scatter": "reduce-scatter, each gets a part of the sum",
    "all_to_all": "all-to-all, each has a part for each",
    "swap_parts": "reduce-scatter as plait does it here",
    "spread_own": "all-gather as plait does it here",
}


LEAST_UNDISTURBED_SHARE = 0.9
"""Share of its core's time from which on a worker counts as undisturbed."""


def measurements_table(measured: Measurements) -> str:
    """The table of devices, links and communication behind arithmetic; warnings come last."""
    blocks = [_device_lines(measured, device) for device in measured.devices]
    blocks += [_link_lines(measured.links)] if measured.links else []
    blocks += [_overlap_lines(measured)] if measured.overlaps else []
    blocks += [[f"slow     {sentence}" for sentence in measured.complaints]] if measured.complaints else []
    return "\n".join(line for block in blocks for line in block)


def _device_lines(measured: Measurements, device: MeasuredDevice) -> list[str]:
    each = f"{device.workers} worker{'s' if device.workers > 1 else ''} of {device.threads} thread"
    each += "s" if device.threads > 1 else ""
    head = f"{device.host}: {device.name}, {each}, {format_bytes(device.memory_bytes)}, {measured.precision}"
    rows = [
        ("matrix products, forward", _product_text(device, "product")),
        ("… gradient of the input", _product_text(device, "product_input")),
        ("… gradient of the weight", _product_text(device, "product_weight")),
        ("attention, forward and backward", _attention_text(device)),
        ("norms, activation, residuals", _stream_text(device)),
        ("head and loss", _head_text(device)),
        ("update by the optimizer", _per_parameter_text(device, "update")),
        ("gradients added up", _per_parameter_text(device, "accumulate")),
        ("memory, copied", _copy_text(device)),
        ("smallest operation", f"{plain_number(device.times_of('launch')[0].seconds * 1e6)} µs"),
    ]
    lines = [f"device   {head}", *(f"         {what:34}{text}" for what, text in rows)]
    if device.granted < LEAST_UNDISTURBED_SHARE:
        others = (
            f"other programs had {1 - device.granted:.0%} of the cores; times above are processor time, without them"
        )
        lines.append(f"         {others}")
    if device.beside:
        factors = ", ".join(f"{work.replace('_', ' ')} {factor:.2f}" for work, factor in _factors_shown(device.beside))
        lines.append(f"         {'side by side, times as long':34}{factors}")
    return lines


def _product_text(device: MeasuredDevice, work: WorkKind) -> str:
    rates = sorted((2 * prod(one.sizes) / one.seconds, one.sizes) for one in device.times_of(work))
    (low, small), (high, large) = rates[0], rates[-1]
    slow, middle, fast = (format_si(rate, "FLOP/s") for rate in (low, rates[len(rates) // 2][0], high))
    ends = f"; from {slow} at {_sizes_text(small)} to {fast} at {_sizes_text(large)}" if len(rates) > 1 else ""
    return f"{middle}{ends}"


def _attention_text(device: MeasuredDevice) -> str:
    parts = []
    for there, back in zip(device.times_of("attention"), device.times_of("attention_backward"), strict=True):
        _, length, heads, _, head_width = there.sizes
        tokens = there.sizes[0] * length * heads
        parts.append((length, head_width, (there.seconds + back.seconds) / tokens))
    ends = dict.fromkeys((min(parts), max(parts)))
    each = [
        f"{plain_number(seconds * 1e6, 2)} µs ({length} tokens, heads {width} wide)" for length, width, seconds in ends
    ]
    return f"{' to '.join(each)} a token and head"


def _stream_text(device: MeasuredDevice) -> str:
    pairs = zip(device.times_of("stream"), device.times_of("stream_backward"), strict=True)
    rates = [(a.seconds + b.seconds) / (a.sizes[0] * (a.sizes[1] + a.sizes[2])) * 1e9 for a, b in pairs]
    return f"{_range_text(rates)} ns a token and unit of width"


def _head_text(device: MeasuredDevice) -> str:
    rates = [one.seconds / (one.sizes[0] * one.sizes[2]) * 1e9 for one in device.times_of("head")]
    return f"{_range_text(rates)} ns a token and entry of the vocabulary"


def _per_parameter_text(device: MeasuredDevice, work: WorkKind) -> str:
    return f"{_range_text([one.seconds / one.sizes[0] * 1e9 for one in device.times_of(work)])} ns a parameter"


def _copy_text(device: MeasuredDevice) -> str:
    lines = [
        f"{format_bytes(2 * one.sizes[0] / one.seconds)}/s ({format_bytes(one.sizes[0])})"
        for one in _copies_by_size(device)
    ]
    return ", ".join(lines)


def _copies_by_size(device: MeasuredDevice) -> Sequence[WorkTiming]:
    return sorted(device.times_of("copy"), key=lambda one: one.sizes)


def _link_lines(links: Sequence[MeasuredLink]) -> list[str]:
    lines = []
    for scope, hosts, ranks in dict.fromkeys((link.scope, link.hosts, link.ranks) for link in links):
        where = f"inside {hosts[0]}" if scope == "inside" else f"between {' and '.join(hosts)}"
        lines.append(f"link     {where}, {ranks} workers")
        for link in links:
            if (link.scope, link.hosts, link.ranks) == (scope, hosts, ranks):
                lines.append(f"         {LINK_KIND_TEXTS[link.kind]:44}{_link_text(link)}")
    return lines


def _link_text(link: MeasuredLink) -> str:
    short, bulk = link.points[0], link.points[-1]
    best = max(link.points, key=lambda point: point.bytes / point.seconds)
    cpu = (
        f", {plain_number(bulk.cpu_s / bulk.bytes * 2**30, 2)} CPU s a GiB" if bulk.cpu_s > 0.02 * bulk.seconds else ""
    )
    return (
        f"{short.seconds * 1e6:.0f} µs for {format_bytes(short.bytes)}, "
        f"{format_bytes(best.bytes / best.seconds)}/s at {format_bytes(best.bytes)}{cpu}"
    )


def _overlap_lines(measured: Measurements) -> list[str]:
    lines = []
    for one in measured.overlaps:
        where = "inside a host" if one.scope == "inside" else "between hosts"
        lines.append(
            f"at once  {where}, {one.ranks} workers: arithmetic {one.compute_s * 1e3:.0f} ms and sums of "
            f"{format_bytes(one.bytes)} {one.communicate_s * 1e3:.0f} ms take {one.both_s * 1e3:.0f} ms together: "
            f"{one.hidden_share:.0%} of the shorter is hidden"
        )
    return lines


def _factors_shown(factors: Mapping[str, float]) -> list[tuple[str, float]]:
    kept = ("product", "product_weight", "attention", "stream", "stream_backward", "head", "update", "copy")
    return [(work, factors[work]) for work in kept if work in factors]


def _sizes_text(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes))


def _range_text(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    least, most = plain_number(low, 2), plain_number(high, 2)
    return least if least == most else f"{least} to {most}"
