"""From the results of a probe's ranks to one measurement, and to sentences about devices and links far slower than
their like."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.cluster.measured import MeasuredDevice, MeasuredLink, MeasuredWork, Point, Timed
from plait.cluster.topology import numbered_names

SLOW_FACTOR = 10.0
"""A device or link that is slower than the best of its kind by this factor gets a sentence."""
_PRODUCTS: tuple[MeasuredWork, ...] = ("product", "product_input", "product_weight")

_LAYER: Mapping[MeasuredWork, tuple[MeasuredWork, ...]] = {
    "stream": ("product", "attention", "stream"),
    "stream_backward": ("product_input", "product_weight", "attention_backward", "stream_backward"),
}
"""The pieces of a layer's forward and backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedHost:
    """One host of a probe: its name, unique among all hosts, and its ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReading:
    """What two ranks found between them."""

    first: int
    second: int
    points: tuple[Point, ...]


def hosts_of(hosts_of_ranks: Sequence[tuple[str, int]]) -> tuple[ProbedHost, ...]:
    """Hosts from each rank's (host name, local rank); equal names get a number."""
    starts = [rank for rank, (_, local_rank) in enumerate(hosts_of_ranks) if local_rank == 0]
    names = numbered_names([hosts_of_ranks[start][0] for start in starts])
    ranks = [tuple(range(start, end)) for start, end in zip(starts, [*starts[1:], len(hosts_of_ranks)], strict=True)]
    return tuple(ProbedHost(name=name, ranks=some) for name, some in zip(names, ranks, strict=True))


def host_of(hosts: Sequence[ProbedHost], rank: int) -> ProbedHost:
    """The host that has this rank."""
    return next(host for host in hosts if rank in host.ranks)


def median_times(times: Sequence[Sequence[Timed]]) -> tuple[Timed, ...]:
    """What several equal ranks measured, as their medians; all list the same work in the same order."""
    return tuple(
        Timed(
            work=same[0].work,
            sizes=same[0].sizes,
            seconds=statistics.median(one.seconds for one in same),
            spread=statistics.median(one.spread for one in same),
        )
        for same in zip(*times, strict=True)
    )


def slowdown_side_by_side(together: Sequence[Timed], alone: Sequence[Timed]) -> dict[str, float]:
    """By kind of work: how much longer it takes while all workers of the host run, on the rank that ran both ways.

    What a layer takes beside its parts is a small difference of long times, too uncertain for a ratio of its own: it
    gets that of the layer's pieces together.
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


def relative_speeds(times_by_rank: Mapping[int, Sequence[Timed]]) -> dict[int, float]:
    """Each rank's speed at products, as a share of the fastest rank's."""
    logs = {
        rank: statistics.fmean(math.log(one.seconds) for one in timed if one.work in _PRODUCTS)
        for rank, timed in times_by_rank.items()
    }
    best = min(logs.values())
    return {rank: math.exp(best - value) for rank, value in logs.items()}


def slowest_pair(host: ProbedHost, pairs: Sequence[PairReading]) -> tuple[Point, ...] | None:
    """The points of the host's slowest pair: a ring waits for it; None where it has one rank."""
    inside = [pair for pair in pairs if pair.first in host.ranks and pair.second in host.ranks]
    return max(inside, key=lambda pair: _bulk_s_per_byte(pair.points)).points if inside else None


def pair_links(hosts: Sequence[ProbedHost], pairs: Sequence[PairReading]) -> tuple[MeasuredLink, ...]:
    """Sends: for each host inside it, for each two hosts between them."""
    links = []
    for host in hosts:
        if points := slowest_pair(host, pairs):
            links.append(MeasuredLink(kind="send", scope="inside", hosts=(host.name,), ranks=2, points=points))
    for pair in pairs:
        ends = host_of(hosts, pair.first), host_of(hosts, pair.second)
        if ends[0] != ends[1]:
            names = (ends[0].name, ends[1].name)
            links.append(MeasuredLink(kind="send", scope="between", hosts=names, ranks=2, points=pair.points))
    return tuple(links)


def complaints(
    hosts: Sequence[ProbedHost], speeds: Mapping[int, float], pairs: Sequence[PairReading]
) -> tuple[str, ...]:
    """Devices and links ten times slower than the best of their like, a sentence each."""
    sentences = []
    for rank, speed in speeds.items():
        if speed * SLOW_FACTOR <= 1:
            sentences.append(
                f"the device of worker {rank} on {host_of(hosts, rank).name} computes {1 / speed:.0f} times slower "
                "than the fastest; look whether other programs use it, whether it is too hot or its power is limited"
            )
    inside = [pair for pair in pairs if host_of(hosts, pair.first) == host_of(hosts, pair.second)]
    between = [pair for pair in pairs if pair not in inside]
    return (*sentences, *_slow_links(hosts, inside), *_slow_links(hosts, between))


def dead_link_sentence(hosts: Sequence[ProbedHost], first: int, second: int) -> str:
    """The sentence for two ranks of which one does not answer the other."""
    ends = [f"worker {rank} on {host_of(hosts, rank).name}" for rank in (first, second)]
    return (
        f"the link between {ends[0]} and {ends[1]} is dead: a message did not arrive in time; check the cable, "
        "the firewall and the address that the hosts know each other by, then probe again"
    )


def dead_device_sentence(hosts: Sequence[ProbedHost], rank: int, reason: str) -> str:
    """The sentence for a device that cannot compute."""
    return (
        f"the device of worker {rank} on {host_of(hosts, rank).name} is dead: {reason}; take it out, or restart its "
        "host, then probe again"
    )


def _slow_links(hosts: Sequence[ProbedHost], like: Sequence[PairReading]) -> list[str]:
    sentences = []
    for what, of in (("each byte takes", _bulk_s_per_byte), ("a short message takes", _short_s)):
        best = min((of(pair.points) for pair in like), default=0.0)
        for pair in like:
            factor = of(pair.points) / best
            if factor >= SLOW_FACTOR:
                ends = [f"worker {rank} on {host_of(hosts, rank).name}" for rank in (pair.first, pair.second)]
                sentences.append(
                    f"between {ends[0]} and {ends[1]} {what} {factor:.0f} times as long as on the best link of its "
                    "kind; check its cable, its port and what else runs through it"
                )
    return sentences


def _bulk_s_per_byte(points: Sequence[Point]) -> float:
    """Of the largest message."""
    return points[-1].seconds / points[-1].bytes


def _short_s(points: Sequence[Point]) -> float:
    return points[0].seconds


def device_of(
    host: ProbedHost,
    name: str,
    times_by_rank: Mapping[int, Sequence[Timed]],
    alone: Sequence[Timed],
    *,
    granted: float,
    threads: int,
    memory_bytes: int,
) -> MeasuredDevice:
    """A host's figures from those of its ranks; `alone` is what its first rank measured by itself."""
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
