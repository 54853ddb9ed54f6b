"""What a probe measured, as values: times of arithmetic and messages, and their JSON; no torch.

Every time is a median over rounds; its `spread` is the distance between the quartiles as a share of the median.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, prod
from typing import Any, Literal

from plait.checked_json import parse_json, typed_value
from plait.errors import PlaitError
from plait.units import format_bytes, format_si, plain_number

MEASUREMENTS_FORMAT = 1
SHORTEST_S, LONGEST_S = 1e-12, 1e6
"""Nothing that a probe times takes less or longer: ratios stay far from what a float can hold."""
NOISY_SPREAD = 0.25
"""Spread above which the measured times are reported as noisy."""

WorkKind = Literal[
    "product", "product_input", "product_weight", "attention", "attention_backward", "stream", "stream_backward",
    "head", "embedding", "accumulate", "update", "copy", "launch",
]  # fmt: skip
WORK_SIZES: Mapping[WorkKind, tuple[str, ...]] = {
    # Matrix products, rows × inner by inner × columns: forward, gradient of input, of weight.
    "product": ("rows", "inner", "columns"),
    "product_input": ("rows", "inner", "columns"),
    "product_weight": ("rows", "inner", "columns"),
    "attention": ("sequences", "length", "heads", "kv_heads", "head_width"),
    "attention_backward": ("sequences", "length", "heads", "kv_heads", "head_width"),
    # What a layer takes beside its products and attention: norms, rotation, activation, residuals, allocation.
    "stream": ("tokens", "width", "ffn"),
    "stream_backward": ("tokens", "width", "ffn"),
    # Forward and backward in one: the head's products and the loss; looking up an embedding and its gradient.
    "head": ("tokens", "width", "vocabulary"),
    "embedding": ("tokens", "width", "vocabulary"),
    "accumulate": ("numbers",),
    "update": ("numbers", "tensors"),
    "copy": ("bytes",),
    "launch": (),
}
"""The meaning of the numbers in `WorkTiming.sizes`, for each kind of work."""

CommOperation = Literal[
    "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "swap_parts", "spread_own",
]  # fmt: skip
"""The backend's own operations; the last two are what plait does on processors in place of a reduce-scatter and an
all-gather (parallel/collectives.py)."""
LinkScope = Literal["inside", "between"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTiming:
    """Seconds of one piece of work; WORK_SIZES says what its `sizes` are."""

    work: WorkKind
    sizes: tuple[int, ...]
    seconds: float
    spread: float

    def __post_init__(self) -> None:
        if len(self.sizes) != len(WORK_SIZES[self.work]):
            raise PlaitError(
                f"{self.work} has sizes {list(WORK_SIZES[self.work])}, not {list(self.sizes)}", "probe again"
            )
        _must_be_seconds(f"seconds of {self.work}", self.seconds)
        _must_be(f"spread of {self.work}", self.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """One worker of a host: medians over all workers of that host, measured while they ran side by side."""

    host: str
    name: str
    """Name of the processor or GPU."""
    workers: int
    """Number of workers that ran side by side on this host."""
    threads: int
    """Threads of each worker."""
    memory_bytes: int
    timed: tuple[WorkTiming, ...]
    beside: Mapping[str, float]
    """Slowdown for each kind of work: the time while all workers run over the time of one worker alone; empty for a
    single worker."""
    granted: float
    """Share of the wall time during which a worker had its core to itself while it was measured: 1 on a quiet
    machine, and where it is unknown. It is known where workers have one thread each: their times are then processor
    time, without what other programs took."""
    rates: tuple[float, ...]
    """For each worker of the host, its speed at matrix products relative to the fastest worker of all hosts (1.0)."""

    def __post_init__(self) -> None:
        if not self.timed:
            raise PlaitError(f"nothing was measured on {self.host}", "probe again")
        _must_be("granted", self.granted, above=0)
        for work, factor in self.beside.items():
            _must_be(f"the factor of {work} side by side", factor, above=0)

    def times_of(self, work: WorkKind) -> tuple[WorkTiming, ...]:
        """All times that were measured for one kind of work."""
        return tuple(one for one in self.timed if one.work == work)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTiming:
    """Time of a message of one size; `bytes` is the size of the whole buffer that the operation works on."""

    bytes: int
    seconds: float
    spread: float
    cpu_s: float
    """Processor seconds that the rank spent on it, including those of threads that wait."""

    def __post_init__(self) -> None:
        _must_be("bytes", self.bytes, above=0)
        _must_be_seconds("seconds", self.seconds)
        for what in ("spread", "cpu_s"):
            _must_be(what, getattr(self, what))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """One operation among `ranks` ranks, timed over growing sizes."""

    kind: CommOperation
    scope: LinkScope
    """Inside one host or between hosts."""
    hosts: tuple[str, ...]
    ranks: int
    points: tuple[MessageTiming, ...]

    def __post_init__(self) -> None:
        check_growing(f"{self.kind} between {' and '.join(self.hosts)}", self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOverlap:
    """Seconds of arithmetic alone, of an all-reduce over `ranks` ranks alone, and of both at once."""

    scope: LinkScope
    ranks: int
    bytes: int
    compute_s: float
    communicate_s: float
    both_s: float

    def __post_init__(self) -> None:
        for what in ("ranks", "bytes"):
            _must_be(what, getattr(self, what), above=0)
        for what in ("compute_s", "communicate_s", "both_s"):
            _must_be_seconds(what, getattr(self, what))

    @property
    def hidden_share(self) -> float:
        """Share of the shorter one that is hidden behind the other: 1 all of it, 0 none."""
        saved = self.compute_s + self.communicate_s - self.both_s
        return min(1.0, max(0.0, saved / min(self.compute_s, self.communicate_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All results of one probe."""

    date: str
    precision: str
    workers: int
    """Number of workers on all hosts."""
    fingerprint: str
    """Fingerprint of machines, software and request; where it differs, a new probe is needed."""
    devices: tuple[MeasuredDevice, ...]
    links: tuple[MeasuredLink, ...]
    overlaps: tuple[MeasuredOverlap, ...]
    complaints: tuple[str, ...]
    """One sentence for each device or link that is far slower than others of its kind."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlaitError("a measurement needs at least one device", "probe again")

    @property
    def upper_quartile_spread(self) -> float:
        """The upper quartile of all spreads: how far to trust the times."""
        spreads = [one.spread for device in self.devices for one in device.timed]
        spreads += [point.spread for link in self.links for point in link.points]
        return sorted(spreads)[int(0.75 * (len(spreads) - 1))]

    @property
    def noise_warning(self) -> str:
        """A warning where the times spread too much; empty where they do not."""
        if self.upper_quartile_spread <= NOISY_SPREAD:
            return ""
        return (
            f"the figures spread by {self.upper_quartile_spread:.0%}, though medians count: other programs were running"
        )


def measurements_as_values(measured: Measurements) -> dict[str, Any]:
    """Plain values for JSON, with the format's number."""
    return {"format": MEASUREMENTS_FORMAT, **asdict(measured)}


def measurements_json(measured: Measurements) -> str:
    """The text from which `measurements_from_json` reads the same value."""
    return json.dumps(measurements_as_values(measured), indent=1, ensure_ascii=False) + "\n"


def measurements_from_json(text: str | bytes, where: str) -> Measurements:
    """Read the text of a measurement; `where` names it in errors."""
    try:
        values = parse_json(text, constants="kept")  # the sentence below names the key
    except ValueError as error:
        raise PlaitError(f"{where} is not a measurement: {error}", "probe again with plait probe --again") from error
    return measurements_from_values(values, where)


def measurements_from_values(values: Any, where: str) -> Measurements:
    """Measurements from plain values; raises PlaitError for anything unexpected, unknown keys included."""
    if not isinstance(values, dict) or values.get("format") != MEASUREMENTS_FORMAT:
        raise PlaitError(
            f"{where} is not a measurement of this version of plait", "probe again with plait probe --again"
        )
    try:
        return typed_value(Measurements, {key: value for key, value in values.items() if key != "format"})
    except ValueError as error:
        raise PlaitError(f"{where}: {error}", "probe again with plait probe --again") from None


def check_growing(what: str, points: Sequence[MessageTiming]) -> None:
    """Raise PlaitError unless messages of growing sizes were timed."""
    sizes = [point.bytes for point in points]
    if not sizes or sizes != sorted(set(sizes)):
        raise PlaitError(f"{what} needs message sizes that grow", "probe again")


def _must_be_seconds(what: str, seconds: float) -> None:
    if not SHORTEST_S <= seconds < LONGEST_S:
        raise PlaitError(f"{what} = {seconds:g} was never measured", "probe again with plait probe --again")


def _must_be(what: str, value: float, *, above: float | None = None) -> None:
    """Raise PlaitError unless a measured amount is finite and not negative or, with `above`, greater than that."""
    if not (math.isfinite(value) and (value >= 0 if above is None else value > above)):
        raise PlaitError(f"{what} = {value:g} was never measured", "probe again with plait probe --again")


# What a worker's processor was measured to reach with a model's matrix products, by library and precision.


Arithmetic = Literal["default", "onednn", "bf16"]
"""float32 products by torch's default library or by oneDNN, and products of bfloat16 numbers."""
_MOST_FLOPS = 1e18
"""No processor is near it: what says more was made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """Speed and error of a model's matrix products on one worker in one arithmetic."""

    flops: float
    """FLOP/s over the products of a training micro-batch, an evaluated sequence and a ragged one."""
    error: float
    """Largest relative error against float64, in the Frobenius norm."""
    error_ratio: float
    """Largest ratio of an error to that of the default library, on the same numbers."""

    def __post_init__(self) -> None:
        if not (1 <= self.flops <= _MOST_FLOPS and 0 <= self.error < inf and 0 <= self.error_ratio < inf):
            raise ValueError("no processor multiplies at such a rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRates:
    """The rates of one worker; an arithmetic that is not there has none."""

    machine: str
    """Digest of the worker's machine."""
    workers: int
    """How many such workers fill the machine's cores."""
    library: str
    """The common name of the default library: MKL on x86."""
    rates: Mapping[Arithmetic, ProductRate]

    def __post_init__(self) -> None:
        if self.workers < 1 or "default" not in self.rates:
            raise ValueError("a worker has a default library, and at least one fills a machine")

    def gain(self, arithmetic: Arithmetic, over: Arithmetic = "default") -> float:
        """How many times as fast one arithmetic is as another; 0 where it is not there."""
        return self.rates[arithmetic].flops / self.rates[over].flops if arithmetic in self.rates else 0.0

    def to_values(self) -> dict[str, Any]:
        """The rates as JSON values."""
        return asdict(self)

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> ProductRates:
        """The rates that a worker sent; raises ValueError for anything else."""
        return typed_value(ProductRates, values)


# Measurements as a text table for people.


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
    copies = sorted(device.times_of("copy"), key=lambda one: one.sizes)
    rates = [f"{format_bytes(2 * one.sizes[0] / one.seconds)}/s ({format_bytes(one.sizes[0])})" for one in copies]
    return ", ".join(rates)


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
