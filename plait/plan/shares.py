"""Unequal shares of a batch for unequal devices: who takes how many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from plait.layout import share

WORTH = 0.03
"""Of the time, what unequal shares must save at least: less is no evidence that they would."""


def shares(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """How `count` sequences are best dealt to parts of these speeds: the last one is done as early as can be.

    Everybody gets one at least; `count` must be as many as there are parts, or more.
    """
    assert count >= len(speeds) and min(speeds) > 0, (count, speeds)
    given = _whole_parts(count, speeds)
    queue = [((given[part] + 1) / speed, part) for part, speed in enumerate(speeds)]
    heapify(queue)
    for _ in range(count - sum(given)):
        part = queue[0][1]
        given[part] += 1
        heapreplace(queue, ((given[part] + 1) / speeds[part], part))
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
    return tuple(share(count, parts, part)[1] for part in range(parts))


def worthwhile(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Shares by speed where they end a step earlier by what counts, else equal ones."""
    equal, dealt = equal_shares(count, len(speeds)), shares(count, speeds)
    return dealt if last_s(dealt, speeds) < (1 - WORTH) * last_s(equal, speeds) else equal


def last_s(dealt: Sequence[int], speeds: Sequence[float]) -> float:
    """When the last part is done, where speeds are sequences a second."""
    return max(part / speed for part, speed in zip(dealt, speeds, strict=True))
