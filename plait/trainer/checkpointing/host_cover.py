"""Which parts of the state a rank copies besides those that it owns, so that each host's copies hold all that its ranks
need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

PartPlace = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A rectangle of a global tensor: the tensor's name, offset and extent."""


def covers(place: PartPlace, parts: Sequence[PartPlace], disjoint: Sequence[PartPlace]) -> bool:
    """Whether one of the `parts` holds a rectangle, or the `disjoint` ones, which never overlap, do so together."""
    if any(_overlap(place, part) == prod(place[2]) for part in (*parts, *disjoint)):
        return True
    return sum(_overlap(place, part) for part in disjoint) == prod(place[2])


def kept_beside(own: Sequence[Sequence[PartPlace]], needs: Sequence[Sequence[PartPlace]]) -> list[list[PartPlace]]:
    """For each rank of a host the parts that it copies besides its own, of those that it holds and needs; all others
    are covered by what the host's ranks own. Each is copied by one rank, about as many numbers by each."""
    disjoint = by_tensor([place for places in own for place in places])
    holders: dict[PartPlace, list[int]] = {}
    for rank, places in enumerate(needs):
        for place in dict.fromkeys(places):
            holders.setdefault(place, []).append(rank)
    beside: list[list[PartPlace]] = [[] for _ in needs]
    loads = [sum(prod(place[2]) for place in places) for places in own]
    for place, ranks in sorted(holders.items(), key=lambda item: (-prod(item[0][2]), item[0])):
        if not covers(place, (), disjoint.get(place[0], ())):
            least = min(ranks, key=lambda rank: (loads[rank], rank))
            beside[least].append(place)
            loads[least] += prod(place[2])
    return beside


def by_tensor(places: Sequence[PartPlace]) -> dict[str, list[PartPlace]]:
    """The places of each tensor."""
    found: dict[str, list[PartPlace]] = {}
    for place in places:
        found.setdefault(place[0], []).append(place)
    return found


def _overlap(one: PartPlace, other: PartPlace) -> int:
    """Numbers that two rectangles have in common."""
    if one[0] != other[0]:
        return 0
    sides = zip(one[1], one[2], other[1], other[2], strict=True)
    return prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in sides)
