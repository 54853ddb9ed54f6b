"""Which of the links between neighbouring ranks is the slow one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

LINK_FACTOR = 1.5
"""A slow link takes this many times as long as the faster half of the links."""


def slow_link_ends(took_s: Sequence[float], hosts: Sequence[str]) -> list[int]:
    """The two ranks at the ends of the slow link, the one rank whose host has two slow links, or none if it is unclear.

    `took_s` holds the seconds of a message to each rank from the previous one. Links inside a host are not
    compared with those between hosts.
    """
    count = len(took_s)
    links = [rank for rank in range(count) if hosts[rank] != hosts[rank - 1]] or list(range(count))
    if len(links) == 2:
        return sorted([(links[0] - 1) % count, links[0]])
    if min(took_s[rank] for rank in links) <= 0:
        return []
    usual_s = median(sorted(took_s[rank] for rank in links)[: len(links) // 2 + 1])
    slow = [at for at, rank in enumerate(links) if took_s[rank] > LINK_FACTOR * usual_s]
    if len(slow) == 1:
        rank = links[slow[0]]
        return sorted([(rank - 1) % count, rank])
    # A message reaches a host and leaves it over both ends of one cable.
    both = [links[at] for at in slow if (at + 1) % len(links) in slow]
    return both if len(both) == 1 and len(slow) == 2 else []
