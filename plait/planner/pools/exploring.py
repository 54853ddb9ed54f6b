"""Which selections of a pool to price: a small pool has thousands, and a large one too many to count.

Note [exploring a pool]: single kinds in one zone, then in one more zone at a time, are priced first, with doubling
numbers of devices; then kinds together. From the best of each group of kinds the search moves to neighbours, one entry
of the pool at a time, as long as it improves. A selection is not priced if it could not become the best even if its
devices did nothing but their largest products. Small pools are priced completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from math import inf, prod

from plait.errors import PlaitError
from plait.machines.pool import Pool
from plait.planner.pools.choice import Aims, PoolChoice, rank
from plait.planner.pools.selection import DeviceCounts

PriceSelection = Callable[[DeviceCounts], Sequence[PoolChoice]]
"""Prices devices of a pool, on demand and as spot machines; empty if they cannot hold the job."""

PRICED_WHOLE = 40
"""A pool with at most this many selections is priced completely."""
CLIMBS, CLIMBS_WITHIN = 3, 4.0
"""The search continues from the best selection of this many groups of kinds, if it is at most so many times worse than
the best of all: a pool's slowest devices, or zones behind slow links, need many moves, each with a layout to search."""
MOST_ENTRIES_PAIRED = 3
"""In a pool of at most this many entries, neighbours may differ in two of them."""
KINDS_TOGETHER = 4
"""With at most this many kinds, all groups are tried; with more, only single kinds, pairs and all together."""


def explore(pool: Pool, price: PriceSelection, price_bound: PriceSelection, aims: Aims) -> list[PoolChoice]:
    """Priced choices of a pool, including the best for these aims; raises PlaitError if no selection can hold the job.

    `price_bound` gives, without a search, a better price than any layout can have.
    """
    explored = _Explored(price, price_bound, aims)
    if prod(len(entry.sizes) + 1 for entry in pool.devices) - 1 <= PRICED_WHOLE:
        for counts in every_selection(pool):
            explored.add(counts)
    else:
        groups = _kind_groups(pool)
        for kinds in groups:
            chains = _zone_chains(pool, kinds)
            for chain in chains:
                for counts in _seeds(pool, kinds, chain):
                    if len(kinds) == 1 and chain is chains[0]:  # for any aims: the table shows them
                        explored.add(counts)
                    else:
                        explored.add_if_promising(counts)
        starts = explored.best_of_groups(pool)[:CLIMBS]
        for start in starts:
            (_, value), (_, best) = explored.rank(start), explored.rank(starts[0])
            if value <= CLIMBS_WITHIN * best:
                _climb(pool, explored, start)
    choices = explored.choices
    if not choices:
        raise PlaitError(
            f"no selection of {pool.name} can hold this job; plait plan RECIPE --cluster with its largest devices says "
            "what is missing"
        )
    return choices


def every_selection(pool: Pool) -> Iterator[DeviceCounts]:
    """All selections of at least one device."""
    return (counts for counts in product(*((0, *entry.sizes) for entry in pool.devices)) if any(counts))


class _Explored:
    """The selections priced so far, with the best of them."""

    def __init__(self, price: PriceSelection, price_bound: PriceSelection, aims: Aims) -> None:
        self._price, self._price_bound, self._aims = price, price_bound, aims
        self._priced: dict[DeviceCounts, Sequence[PoolChoice]] = {}
        self._best = (inf, inf)

    @property
    def choices(self) -> list[PoolChoice]:
        return [choice for some in self._priced.values() for choice in some]

    def add(self, counts: DeviceCounts) -> tuple[float, float]:
        """Price a selection; returns its rank."""
        if counts not in self._priced:
            self._priced[counts] = self._price(counts)
        key = self.rank(counts)
        self._best = min(self._best, key)
        return key

    def add_if_promising(self, counts: DeviceCounts) -> tuple[float, float]:
        """Price a selection that may become the best; returns its rank, or the rank of its bound."""
        if counts not in self._priced:
            bound = min((rank(choice, self._aims) for choice in self._price_bound(counts)), default=(inf, inf))
            if bound > self._best:
                return bound
        return self.add(counts)

    def rank(self, counts: DeviceCounts) -> tuple[float, float]:
        return min((rank(choice, self._aims) for choice in self._priced.get(counts, ())), default=(inf, inf))

    def best_of_groups(self, pool: Pool) -> list[DeviceCounts]:
        """The best selection of each group of kinds, the best group first."""
        best: dict[frozenset[str], DeviceCounts] = {}
        for counts in sorted(self._priced, key=self.rank):
            kinds = frozenset(entry.device.name for entry, count in zip(pool.devices, counts, strict=True) if count)
            best.setdefault(kinds, counts)
        return [counts for counts in best.values() if self.rank(counts)[0] < inf]


def _kind_groups(pool: Pool) -> list[tuple[str, ...]]:
    kinds = tuple(dict.fromkeys(entry.device.name for entry in pool.devices))
    sizes = range(1, len(kinds) + 1) if len(kinds) <= KINDS_TOGETHER else (1, 2, len(kinds))
    return [group for size in sizes for group in combinations(kinds, size)]


def _zone_chains(pool: Pool, kinds: Sequence[str]) -> list[list[str]]:
    """The zones that have these kinds, in several orders: each starts with a different zone, and continues with the
    zone that has the fastest link to those before."""
    zones = list(dict.fromkeys(entry.zone for entry in pool.devices if entry.device.name in kinds))
    chains = list[list[str]]()
    for first in zones:
        chain, rest = [first], [zone for zone in zones if zone != first]
        while rest:
            chain.append(max(rest, key=lambda zone: _slowest_rate(pool, chain, zone)))
            rest.remove(chain[-1])
        chains.append(chain)
    return chains


def _slowest_rate(pool: Pool, chain: Sequence[str], zone: str) -> tuple[float, float]:
    """The slowest link from a zone to some others, and then the cheapest traffic."""
    links = [link for other in chain if (link := pool.link_between(other, zone))]
    return min(link.link.bytes_per_s for link in links), -max(link.egress_price for link in links)


def _seeds(pool: Pool, kinds: tuple[str, ...], chain: Sequence[str]) -> Iterator[DeviceCounts]:
    """Selections of these kinds to start with: for one kind, doubling numbers of devices, zone after zone; for several
    kinds, all their devices in one zone, then in two, and so on."""
    if len(kinds) == 1:
        sizes = _doubling_sizes(pool, kinds[0], chain)
        yield from (_filled(pool, kinds[0], size, chain) for size in sizes)
    for n in range(1, len(chain) + 1):
        yield tuple(
            entry.count if entry.device.name in kinds and entry.zone in chain[:n] else 0 for entry in pool.devices
        )


def _doubling_sizes(pool: Pool, kind: str, chain: Sequence[str]) -> list[int]:
    entries = [entry for entry in pool.devices if entry.device.name == kind and entry.zone in chain]
    total, parts = (
        sum(entry.count for entry in entries),
        [size for size in entries[0].sizes if size < entries[0].per_node],
    )
    per_node = entries[0].per_node
    return [*parts, *(per_node * 2**k for k in range((total // per_node).bit_length()))]


def _filled(pool: Pool, kind: str, devices: int, chain: Sequence[str]) -> DeviceCounts:
    """A number of devices of one kind, from the first zones that have them."""
    counts, left = [0] * len(pool.devices), devices
    for zone in chain:
        for place, entry in enumerate(pool.devices):
            if entry.zone == zone and entry.device.name == kind and left:
                fits = max((size for size in entry.sizes if size <= left), default=0)
                counts[place], left = fits, left - fits
    return tuple(counts)


def _climb(pool: Pool, explored: _Explored, start: DeviceCounts) -> None:
    """Move from a selection to its best neighbour as long as that is better."""
    here, key = start, explored.rank(start)
    while True:
        tried = {counts: explored.add_if_promising(counts) for counts in _neighbours(pool, here)}
        best = min(tried, key=lambda counts: tried[counts], default=here)
        if tried.get(best, (inf, inf)) >= key:
            return
        here, key = best, tried[best]


def _neighbours(pool: Pool, counts: DeviceCounts) -> list[DeviceCounts]:
    """Selections with one entry changed: by a size, to half, to twice, to none or to all; or moved to another entry. In
    pools with few entries, also with two of them changed, since under a bound one may have to give way to the other."""
    found = _with_one_changed(pool, counts)
    if len(pool.devices) <= MOST_ENTRIES_PAIRED:
        found += [other for one in found for other in _with_one_changed(pool, one)]
    for one, other in product(range(len(counts)), repeat=2):
        if counts[one] and counts[other] == 0 and counts[one] in pool.devices[other].sizes:
            moved = list(counts)
            moved[one], moved[other] = 0, counts[one]
            found.append(tuple(moved))
    return [one for one in dict.fromkeys(found) if any(one) and one != counts]


def _with_one_changed(pool: Pool, counts: DeviceCounts) -> list[DeviceCounts]:
    return [
        (*counts[:place], count, *counts[place + 1 :])
        for place, entry in enumerate(pool.devices)
        for count in _other_sizes((0, *entry.sizes), counts[place])
    ]


def _other_sizes(sizes: Sequence[int], count: int) -> list[int]:
    at = sizes.index(count)
    near = [sizes[place] for place in (at - 1, at + 1) if 0 <= place < len(sizes)]
    far = [max(size for size in sizes if size <= wanted) for wanted in (count // 2, 2 * count)]
    return [size for size in dict.fromkeys((*near, *far, 0, sizes[-1])) if size != count]
