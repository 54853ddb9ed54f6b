"""What the ranks of a probe report to each other and, through rank 0, to the leader: values that may come from a host
that lies, so each is looked at before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.checked_json import SingleLine, one_line, parse_json, printable, typed_value
from plait.cluster.measured import WORK_SIZES, MeasuredLink, MeasuredOverlap, MessageTiming, WorkTiming
from plait.cluster.probe.verdict import PairTiming, ProbedHost
from plait.errors import PlaitError, RunFailed
from plait.launch.values.job import THREADS_AT_MOST

_T = TypeVar("_T")
_LONGEST_NAME = 255
_LONGEST_S, _SHORTEST_S = 1e6, 1e-12
"""Nothing that a probe times takes longer or less: its ratios stay far from what a float can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """Why a rank's device cannot compute; None where it can."""

    failure: SingleLine | None

    def __post_init__(self) -> None:
        _require(self.failure is None or self.failure.isprintable(), "DeviceCheck.failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadPair:
    """The place in the schedule of a pair whose link is dead; None where all links work."""

    pair: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """The times of messages between two ranks; None where the link is dead."""

    points: tuple[MessageTiming, ...] | None

    def __post_init__(self) -> None:
        if self.points is not None:
            _require_times(self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank's device, and its times while all ranks work and, for the first rank of a host, while it works alone."""

    name: str
    memory_bytes: int
    threads: int
    granted: float
    timed: tuple[WorkTiming, ...]
    alone: tuple[WorkTiming, ...]

    def __post_init__(self) -> None:
        _require(_is_name(self.name), "RankReport.name")
        _require(self.memory_bytes > 0, "RankReport.memory_bytes")
        _require(1 <= self.threads <= THREADS_AT_MOST, "RankReport.threads")
        _require(0 < self.granted <= 1, "RankReport.granted")
        _require(any(one.work.startswith("product") for one in self.timed), "RankReport.timed")
        _require_seconds(self.timed)
        _require_seconds(self.alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """What the first rank of a host found of the groups that it is in."""

    links: tuple[MeasuredLink, ...]
    overlaps: tuple[MeasuredOverlap, ...]

    def __post_init__(self) -> None:
        for link in self.links:
            _require_times(link.points)
        _require(
            all(
                _SHORTEST_S < seconds < _LONGEST_S
                for one in self.overlaps
                for seconds in (one.compute_s, one.communicate_s, one.both_s)
            ),
            "GroupReport.overlaps",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All that was measured, host by host and rank by rank, as rank 0 sends it."""

    hosts: tuple[ProbedHost, ...]
    pairs: tuple[PairTiming, ...]
    ranks: tuple[RankReport, ...]
    links: tuple[MeasuredLink, ...]
    overlaps: tuple[MeasuredOverlap, ...]

    def __post_init__(self) -> None:
        count = len(self.ranks)
        in_order = [rank for host in self.hosts for rank in host.ranks]
        _require(bool(self.ranks) and in_order == list(range(count)), "ProbeResult.hosts")
        _require(all(host.ranks and _is_name(host.name) for host in self.hosts), "ProbeResult.hosts")
        _require(all(0 <= pair.first < pair.second < count for pair in self.pairs), "ProbeResult.pairs")
        for pair in self.pairs:
            _require_times(pair.points)
        for host in self.hosts:  # the ranks of a host time the same pieces
            pieces = [[(one.work, one.sizes) for one in self.ranks[rank].timed] for rank in host.ranks]
            _require(all(one == pieces[0] for one in pieces), "ProbeResult.ranks")
        GroupReport(links=self.links, overlaps=self.overlaps)
        names = {host.name for host in self.hosts}
        _require(all(set(link.hosts) <= names and 2 <= link.ranks <= count for link in self.links), "ProbeResult.links")
        _require(all(2 <= one.ranks <= count for one in self.overlaps), "ProbeResult.overlaps")


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
    except (ValueError, PlaitError) as error:  # the latter from the values of plait.cluster
        raise _refused(where, error) from None


def parse_result(values: Mapping[str, Any]) -> ProbeResult:
    """What rank 0 sent to the leader; raises RunFailed, in one sentence, for what no probe measures."""
    return parse_report(ProbeResult, values, "a host")


def require_all_work(result: ProbeResult) -> None:
    """Raise RunFailed where a rank did not time every kind of work, as a whole probe does."""
    for rank, report in enumerate(result.ranks):
        if lacking := WORK_SIZES.keys() - {one.work for one in report.timed}:
            raise _refused(f"worker {rank}", ValueError(f"no time of {min(lacking)}"))


def _refused(where: str, error: Exception) -> RunFailed:
    why = printable(one_line(str(error).partition(";")[0]))
    return RunFailed(
        f"{where} reported what no probe measures ({why}); install the same commit of plait on all hosts, then probe "
        "again"
    )


def _require_times(points: tuple[MessageTiming, ...]) -> None:
    sizes = [point.bytes for point in points]
    _require(bool(sizes) and sizes == sorted(set(sizes)), "MessageTiming.bytes")
    _require_seconds(points)


def _require_seconds(times: tuple[MessageTiming, ...] | tuple[WorkTiming, ...]) -> None:
    _require(all(_SHORTEST_S < one.seconds < _LONGEST_S for one in times), "the seconds of a piece")


def _is_name(text: str) -> bool:
    return text.isprintable() and len(text) <= _LONGEST_NAME


def _require(fact: bool, what: str) -> None:
    if not fact:
        raise ValueError(f"{what} is not what it should be")
