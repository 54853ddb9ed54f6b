"""Whole examples packed into windows: which window holds which, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.data.balance import IntArray
from plait.data.index import SampleLayout
from plait.data.order import SampleOrder
from plait.data.rows import IGNORED_TARGET, check_ids
from plait.data.samples.best_fit import best_fit
from plait.data.samples.reader import NO_SEQUENCE, PairRows, TokenRows
from plait.data.samples.sizes import Overlong, example_lengths, overlong_sentence
from plait.data.shards import Shard
from plait.errors import PlaitError

# Note [a window of whole examples]: an example of n + 1 tokens is n inputs and their n targets, so its last token takes
# no room in a window. What the examples leave free is filled with <eot> that nothing learns from, a segment of its own.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedExamples:
    """The examples of a split, sorted by the window that holds them: window w has those from `first[w]` up to
    `first[w + 1]`. All arrays are int64; `learned` counts an example's targets that enter the loss."""

    shard: IntArray
    start: IntArray
    length: IntArray
    learned: IntArray
    first: IntArray
    streams: tuple[int, ...]
    """Windows of each stream that is shuffled as one; the streams' windows follow each other."""
    pair: IntArray | None = None
    """For pairs, the pair's number of each example: chosen and rejected follow each other in one window."""

    @property
    def windows(self) -> int:
        return len(self.first) - 1


def pack_examples(
    shards: Sequence[Shard],
    sequence: int,
    overlong: Overlong,
    *,
    layout: SampleLayout = "whole",
    first_pair: int = 0,
) -> PackedExamples:
    """Pack the examples of these shards, those of each source for itself, into windows of `sequence` tokens; raises
    PlaitError for examples that are too long where that is refused.

    Of "pairs" two and two stay together. The pairs are numbered from `first_pair` on in the shards' order, also those
    that are left out.
    """
    together = 2 if layout == "pairs" else 1
    before = np.cumsum([first_pair * together, *(len(shard.starts) for shard in shards)])
    parts, streams, windows = list[list[IntArray]](), list[int](), 0
    for group in sorted({shard.source for shard in shards}):
        numbers = [number for number, shard in enumerate(shards) if shard.source == group]
        fitting = [_fitting(shards, number, sequence, overlong, together) for number in numbers]
        shard, start, length, learned, example = (np.concatenate(arrays) for arrays in zip(*fitting, strict=True))
        window = np.repeat(best_fit(length.reshape(-1, together).sum(axis=1), sequence), together)
        count = int(window.max(initial=-1)) + 1
        order = np.argsort(window, kind="stable")
        found = (shard, start, length, learned, example + before[shard], window + windows)
        parts.append([each[order] for each in found])
        streams.append(count)
        windows += count
    shard, start, length, learned, example, window = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return PackedExamples(
        shard=shard,
        start=start,
        length=length,
        learned=learned,
        first=np.searchsorted(window, np.arange(windows + 1)),
        streams=tuple(streams),
        pair=example // 2 if layout == "pairs" else None,
    )


def _fitting(
    shards: Sequence[Shard], number: int, sequence: int, overlong: Overlong, together: int
) -> tuple[IntArray, ...]:
    """Shard, start, length, learned targets and number of the examples of one shard that take part; this many of them
    are one thing, of which nothing is cut if they are several."""
    shard = shards[number]
    length, start = example_lengths(shard), np.asarray(shard.starts)
    whole = length.reshape(-1, together).sum(axis=1)
    beyond = whole > sequence
    if beyond.any() and (overlong == "refuse" or (overlong == "cut" and together > 1)):
        layout = "whole" if together == 1 else "pairs"
        raise PlaitError(overlong_sentence(int(beyond.sum()), int(whole.max()), sequence, layout))
    length = np.minimum(length, sequence)
    assert shard.mask is not None
    until = np.concatenate([[0], np.cumsum(shard.mask == 0)])
    learned = until[start + length + 1] - until[start + 1]
    kept = (learned.reshape(-1, together) > 0).all(axis=1) & ~(beyond & (overlong == "drop"))
    kept = np.repeat(kept, together)
    example = np.flatnonzero(kept)
    return np.full(len(example), number), start[kept], length[kept], learned[kept], example


class PackedReader:
    """Reads windows of packed examples. Where `order` is None, positions are windows, in their own order."""

    def __init__(
        self,
        shards: tuple[Shard, ...],
        packed: PackedExamples,
        order: SampleOrder | None,
        *,
        sequence: int,
        eot: int,
        vocabulary: int,
    ) -> None:
        self.sequence, self.samples = sequence, packed.windows
        self._shards, self._packed, self._order = shards, packed, order
        self._eot, self._vocabulary = eot, vocabulary
        self._before = np.concatenate([[0], np.cumsum(packed.streams)]).astype(np.int64)

    def places(self, positions: IntArray) -> IntArray:
        """The window of each position: [B, 1]."""
        if self._order is None:
            return np.asarray(positions, dtype=np.int64)[:, None]
        stream, window = self._order.windows(positions)
        return (self._before[stream] + window)[:, None]

    def attention_pairs(self, places: IntArray) -> IntArray:
        """Pairs of a token and one at or before it in its example, for each window; what is free counts as one."""
        _, row, length, _ = self._examples(places)
        pairs, filled = np.zeros((2, len(places)), dtype=np.int64)
        np.add.at(pairs, row, length * (length + 1) // 2)
        np.add.at(filled, row, length)
        free = self.sequence - filled
        return pairs + free * (free + 1) // 2

    def counted_targets(self, places: IntArray) -> IntArray:
        """Targets of each window that enter the loss."""
        example, row, _, _ = self._examples(places)
        found = np.zeros(len(places), dtype=np.int64)
        np.add.at(found, row, self._packed.learned[example])
        return found

    def read(self, places: IntArray) -> TokenRows:
        """The windows' tokens; raises RunFailed where a shard holds an id that the tokenizer does not have."""
        inputs = np.full(len(places) * self.sequence, self._eot, dtype=np.int64)
        targets = np.full_like(inputs, IGNORED_TARGET)
        example, row, length, begin = self._examples(places)
        shard, start = self._packed.shard[example], self._packed.start[example]
        for number in np.unique(shard).tolist():
            own, mine = self._shards[number], np.flatnonzero(shard == number)
            assert own.mask is not None
            source, target = _ranges(start[mine], length[mine]), _ranges(begin[mine], length[mine])
            wanted = own.tokens[source + 1].astype(np.int64)
            inputs[target] = own.tokens[source]
            targets[target] = np.where(own.mask[source + 1], IGNORED_TARGET, wanted)
            check_ids(np.stack([inputs[target], wanted]), self._vocabulary, self._shards, np.array([number] * 2))
        filled = np.zeros(len(places), dtype=np.int64)
        np.add.at(filled, row, length)
        partial = np.flatnonzero(filled < self.sequence)
        edges = np.sort(np.concatenate([begin, partial * self.sequence + filled[partial]]))
        shape = (len(places), self.sequence)
        return TokenRows(
            inputs=inputs.reshape(shape),
            targets=targets.reshape(shape),
            lengths=np.diff(edges, append=len(inputs)),
            pairs=self._pairs(example, _ranges(begin, length), shape),
        )

    def _pairs(self, example: IntArray, places: IntArray, shape: tuple[int, int]) -> PairRows | None:
        """The pairs of these examples, whose tokens are at these places of the flattened rows."""
        if self._packed.pair is None:
            return None
        sequence = np.full(shape[0] * shape[1], NO_SEQUENCE, dtype=np.int64)
        sequence[places] = np.repeat(np.arange(len(example)), self._packed.length[example])
        return PairRows(
            numbers=self._packed.pair[example[::2]],
            sequence=sequence.reshape(shape),
            most_in_row=int(np.diff(self._packed.first).max(initial=0)) // 2,
        )

    def _examples(self, places: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The examples in these windows: number, row, input tokens, and where each begins in the flattened rows."""
        first, count = self._packed.first[places[:, 0]], np.diff(self._packed.first)[places[:, 0]]
        example, row = _ranges(first, count), np.repeat(np.arange(len(places)), count)
        length = self._packed.length[example]
        before = np.cumsum(length) - length
        row_begin = before[np.cumsum(count) - count]
        return example, row, length, row * self.sequence + before - row_begin[row]


def _ranges(first: IntArray, count: IntArray) -> IntArray:
    """first[0], first[0] + 1, … of count[0] numbers, then those of first[1], and so on."""
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
