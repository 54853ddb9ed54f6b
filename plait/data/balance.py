"""Assigns a step's samples to data-parallel ranks so that all ranks have equal loads whatever the lengths of their
documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from plait.data.shards import Shard

# Note [every rank computes the same assignment]: each rank assigns the samples alone, from the same documents. A sample
# that two ranks took, or none, would be a silently wrong gradient. So what decides is whole numbers, stable
# sorts, and single operations on float64, which every processor rounds alike; never a long sum or a product of matrices
# in floats, whose last bit depends on the width of the processor's vectors.

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

_GOAL = 0.002
"""Relative deviation from its fair share below which a rank is left alone."""
_COUNTED_WEIGHT = 0.1
"""A deviation in counted targets costs as much as a tenth of that deviation in attention pairs."""
_DOZEN = 12
"""Number of samples of two ranks that are redistributed at a time; all of the at most 924 ways are tried."""
_MISSES = 8
"""Rounds without an improvement, each with other partners, after which the search ends."""
_VISITS = 90
"""Limit on the tries, plus one for each rank, so that hundreds of ranks do not take long."""
_MASK_BYTES = 1 << 22


def attention_pairs(shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: IntArray, sequence: int) -> IntArray:
    """Number of pairs of a token and one at or before it in its document, for each window: int64, shape [B].

    Window i reads `sequence` inputs of shards[shard[i]] from start[i], as in packing.segment_lengths.
    """
    pairs = np.empty(len(start), dtype=np.int64)
    for number in np.unique(shard):
        rows = np.flatnonzero(shard == number)
        lengths, first = window_lengths(shards[number], start[rows], sequence)
        pairs[rows] = np.add.reduceat(lengths * (lengths + 1) // 2, first)
    return pairs


def window_lengths(shard: Shard, start: IntArray, sequence: int) -> tuple[IntArray, IntArray]:
    """Lengths of the document segments in each window, one window after another, and the index of each window's
    first one."""
    low = np.searchsorted(shard.starts, start, side="right")
    inner = np.searchsorted(shard.starts, start + sequence, side="left") - low
    first = np.cumsum(inner + 1) - (inner + 1)
    edges = np.empty(int((inner + 1).sum()), dtype=np.int64)
    inside = np.ones(len(edges), dtype=bool)
    inside[first] = False
    which = np.repeat(np.arange(len(start)), inner)
    within = np.arange(len(which)) - np.repeat(np.cumsum(inner) - inner, inner)
    edges[first] = np.arange(len(start)) * sequence
    edges[inside] = shard.starts[low[which] + within] + (which * sequence - start[which])
    return np.diff(edges, append=len(start) * sequence), first


def counted_targets(shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: IntArray, sequence: int) -> IntArray:
    """Number of each window's targets that enter the loss: int64, shape [B]; `sequence` where nothing is masked."""
    counted = np.full(len(start), sequence, dtype=np.int64)
    at_once = max(1, _MASK_BYTES // sequence)
    for number in np.unique(shard):
        if shards[number].mask is None:
            continue
        mine = np.flatnonzero(shard == number)
        for rows in np.split(mine, np.arange(at_once, len(mine), at_once)):
            counted[rows] -= np.count_nonzero(shards[number].mask_rows(start[rows] + 1, sequence), axis=1)
    return counted


def balance_samples(pairs: IntArray, sizes: tuple[int, ...], counted: IntArray | None = None) -> list[IntArray]:
    """The samples (0 … B-1, ascending) of each data-parallel rank: rank p gets sizes[p] of them, with attention pairs
    in proportion to that.

    Counted targets, if given, are balanced second. Where all samples are equal, and where each rank takes only one,
    each rank's samples are contiguous.
    """
    assert sum(sizes) == len(pairs) and min(sizes) > 0, f"{sizes} do not add up to {len(pairs)} samples"
    loads = np.stack([pairs, np.ones_like(pairs) if counted is None else counted], axis=1)
    if len(sizes) == 1 or max(sizes) == 1 or not np.any(loads != loads[0]):
        return np.split(np.arange(len(pairs)), np.cumsum(sizes)[:-1])
    assignment = _first_assignment(loads, np.array(sizes))
    _improve(assignment)
    return [np.sort(members) for members in assignment.members]


def order_by_load(pairs: IntArray, mine: IntArray, sizes: tuple[int, ...], counted: IntArray | None = None) -> IntArray:
    """One rank's samples `mine`, reordered so that micro-batches of these `sizes`, the larger first, have about equal
    loads.

    Among those of one size the heaviest comes first, so that ranks that communicate in every micro-batch wait least for
    each other. Where all samples are equal, they keep their order.
    """
    own = pairs[mine]
    micros = balance_samples(own, sizes, None if counted is None else counted[mine])
    micros.sort(key=lambda rows: (-len(rows), -int(own[rows].sum())))
    return mine[np.concatenate(micros)]


@dataclass(slots=True, kw_only=True, eq=False)
class _SampleAssignment:
    """An assignment of samples that is being improved; `loads` has shape [B, 2]: attention pairs, counted targets.

    `members[p]` lists rank p's samples, the heaviest first. `excess` [ranks, 2] is B times a rank's load beyond its
    fair share, an integer; `scale` turns it into a relative deviation, weighted by the kind of load.
    """

    loads: IntArray
    members: list[IntArray]
    excess: IntArray
    scale: Floats


def _first_assignment(loads: IntArray, sizes: IntArray) -> _SampleAssignment:
    """Sort the samples by load and give each rank evenly spaced places in that order; equal ranks alternate in
    direction (snake order)."""
    part = np.repeat(np.arange(len(sizes)), sizes)
    turn = np.arange(len(part)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    to_and_fro = np.where(turn % 2, -part, part)
    taker = part[np.lexsort((to_and_fro, (2 * turn + 1) / (2 * sizes[part])))]
    heaviest_first = np.lexsort((-loads[:, 1], -loads[:, 0]))
    members = [heaviest_first[taker == p] for p in range(len(sizes))]
    sums = np.stack([loads[rows].sum(axis=0) for rows in members])
    total = loads.sum(axis=0)
    return _SampleAssignment(
        loads=loads,
        members=members,
        excess=sums * len(loads) - sizes[:, None] * total,
        scale=np.array([1.0, _COUNTED_WEIGHT]) / (sizes[:, None] * np.maximum(total, 1)),
    )


def _improve(assignment: _SampleAssignment) -> None:
    """Redistribute samples between a rank that is far from its fair share and the one that deviates most in the
    other direction, as long as that helps."""
    misses, visit = 0, 0
    while misses < _MISSES and visit < _VISITS + len(assignment.members):
        costs = _costs(assignment.excess, assignment.scale)
        helped = False
        for part in np.argsort(-costs, kind="stable"):
            if _costs(assignment.excess[part], assignment.scale[part]) > _GOAL**2:
                visit += 1
                helped |= _redistribute(assignment, int(part), _partner(assignment, int(part), misses), visit)
        if costs.max() <= _GOAL**2:
            return
        misses = 0 if helped else misses + 1


def _partner(assignment: _SampleAssignment, part: int, nth: int) -> int:
    """The rank that deviates most in the opposite direction to rank `part`, or the nth one after it."""
    off = assignment.excess * assignment.scale
    along = off[:, 0] * off[part, 0] + off[:, 1] * off[part, 1]
    along[part] = np.inf
    return int(np.argsort(along, kind="stable")[nth % (len(along) - 1)])


def _redistribute(assignment: _SampleAssignment, one: int, other: int, visit: int) -> bool:
    """Redistribute up to a dozen samples of two ranks in the best way that keeps each rank's count; returns whether
    that helped."""
    few = _DOZEN // 2
    sizes = (len(assignment.members[one]), len(assignment.members[other]))
    mine, theirs = min(sizes[0], max(few, _DOZEN - sizes[1])), min(sizes[1], max(few, _DOZEN - sizes[0]))
    places = [_spread(size, count, visit) for size, count in zip(sizes, (mine, theirs), strict=True)]
    picked = np.concatenate([assignment.members[part][at] for part, at in zip((one, other), places, strict=True)])
    ways = _ways(mine + theirs, mine)
    loads = assignment.loads[picked]
    moved = (ways @ loads - loads[:mine].sum(axis=0)) * len(assignment.loads)
    costs = _costs(assignment.excess[one] + moved, assignment.scale[one]) + _costs(
        assignment.excess[other] - moved, assignment.scale[other]
    )
    best = int(np.argmin(costs))
    if not costs[best] < _costs(assignment.excess[one], assignment.scale[one]) + _costs(
        assignment.excess[other], assignment.scale[other]
    ):
        return False
    assignment.excess[one] += moved[best]
    assignment.excess[other] -= moved[best]
    taken = ways[best].astype(bool)
    for part, at, samples in ((one, places[0], picked[taken]), (other, places[1], picked[~taken])):
        assignment.members[part][at] = samples
        members = assignment.members[part]
        assignment.members[part] = members[
            np.lexsort((members, -assignment.loads[members, 1], -assignment.loads[members, 0]))
        ]
    return True


def _spread(size: int, count: int, visit: int) -> IntArray:
    """`count` evenly spaced indices below `size`, different ones at each visit."""
    return ((16 * np.arange(count) + 7 * visit % 16) * size) // (16 * count)


@cache
def _ways(samples: int, mine: int) -> IntArray:
    """Every way to choose `mine` out of `samples` items, as rows of ones and zeros."""
    bits = np.arange(1 << samples)[:, None] >> np.arange(samples) & 1
    return bits[bits.sum(axis=1) == mine]


def _costs(excess: IntArray, scale: Floats) -> Any:
    """Squared relative deviation from the fair share, summed over the last dim (the two kinds of load)."""
    off = (excess * scale) ** 2
    return off[..., 0] + off[..., 1]
