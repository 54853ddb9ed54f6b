"""Combines the results of a probe's ranks into the values of `Measurements`, and writes sentences about devices and
links that are far slower than others of their kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.cluster.measured import MeasuredDevice, MeasuredLink, MessageTiming, WorkKind, WorkTiming
from plait.cluster.topology import make_names_unique

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
