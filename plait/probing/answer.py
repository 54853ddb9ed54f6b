"""What the ranks of a probe report to each other and, through rank 0, to the leader: values that may come from a host
that lies, so each is looked at before it is used."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.checked_json import SingleLine, one_line, parse_json, printable, typed_value
from plait.errors import PlaitError, RunFailed
from plait.launch.values.job import THREADS_AT_MOST
from plait.machines.machine import make_names_unique
from plait.machines.measured import (
    WORK_SIZES,
    MeasuredDevice,
    MeasuredLink,
    MeasuredOverlap,
    MessageTiming,
    WorkKind,
    WorkTiming,
    check_growing,
)

_T = TypeVar("_T")
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Why a device cannot compute, or which link is dead, in words; None where all is well."""

    failure: SingleLine | None

    def __post_init__(self) -> None:
        _require(self.failure is None or self.failure.isprintable(), "FailureReport.failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """The times of messages between two ranks; None where the link is dead."""

    points: tuple[MessageTiming, ...] | None

    def __post_init__(self) -> None:
        if self.points is not None:
            check_growing("a link", self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank's device, and its times while all ranks work and, for the first rank of a host, while it works alone; and
    what it found of collectives."""

    name: str
    memory_bytes: int
    threads: int
    granted: float
    timed: tuple[WorkTiming, ...]
    alone: tuple[WorkTiming, ...]
    links: tuple[MeasuredLink, ...]
    """Links of the groups in which this rank is the first of its host; the first host reports those between hosts."""
    overlaps: tuple[MeasuredOverlap, ...]

    def __post_init__(self) -> None:
        _require(_is_name(self.name), "RankReport.name")
        _require(self.memory_bytes > 0, "RankReport.memory_bytes")
        _require(1 <= self.threads <= THREADS_AT_MOST, "RankReport.threads")
        _require(0 < self.granted <= 1, "RankReport.granted")
        _require(any(one.work.startswith("product") for one in self.timed), "RankReport.timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All that was measured, host by host and rank by rank, as rank 0 sends it."""

    hosts: tuple[ProbedHost, ...]
    pairs: tuple[PairTiming, ...]
    ranks: tuple[RankReport, ...]

    def __post_init__(self) -> None:
        count = len(self.ranks)
        in_order = [rank for host in self.hosts for rank in host.ranks]
        _require(bool(self.ranks) and in_order == list(range(count)), "ProbeResult.hosts")
        _require(all(host.ranks and _is_name(host.name) for host in self.hosts), "ProbeResult.hosts")
        _require(all(0 <= pair.first < pair.second < count for pair in self.pairs), "ProbeResult.pairs")
        for host in self.hosts:  # the ranks of a host time the same pieces
            pieces = [[(one.work, one.sizes) for one in self.ranks[rank].timed] for rank in host.ranks]
            _require(all(one == pieces[0] for one in pieces), "ProbeResult.ranks")
        names = {host.name for host in self.hosts}
        _require(all(set(link.hosts) <= names and 2 <= link.ranks <= count for link in self.links), "ProbeResult.links")
        _require(all(2 <= one.ranks <= count for one in self.overlaps), "ProbeResult.overlaps")

    @property
    def links(self) -> tuple[MeasuredLink, ...]:
        """The collectives, host by host."""
        return tuple(link for rank in self.ranks for link in rank.links)

    @property
    def overlaps(self) -> tuple[MeasuredOverlap, ...]:
        """The overlaps, host by host."""
        return tuple(overlap for rank in self.ranks for overlap in rank.overlaps)


def read_report(kind: type[_T], data: bytes, where: str) -> _T:
    """What a rank published as JSON, as the value that it must be; raises RunFailed, which names it by `where`."""
    try:
        return parse_report(kind, parse_json(data), where)
    except ValueError as error:
        raise _refused(where, error) from None


def parse_report(kind: type[_T], values: Any, where: str) -> _T:
    """What a rank reported, as the value that it must be; raises RunFailed, which names the rank by `where`."""
    try:
        return typed_value(kind, values)
    except (ValueError, PlaitError) as error:  # the latter from the values of machines/measured.py
        raise _refused(where, error) from None


def parse_result(values: Mapping[str, Any]) -> ProbeResult:
    """The report of rank 0 to the leader; raises RunFailed, in one sentence, for values that no probe measures."""
    return parse_report(ProbeResult, values, "a host")


def require_all_work(result: ProbeResult) -> None:
    """Raise RunFailed where a rank did not time every kind of work, as a whole probe does."""
    for rank, report in enumerate(result.ranks):
        if lacking := WORK_SIZES.keys() - {one.work for one in report.timed}:
            raise _refused(f"worker {rank}", ValueError(f"no time of {min(lacking)}"))


def _refused(where: str, error: Exception) -> RunFailed:
    why = printable(one_line(error.cause if isinstance(error, PlaitError) else str(error)))
    return RunFailed(
        f"{where} reported what no probe measures ({why}); install the same commit of plait on all hosts, then probe "
        "again"
    )


def _is_name(text: str) -> bool:
    return text.isprintable() and len(text) <= _LONGEST_NAME


def _require(fact: bool, what: str) -> None:
    if not fact:
        raise ValueError(f"{what} is invalid")


# Combines the results of a probe's ranks into the values of `Measurements`, and writes sentences about devices and
# links that are far slower than others of their kind.


SLOW_FACTOR = 10.0
"""A device or link that is slower than the best of its kind by this factor gets a sentence."""
_PRODUCTS: tuple[WorkKind, ...] = ("product", "product_input", "product_weight")

_LAYER: Mapping[WorkKind, tuple[WorkKind, ...]] = {
    "stream": ("product", "attention", "stream"),
    "stream_backward": ("product_input", "product_weight", "attention_backward", "stream_backward"),
}
"""The kinds of work in a layer's forward pass and in its backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedHost:
    """One host of a probe: its name, unique among all hosts, and its ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTiming:
    """Message times between two ranks."""

    first: int
    second: int
    points: tuple[MessageTiming, ...]

    def __post_init__(self) -> None:
        check_growing(f"the link from worker {self.first} to worker {self.second}", self.points)


def group_ranks_by_host(hosts_of_ranks: Sequence[tuple[str, int]]) -> tuple[ProbedHost, ...]:
    """The hosts, from each rank's (host name, local rank); equal names get a number."""
    starts = [rank for rank, (_, local_rank) in enumerate(hosts_of_ranks) if local_rank == 0]
    names = make_names_unique([hosts_of_ranks[start][0] for start in starts])
    ranks = [tuple(range(start, end)) for start, end in zip(starts, [*starts[1:], len(hosts_of_ranks)], strict=True)]
    return tuple(ProbedHost(name=name, ranks=some) for name, some in zip(names, ranks, strict=True))


def host_with_rank(hosts: Sequence[ProbedHost], rank: int) -> ProbedHost:
    """The host that has this rank."""
    return next(host for host in hosts if rank in host.ranks)


def median_times(times: Sequence[Sequence[WorkTiming]]) -> tuple[WorkTiming, ...]:
    """Medians over what several equal ranks measured; all list the same work in the same order."""
    return tuple(
        WorkTiming(
            work=same[0].work,
            sizes=same[0].sizes,
            seconds=statistics.median(one.seconds for one in same),
            spread=statistics.median(one.spread for one in same),
        )
        for same in zip(*times, strict=True)
    )


def slowdown_side_by_side(together: Sequence[WorkTiming], alone: Sequence[WorkTiming]) -> dict[str, float]:
    """How many times as long each kind of work takes while all workers of the host run, on the rank that ran both ways.

    What a layer takes besides its parts is a small difference of long times, too uncertain for a ratio of its own: it
    gets the ratio of all of the layer's pieces together.
    """
    known = {(one.work, one.sizes): one.seconds for one in together}
    sums: dict[str, tuple[float, float]] = {}
    for one in alone:
        if (one.work, one.sizes) in known:
            beside_s, alone_s = sums.get(one.work, (0.0, 0.0))
            sums[one.work] = beside_s + known[one.work, one.sizes], alone_s + one.seconds
    factors = {work: beside_s / alone_s for work, (beside_s, alone_s) in sums.items()}
    for rest, pieces in _LAYER.items():
        there = [sums[work] for work in pieces if work in sums]
        if rest in sums:
            factors[rest] = sum(beside_s for beside_s, _ in there) / sum(alone_s for _, alone_s in there)
    return factors


def relative_speeds(times_by_rank: Mapping[int, Sequence[WorkTiming]]) -> dict[int, float]:
    """Each rank's speed at matrix products, relative to the fastest rank (1.0)."""
    logs = {
        rank: statistics.fmean(math.log(one.seconds) for one in timed if one.work in _PRODUCTS)
        for rank, timed in times_by_rank.items()
    }
    best = min(logs.values())
    return {rank: math.exp(best - value) for rank, value in logs.items()}


def slowest_pair_points(host: ProbedHost, pairs: Sequence[PairTiming]) -> tuple[MessageTiming, ...] | None:
    """The points of the host's slowest pair, for which a ring waits; None where the host has one rank."""
    inside = [pair for pair in pairs if pair.first in host.ranks and pair.second in host.ranks]
    return max(inside, key=lambda pair: _bulk_s_per_byte(pair.points)).points if inside else None


def pair_links(hosts: Sequence[ProbedHost], pairs: Sequence[PairTiming]) -> tuple[MeasuredLink, ...]:
    """Measured sends: the slowest pair inside each host, and each pair between two hosts."""
    links = []
    for host in hosts:
        if points := slowest_pair_points(host, pairs):
            links.append(MeasuredLink(kind="send", scope="inside", hosts=(host.name,), ranks=2, points=points))
    for pair in pairs:
        ends = host_with_rank(hosts, pair.first), host_with_rank(hosts, pair.second)
        if ends[0] != ends[1]:
            names = (ends[0].name, ends[1].name)
            links.append(MeasuredLink(kind="send", scope="between", hosts=names, ranks=2, points=pair.points))
    return tuple(links)


def find_slow_parts(
    hosts: Sequence[ProbedHost], speeds: Mapping[int, float], pairs: Sequence[PairTiming]
) -> tuple[str, ...]:
    """One sentence for each device or link that is at least ten times slower than the best of its kind."""
    sentences = []
    for rank, speed in speeds.items():
        if speed * SLOW_FACTOR <= 1:
            sentences.append(
                f"the device of worker {rank} on {host_with_rank(hosts, rank).name} computes {1 / speed:.0f} times "
                "slower than the fastest; look whether other programs use it, whether it is too hot or its power is "
                "limited"
            )
    inside = [pair for pair in pairs if host_with_rank(hosts, pair.first) == host_with_rank(hosts, pair.second)]
    between = [pair for pair in pairs if pair not in inside]
    return (*sentences, *_slow_links(hosts, inside), *_slow_links(hosts, between))


def dead_link_sentence(hosts: Sequence[ProbedHost], first: int, second: int) -> str:
    """The sentence for two ranks of which one does not answer the other."""
    ends = [f"worker {rank} on {host_with_rank(hosts, rank).name}" for rank in (first, second)]
    return (
        f"the link between {ends[0]} and {ends[1]} is dead: a message did not arrive in time; check the cable, "
        "the firewall and the address that the hosts know each other by, then probe again"
    )


def dead_device_sentence(hosts: Sequence[ProbedHost], rank: int, reason: str) -> str:
    """The sentence for a device that cannot compute."""
    return (
        f"the device of worker {rank} on {host_with_rank(hosts, rank).name} is dead: {reason}; take it out, or restart "
        "its host, then probe again"
    )


def _slow_links(hosts: Sequence[ProbedHost], like: Sequence[PairTiming]) -> list[str]:
    sentences = []
    for what, of in (("each byte takes", _bulk_s_per_byte), ("a short message takes", _short_s)):
        best = min((of(pair.points) for pair in like), default=0.0)
        for pair in like:
            factor = of(pair.points) / best
            if factor >= SLOW_FACTOR:
                ends = [f"worker {rank} on {host_with_rank(hosts, rank).name}" for rank in (pair.first, pair.second)]
                sentences.append(
                    f"between {ends[0]} and {ends[1]} {what} {factor:.0f} times as long as on the best link of its "
                    "kind; check its cable, its port and what else runs through it"
                )
    return sentences


def _bulk_s_per_byte(points: Sequence[MessageTiming]) -> float:
    """Seconds per byte of the largest message."""
    return points[-1].seconds / points[-1].bytes


def _short_s(points: Sequence[MessageTiming]) -> float:
    return points[0].seconds


def measured_device(
    host: ProbedHost,
    name: str,
    times_by_rank: Mapping[int, Sequence[WorkTiming]],
    alone: Sequence[WorkTiming],
    *,
    granted: float,
    threads: int,
    memory_bytes: int,
) -> MeasuredDevice:
    """A host's measured device, from the times of its ranks; `alone` is what its first rank measured by itself."""
    speeds = relative_speeds(times_by_rank)
    return MeasuredDevice(
        host=host.name,
        name=name,
        workers=len(host.ranks),
        threads=threads,
        memory_bytes=memory_bytes,
        timed=median_times([times_by_rank[rank] for rank in host.ranks]),
        beside=slowdown_side_by_side(times_by_rank[host.ranks[0]], alone),
        granted=granted,
        rates=tuple(speeds[rank] for rank in host.ranks),
    )
