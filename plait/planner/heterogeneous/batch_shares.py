"""Unequal shares of a batch for unequal devices: who takes how many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain
from math import ceil

from plait.data.portions import micro_sizes
from plait.layout import equal_share

LEAST_GAIN_OF_UNEQUAL_SHARES = 0.03
"""Of the time, what unequal shares must save at least: less is no evidence that they would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroups:
    """Parts whose ranks meet in the middle of every micro-batch, as many of them one after the other as `size` says.

    They take equally many micro-batches, so that one with fewer sequences computes some in which nothing counts.
    """

    size: int
    limits: tuple[int, ...]
    """Sequences that each part takes at a time, at most."""

    def computed(self, dealt: Sequence[int]) -> tuple[int, ...]:
        """How many sequences' work each part does for its share."""
        groups = [slice(first, first + self.size) for first in range(0, len(dealt), self.size)]
        sizes = chain(*(micro_sizes(tuple(dealt[some]), self.limits[some]) for some in groups))
        return tuple(sum(max(1, size) for size in one) for one in sizes)

    def best(self, count: int, speeds: Sequence[float]) -> tuple[int, ...]:
        """As `shares` deals, by what is computed; one meeting more, which costs messages, must be WORTH it."""
        free = shares_by_speed(count, speeds)
        if self.size == 1:
            return free
        fewest = ceil(count / sum(self.limits))
        most = max(ceil(one / limit) for one, limit in zip(free, self.limits, strict=True))
        capped = [_dealt(count, speeds, [number * limit for limit in self.limits]) for number in range(fewest, most)]
        best, *more = (*capped, free)
        for dealt in more:
            if slowest_s(self.computed(dealt), speeds) < (1 - LEAST_GAIN_OF_UNEQUAL_SHARES) * slowest_s(
                self.computed(best), speeds
            ):
                best = dealt
        return best


def shares_by_speed(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """How `count` sequences are best dealt to parts of these speeds: the last one is done as early as can be.

    Everybody gets one at least; `count` must be as many as there are parts, or more.
    """
    return _dealt(count, speeds, [count] * len(speeds))


def _dealt(count: int, speeds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """The same where no part gets more than its most; all of them together must have room."""
    assert len(speeds) <= count <= sum(most) and min(speeds) > 0, (count, speeds, most)
    given = [min(one, limit) for one, limit in zip(_whole_parts(count, speeds), most, strict=True)]
    queue = [((given[part] + 1) / speed, part) for part, speed in enumerate(speeds) if given[part] < most[part]]
    heapify(queue)
    for _ in range(count - sum(given)):
        part = queue[0][1]
        given[part] += 1
        if given[part] < most[part]:
            heapreplace(queue, ((given[part] + 1) / speeds[part], part))
        else:
            heappop(queue)
    return tuple(given)


def _whole_parts(count: int, speeds: Sequence[float]) -> list[int]:
    """The whole sequences of shares in proportion, once those that come to less than one have got theirs."""
    small: set[int] = set()
    while True:
        rest, speed = count - len(small), sum(s for part, s in enumerate(speeds) if part not in small)
        fewer = {part for part, s in enumerate(speeds) if part not in small and rest * s < speed}
        if not fewer:
            break
        small |= fewer
    return [1 if part in small else int(rest * s / speed) for part, s in enumerate(speeds)]


def equal_shares(count: int, parts: int) -> tuple[int, ...]:
    """As equal as can be: what each part gets where devices are alike."""
    return tuple(equal_share(count, parts, part)[1] for part in range(parts))


def shares_if_worthwhile(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Shares by speed where they end a step earlier by what counts, else equal ones."""
    equal, dealt = equal_shares(count, len(speeds)), shares_by_speed(count, speeds)
    return dealt if slowest_s(dealt, speeds) < (1 - LEAST_GAIN_OF_UNEQUAL_SHARES) * slowest_s(equal, speeds) else equal


def slowest_s(dealt: Sequence[int], speeds: Sequence[float]) -> float:
    """When the last part is done, where speeds are sequences a second."""
    return max(part / speed for part, speed in zip(dealt, speeds, strict=True))
