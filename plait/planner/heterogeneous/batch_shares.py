"""Sequences per data-parallel rank when devices are unequal: in proportion to speed, where that is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain
from math import ceil

from plait.data.micro_sizes import micro_sizes
from plait.layout import equal_share

LEAST_GAIN_OF_UNEQUAL_SHARES = 0.03
"""Share of the time that unequal shares must save at least; less is no evidence that they would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroups:
    """Data-parallel ranks that gather parameters from each other in every micro-batch: `size` neighbours form a group.

    The ranks of a group compute the same number of micro-batches, so a rank with fewer sequences computes some in which
    no token counts.
    """

    size: int
    limits: tuple[int, ...]
    """Shape [data-parallel degree]: sequences of a micro-batch, at most."""

    def computed(self, assigned: Sequence[int]) -> tuple[int, ...]:
        """Sequences that each rank computes for its share, those without a counted token included."""
        groups = [slice(first, first + self.size) for first in range(0, len(assigned), self.size)]
        sizes = chain(*(micro_sizes(tuple(assigned[some]), self.limits[some]) for some in groups))
        return tuple(sum(max(1, size) for size in one) for one in sizes)

    def best_shares(self, count: int, speeds: Sequence[float]) -> tuple[int, ...]:
        """Shares by speed, counting what ranks compute; one more micro-batch for the whole group, which costs
        messages, must save LEAST_GAIN_OF_UNEQUAL_SHARES."""
        free = shares_by_speed(count, speeds)
        if self.size == 1:
            return free
        fewest = ceil(count / sum(self.limits))
        most = max(ceil(one / limit) for one, limit in zip(free, self.limits, strict=True))
        capped = [
            _capped_shares(count, speeds, [number * limit for limit in self.limits]) for number in range(fewest, most)
        ]
        best, *more = (*capped, free)
        for assigned in more:
            if slowest_s(self.computed(assigned), speeds) < (1 - LEAST_GAIN_OF_UNEQUAL_SHARES) * slowest_s(
                self.computed(best), speeds
            ):
                best = assigned
        return best


def shares_by_speed(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Divide `count` sequences so that the rank that finishes last finishes as early as can be.

    `speeds` are sequences per second; every rank gets at least one sequence, so `count` must not be less than the
    ranks.
    """
    return _capped_shares(count, speeds, [count] * len(speeds))


def _capped_shares(count: int, speeds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Shares by speed, with at most `most` sequences for each rank; the sum of `most` must be at least `count`."""
    assert len(speeds) <= count <= sum(most) and min(speeds) > 0, (count, speeds, most)
    given = [min(one, limit) for one, limit in zip(_rounded_down_shares(count, speeds), most, strict=True)]
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


def _rounded_down_shares(count: int, speeds: Sequence[float]) -> list[int]:
    """Shares in proportion to speed, rounded down, once ranks whose share is below one sequence have got one."""
    small: set[int] = set()
    while True:
        rest, speed = count - len(small), sum(s for part, s in enumerate(speeds) if part not in small)
        fewer = {part for part, s in enumerate(speeds) if part not in small and rest * s < speed}
        if not fewer:
            break
        small |= fewer
    return [1 if part in small else int(rest * s / speed) for part, s in enumerate(speeds)]


def equal_shares(count: int, parts: int) -> tuple[int, ...]:
    """Sequences of each data-parallel rank when all are equally fast: they differ by one at most."""
    return tuple(equal_share(count, parts, part)[1] for part in range(parts))


def shares_if_worthwhile(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Shares by speed where they shorten the step by LEAST_GAIN_OF_UNEQUAL_SHARES, else equal shares."""
    equal, assigned = equal_shares(count, len(speeds)), shares_by_speed(count, speeds)
    return (
        assigned
        if slowest_s(assigned, speeds) < (1 - LEAST_GAIN_OF_UNEQUAL_SHARES) * slowest_s(equal, speeds)
        else equal
    )


def slowest_s(assigned: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds until the last rank is done; speeds are sequences per second."""
    return max(part / speed for part, speed in zip(assigned, speeds, strict=True))
