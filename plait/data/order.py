"""The order of training data: a pure function from a seed and a global position to a window of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from math import lcm
from typing import Any

import numpy as np

from plait.data.shards import Corpus
from plait.errors import PlaitError

# Note [order is a function]: a sample is known by its global position alone, so a run resumes from one integer, and any
# number of ranks, with any shares, reads the same samples in the same step. Nothing is stored: an epoch's order is a
# permutation that is computed for the positions asked (bijective rounds of multiply, add and shift on the next
# power of two; a result outside the range is sent round again: Black and Rogaway 2002, "cycle walking").

Indices = np.ndarray[Any, np.dtype[np.int64]]

_ROUNDS = 4
_FEWEST_SLOTS = 1000
_MOST_SLOTS = 1 << 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stream:
    """Shards that are shuffled as one: shard i has the windows from `ends[i-1]` up to `ends[i]`; `spare` holds the
    tokens of each shard that do not fill one."""

    name: int
    shards: Indices
    ends: Indices
    spare: Indices

    @property
    def windows(self) -> int:
        return int(self.ends[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleOrder:
    """Maps each global sample position to a window of a shard; made by `make_order`.

    Position p has slot p % len(slots). `slots` holds the stream of each slot; `index_in_stream` the number of earlier
    slots of the same stream in the cycle.
    """

    seed: int
    sequence: int
    streams: tuple[_Stream, ...]
    slots: Indices
    index_in_stream: Indices

    def windows(self, positions: Indices) -> tuple[np.ndarray[Any, np.dtype[np.int32]], Indices]:
        """Shard (int32) and first token (int64) of each position; one call serves a whole step."""
        turn, slot = np.divmod(np.asarray(positions, dtype=np.int64), len(self.slots))
        owner = self.slots[slot]
        shard = np.empty(len(turn), dtype=np.int32)
        start = np.empty(len(turn), dtype=np.int64)
        for number, stream in enumerate(self.streams):
            mine = np.flatnonzero(owner == number)
            if len(mine):
                draws = turn[mine] * np.count_nonzero(self.slots == number) + self.index_in_stream[slot[mine]]
                shard[mine], start[mine] = self._draw(stream, draws)
        return shard, start

    @property
    def samples(self) -> int:
        """Windows of one pass over all streams."""
        return sum(stream.windows for stream in self.streams)

    def epoch(self, position: int) -> float:
        """Number of epochs done before `position`: passes over all windows; with weights, the average over the
        streams."""
        return position / self.samples

    def _draw(self, stream: _Stream, draws: Indices) -> tuple[Indices, Indices]:
        epochs, index = np.divmod(draws, stream.windows)
        shard, start = np.empty_like(index), np.empty_like(index)
        for epoch in np.unique(epochs):
            mine = np.flatnonzero(epochs == epoch)
            shard[mine], start[mine] = self._draw_in_epoch(stream, int(epoch), index[mine])
        return shard, start

    def _draw_in_epoch(self, stream: _Stream, epoch: int, index: Indices) -> tuple[Indices, Indices]:
        window = permuted_indices(index, stream.windows, _key(self.seed, stream.name, epoch))
        place = np.searchsorted(stream.ends, window, side="right")
        shard = stream.shards[place]
        before = np.where(place > 0, stream.ends[place - 1], 0)
        # The windows of an epoch begin at a phase of its own, so the tokens left over at the ends get their turn too.
        phase = _mixed(shard, _key(self.seed, epoch, "phase")) % (stream.spare[place] + 1).astype(np.uint64)
        return shard, phase.astype(np.int64) + (window - before) * self.sequence


def longest_window(corpus: Corpus) -> int:
    """Length in tokens of the longest window that this corpus allows; raises PlaitError where a source has no training
    text.

    With weights, each source must have a window of that length.
    """
    sizes = [(shard.source, len(shard.tokens)) for shard in corpus.train]
    if not corpus.weights:
        return max(size for _, size in sizes) - 1
    check_sources(corpus)  # before a worker starts
    return min(max(size for owner, size in sizes if owner == source) for source, _ in sizes) - 1


def check_sources(corpus: Corpus) -> None:
    """Raise PlaitError where a source of a mix has no training text."""
    trained = {shard.source for shard in corpus.train}
    held = [source.path for n, source in enumerate(corpus.sources) if n not in trained]
    if corpus.weights and held:
        raise PlaitError(f"all of {held[0]} is held out; give it more text, change data.holdout, or take it out")


def make_order(corpus: Corpus, seed: int, sequence: int) -> SampleOrder:
    """The order of a corpus in windows of `sequence` tokens; raises PlaitError where the data are too short."""
    check_sources(corpus)
    groups = sorted({shard.source for shard in corpus.train}) if corpus.weights else [0]
    streams = []
    for group in groups:
        numbers = [n for n, shard in enumerate(corpus.train) if not corpus.weights or shard.source == group]
        streams.append(_stream(group, numbers, [len(corpus.train[n].tokens) for n in numbers], sequence))
    slots = _pattern(corpus.weights or (1.0,), seed)
    return SampleOrder(seed=seed, sequence=sequence, streams=tuple(streams), slots=slots, index_in_stream=_ranks(slots))


def make_row_order(rows: Sequence[int], weights: tuple[float, ...], seed: int) -> SampleOrder:
    """The order of streams that have this many ready rows each, without weights of all rows as one stream: its
    `windows` are the number of a stream and of a row in it."""
    counts = list(rows) if weights else [sum(rows)]
    streams = tuple(
        _Stream(name=n, shards=np.array([n]), ends=np.array([count]), spare=np.array([0]))
        for n, count in enumerate(counts)
    )
    slots = _pattern(weights or (1.0,), seed)
    return SampleOrder(seed=seed, sequence=1, streams=streams, slots=slots, index_in_stream=_ranks(slots))


def permuted_indices(index: Indices, size: int, key: int) -> Indices:
    """Images of the given indices under a pseudo-random permutation of range(size), which depends on `key`."""
    bits = max(1, (size - 1).bit_length())
    found = _scramble(index.astype(np.uint64), bits, key)
    while len(outside := np.flatnonzero(found >= size)):
        found[outside] = _scramble(found[outside], bits, key)
    return found.astype(np.int64)


def _scramble(values: np.ndarray[Any, Any], bits: int, key: int) -> np.ndarray[Any, Any]:
    """A bijection on `bits`-bit numbers: odd multiples, sums and xor-shifts can each be undone."""
    mask, half = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    for turn in range(_ROUNDS):
        factor = np.uint64(_key(key, turn, "factor") | 1)
        values = (values * factor + np.uint64(_key(key, turn, "addend"))) & mask
        values ^= values >> half
    return values


def _mixed(values: Indices, key: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A 64-bit hash of each value (the finalizer of SplitMix64, Steele et al. 2014)."""
    z = values.astype(np.uint64) * _GOLDEN + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _key(*parts: int | str) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _stream(name: int, shards: list[int], tokens: list[int], sequence: int) -> _Stream:
    sizes = np.array(tokens, dtype=np.int64)
    counts = (sizes - 1) // sequence
    if not counts.any():
        longest = max(0, int(sizes.max(initial=0)) - 1)
        raise PlaitError(
            f"sequence {sequence} is longer than the data allow ({sizes.sum()} training tokens); "
            f"choose at most {longest}"
        )
    return _Stream(name=name, shards=np.array(shards), ends=np.cumsum(counts), spare=(sizes - 1) % sequence)


def _pattern(weights: tuple[float, ...], seed: int) -> Indices:
    """One cycle of stream numbers, in the proportions of the weights and shuffled; it repeats for ever.

    The proportions are exact where a cycle of at most 65536 slots allows it.
    """
    if len(weights) == 1:
        return np.zeros(1, dtype=np.int64)
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    whole = lcm(*(share.denominator for share in shares))
    length = whole * -(-_FEWEST_SLOTS // whole) if whole <= _MOST_SLOTS else _MOST_SLOTS
    counts = [int(share * length) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda n: counts[n] - shares[n] * length)
    for n in by_rest[: length - sum(counts)]:
        counts[n] += 1
    slots = np.repeat(np.arange(len(counts)), counts)
    return slots[permuted_indices(np.arange(length), length, _key(seed, "pattern"))]


def _ranks(slots: Indices) -> Indices:
    rank = np.empty_like(slots)
    for stream in np.unique(slots):
        mine = np.flatnonzero(slots == stream)
        rank[mine] = np.arange(len(mine))
    return rank
