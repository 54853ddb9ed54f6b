"""What a probe measured, as values: times of arithmetic and messages, and their JSON; no torch.

Every time is a median over rounds, with `spread`, the distance between its quartiles as a share of it.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from plait.cluster.described import check_keys
from plait.errors import PlaitError

MEASURED_FORMAT = 1
NOISY_SPREAD = 0.25
"""Spread of the figures from which on they are doubted."""

MeasuredWork = Literal[
    "product", "product_input", "product_weight", "attention", "attention_backward", "stream", "stream_backward",
    "head", "embedding", "accumulate", "update", "copy", "launch",
]  # fmt: skip
WORK_SIZES: Mapping[MeasuredWork, tuple[str, ...]] = {
    # Products as they are multiplied, rows × inner by inner × columns: forward, gradient of input, of weight.
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
"""What the sizes of each kind of work are."""

MessageKind = Literal[
    "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "swap_parts", "spread_own",
]  # fmt: skip
"""The backend's own operations; the last two are what plait does on processors in place of a reduce-scatter and an
all-gather (parallel/comm/collectives.py)."""
Scope = Literal["inside", "between"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of one piece of work; `sizes` as SIZES says."""

    work: MeasuredWork
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
    """One worker of a host, as the median of all workers of that host while they ran side by side."""

    host: str
    name: str
    """Name of the processor or GPU."""
    workers: int
    """That ran side by side on this host."""
    threads: int
    """Threads of each worker."""
    memory_bytes: int
    timed: tuple[Timed, ...]
    beside: Mapping[str, float]
    """By kind of work, the time with all workers at once over the time of one alone; empty for a single worker."""
    granted: float
    """Share of the wall time in which its core was its own while it was measured: 1 on a quiet machine, and where it
    is unknown. It is known where workers have one thread each: times are processor time then, without what other
    programs took."""
    rates: tuple[float, ...]
    """For each worker of the host, its speed at products over that of the fastest worker of all hosts."""

    def __post_init__(self) -> None:
        if not self.timed:
            raise PlaitError(f"nothing was measured on {self.host}; probe again")
        _must_be("granted", self.granted, above=0)
        for work, factor in self.beside.items():
            _must_be(f"the factor of {work} side by side", factor, above=0)

    def of(self, work: MeasuredWork) -> tuple[Timed, ...]:
        """All that was measured of one kind of work."""
        return tuple(one for one in self.timed if one.work == work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size of a message: the whole buffer that the operation is about, in bytes."""

    bytes: int
    seconds: float
    spread: float
    cpu_s: float
    """Processor time that the rank spent on it, waiting threads included."""

    def __post_init__(self) -> None:
        for what in ("bytes", "seconds"):
            _must_be(what, getattr(self, what), above=0)
        for what in ("spread", "cpu_s"):
            _must_be(what, getattr(self, what))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """One operation between a number of ranks, timed over growing sizes."""

    kind: MessageKind
    scope: Scope
    """Inside one host or between hosts."""
    hosts: tuple[str, ...]
    ranks: int
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        sizes = [point.bytes for point in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise PlaitError(f"{self.kind} between {' and '.join(self.hosts)} needs sizes that grow; probe again")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOverlap:
    """Arithmetic alone, a sum over ranks alone, and both at once."""

    scope: Scope
    ranks: int
    bytes: int
    compute_s: float
    communicate_s: float
    both_s: float

    def __post_init__(self) -> None:
        for what in ("ranks", "bytes", "compute_s", "communicate_s", "both_s"):
            _must_be(what, getattr(self, what), above=0)

    @property
    def hidden(self) -> float:
        """Share of the shorter one that disappears behind the other: 1 all of it, 0 none."""
        saved = self.compute_s + self.communicate_s - self.both_s
        return min(1.0, max(0.0, saved / min(self.compute_s, self.communicate_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that one probe found out."""

    date: str
    precision: str
    workers: int
    """Workers of all hosts."""
    fingerprint: str
    """Fingerprint of machines, software and request; with another one, a new probe is needed."""
    devices: tuple[MeasuredDevice, ...]
    links: tuple[MeasuredLink, ...]
    overlaps: tuple[MeasuredOverlap, ...]
    complaints: tuple[str, ...]
    """Devices and links that are far slower than their like, a sentence each."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlaitError("a measurement needs at least one device; probe again")

    @property
    def unsteady(self) -> float:
        """The upper quartile of all spreads: how far to trust the figures."""
        spreads = [one.spread for device in self.devices for one in device.timed]
        spreads += [point.spread for link in self.links for point in link.points]
        return sorted(spreads)[int(0.75 * (len(spreads) - 1))]

    @property
    def noise(self) -> str:
        """What is to be said where the figures spread too far; empty where they do not."""
        if self.unsteady <= NOISY_SPREAD:
            return ""
        return f"the figures spread by {self.unsteady:.0%}, though medians count: other programs were running"


def measured_values(measured: Measurements) -> dict[str, Any]:
    """Plain values for JSON."""
    return {"format": MEASURED_FORMAT, **asdict(measured)}


def measured_json(measured: Measurements) -> str:
    """The text that `measured_from_json` reads back as the same value."""
    return json.dumps(measured_values(measured), indent=1, ensure_ascii=False) + "\n"


def measured_from_json(text: str, where: str) -> Measurements:
    """Read the text of a measurement; `where` names it in errors."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise PlaitError(f"{where} is not JSON ({error}); probe again with plait probe --again") from error
    return measured_from(values, where)


def measured_from(values: Any, where: str) -> Measurements:
    """Measurements from plain values; raises PlaitError for anything unexpected, unknown keys included."""
    if not isinstance(values, dict) or values.get("format") != MEASURED_FORMAT:
        raise PlaitError(f"{where} is not a measurement of this version of plait; probe again with plait probe --again")
    return _read(Measurements, {key: value for key, value in values.items() if key != "format"}, where)


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of the annotated type from plain JSON."""
    if isinstance(kind, type) and kind.__module__ == __name__:
        names = {field.name for field in fields(kind)}
        check_keys(value, names, set(), where)
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints[name], value[name], f"{where}: {name}") for name in names})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], one, f"{where} {number}") for number, one in enumerate(value, 1))
    if origin is Mapping and isinstance(value, dict):
        return {str(key): _read(inner[1], one, f"{where}: {key}") for key, one in value.items()}
    if not _fits(kind, origin, inner, value):
        raise PlaitError(f"{where} = {json.dumps(value)[:80]} does not fit; probe again with plait probe --again")
    return float(value) if kind is float else value


def _fits(kind: Any, origin: Any, inner: tuple[Any, ...], value: Any) -> bool:
    if origin is Literal:
        return value in inner
    if isinstance(value, bool) or origin in (tuple, Mapping, Union, types.UnionType):
        return False
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _must_be(what: str, value: float, *, above: float | None = None) -> None:
    """Raises PlaitError unless a measured amount is finite and positive, or above a limit."""
    if not (math.isfinite(value) and (value >= 0 if above is None else value > above)):
        raise PlaitError(f"{what} = {value:g} was never measured; probe again with plait probe --again")
