"""What a probe measured, as values: times of arithmetic and messages, and their JSON; no torch.

Every time is a median over rounds; its `spread` is the distance between the quartiles as a share of the median.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plait.checked_json import parse_json, typed_value
from plait.errors import PlaitError

MEASUREMENTS_FORMAT = 1
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
"""What the numbers in `WorkTiming.sizes` are, for each kind of work."""

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
                f"{self.work} has sizes {list(WORK_SIZES[self.work])}, not {list(self.sizes)}; probe again"
            )
        _must_be(f"seconds of {self.work}", self.seconds, above=0)
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
            raise PlaitError(f"nothing was measured on {self.host}; probe again")
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
        for what in ("bytes", "seconds"):
            _must_be(what, getattr(self, what), above=0)
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
        sizes = [point.bytes for point in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise PlaitError(f"{self.kind} between {' and '.join(self.hosts)} needs sizes that grow; probe again")


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
        for what in ("ranks", "bytes", "compute_s", "communicate_s", "both_s"):
            _must_be(what, getattr(self, what), above=0)

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
            raise PlaitError("a measurement needs at least one device; probe again")

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
        raise PlaitError(f"{where} is not a measurement: {error}; probe again with plait probe --again") from error
    return measurements_from_values(values, where)


def measurements_from_values(values: Any, where: str) -> Measurements:
    """Measurements from plain values; raises PlaitError for anything unexpected, unknown keys included."""
    if not isinstance(values, dict) or values.get("format") != MEASUREMENTS_FORMAT:
        raise PlaitError(f"{where} is not a measurement of this version of plait; probe again with plait probe --again")
    try:
        return typed_value(Measurements, {key: value for key, value in values.items() if key != "format"})
    except ValueError as error:
        raise PlaitError(f"{where}: {error}; probe again with plait probe --again") from None


def _must_be(what: str, value: float, *, above: float | None = None) -> None:
    """Raise PlaitError unless a measured amount is finite and not negative or, with `above`, greater than that."""
    if not (math.isfinite(value) and (value >= 0 if above is None else value > above)):
        raise PlaitError(f"{what} = {value:g} was never measured; probe again with plait probe --again")
