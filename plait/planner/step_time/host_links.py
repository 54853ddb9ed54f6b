"""Which links between hosts a group of ranks uses, where a probe found some of them to be far slower than others.

Examples are two groups of machines joined by a slow cable, or one machine on Wi-Fi. The cost of a message then depends
on which hosts are neighbours, and so does the best host order (search/host_choice.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.machines.measured import MeasuredLink, Measurements
from plait.planner.problem.candidates import Reals
from plait.planner.step_time.measured_compute import seconds_at_sizes

LEAST_LINK_RATE_RATIO = 1.5
"""How many times faster than the slowest link another must be to count as faster: readings of equal links differ,
too."""

TrafficPattern = Literal["each with each", "each to the next"]
HostPair = frozenset[int]
"""Two hosts, by their positions in the order of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLinks:
    """The measured link between every two hosts."""

    host_of_rank: NDArray[np.int64]
    """Shape [ranks]: position of each rank's host."""
    links: Mapping[HostPair, MeasuredLink]

    def relative_time(self, message_bytes: Reals, group_size: Reals, stride: Reals, pattern: TrafficPattern) -> Reals:
        """Seconds of a message on the slowest link that groups of `group_size` ranks `stride` apart use, divided by its
        seconds on the slowest of all links."""
        found = np.ones(message_bytes.shape)
        slowest = max(self.links.values(), key=_seconds_per_byte)
        for ranks, apart in {(int(n), int(s)) for n, s in zip(group_size.ravel(), stride.ravel(), strict=True)}:
            used = [self.links[pair] for pair in self._host_pairs(ranks, apart, pattern)]
            if used:
                here = (group_size == ranks) & (stride == apart)
                link = max(used, key=_seconds_per_byte)
                found[here] = seconds_at_sizes(link, message_bytes[here]) / seconds_at_sizes(
                    slowest, message_bytes[here]
                )
        return np.minimum(found, 1.0)

    def greedy_host_order(self) -> tuple[int, ...]:
        """The hosts from the first one on, each followed by the one with the fastest link to it."""
        left, order = set(range(1, int(self.host_of_rank.max()) + 1)), [0]
        while left:
            order.append(
                min(left, key=lambda host: (_seconds_per_byte(self.links[frozenset((order[-1], host))]), host))
            )
            left.remove(order[-1])
        return tuple(order)

    def _host_pairs(self, ranks: int, apart: int, pattern: TrafficPattern) -> set[HostPair]:
        """The pairs of hosts between which such groups send; none where they are no groups of all ranks."""
        if ranks < 2 or len(self.host_of_rank) % (ranks * apart):
            return set()
        groups = self.host_of_rank.reshape(-1, ranks, apart).swapaxes(1, 2).reshape(-1, ranks)
        met = (_communicating_pairs(group, pattern) for group in np.unique(groups, axis=0).tolist())
        return {frozenset(pair) for pairs in met for pair in pairs if pair[0] != pair[1]}


def host_links_of(measured: Measurements) -> HostLinks | None:
    """The links between the hosts of a probe; None where they are about equal, or not all measured."""
    places = {device.host: place for place, device in enumerate(measured.devices)}
    ends = [(link, [places[host] for host in link.hosts if host in places]) for link in measured.links]
    timed = {frozenset(pair): link for link, pair in ends if len(pair) == 2 and _is_host_link(link)}
    if len(timed) < 2 or len(timed) < len(places) * (len(places) - 1) // 2:
        return None
    speeds = [_seconds_per_byte(link) for link in timed.values()]
    if max(speeds) < LEAST_LINK_RATE_RATIO * min(speeds):
        return None
    host_of = np.repeat(np.arange(len(places)), [device.workers for device in measured.devices])
    return HostLinks(host_of_rank=host_of, links=timed)


def _is_host_link(link: MeasuredLink) -> bool:
    return link.kind == "send" and link.scope == "between"


def _communicating_pairs(group: Sequence[int], pattern: TrafficPattern) -> Iterable[tuple[int, int]]:
    return pairwise(group) if pattern == "each to the next" else combinations(sorted(set(group)), 2)


def _seconds_per_byte(link: MeasuredLink) -> float:
    return link.points[-1].seconds / link.points[-1].bytes
