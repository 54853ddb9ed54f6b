"""Samples for the loader: windows of a stream, or windows of packed examples, by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from plait.data.balance import IntArray
from plait.data.rows import IGNORED_TARGET

NO_SEQUENCE = -1
"""`sequence` of a token that belongs to no pair."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairRows:
    """The pairs in rows of tokens: `numbers` [P] are theirs among all of the corpus, and `sequence` [B, T] says of each
    token in which example it is: 2i in the chosen one of pair i here, 2i + 1 in the rejected one, else NO_SEQUENCE."""

    numbers: IntArray
    sequence: IntArray
    most_in_row: int = 0
    """Pairs of the fullest row that there is, here or elsewhere."""

    @staticmethod
    def none(shape: tuple[int, int]) -> PairRows:
        """The value for rows without pairs."""
        return PairRows(numbers=np.empty(0, dtype=np.int64), sequence=np.full(shape, NO_SEQUENCE, dtype=np.int64))


def joined_pairs(rows: Sequence[PairRows]) -> PairRows:
    """The pairs of rows that follow each other."""
    before = np.cumsum([0, *(2 * len(one.numbers) for one in rows)])
    moved = [
        np.where(one.sequence == NO_SEQUENCE, NO_SEQUENCE, one.sequence + first)
        for one, first in zip(rows, before[:-1], strict=True)
    ]
    return PairRows(
        numbers=np.concatenate([one.numbers for one in rows]),
        sequence=np.concatenate(moved),
        most_in_row=max(one.most_in_row for one in rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """Inputs and targets, each [B, T]; `lengths` are the segments of the flattened rows that attention stays in, and
    none crosses a row. `pairs` is None where samples are no pairs."""

    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    lengths: IntArray
    pairs: PairRows | None = None


class RowReader(Protocol):
    """Samples of `sequence` tokens by place; a place is a row of whole numbers that only the reader understands."""

    @property
    def sequence(self) -> int: ...
    @property
    def samples(self) -> int:
        """Samples of one pass."""
        ...

    def places(self, positions: IntArray) -> IntArray:
        """The place of each position: [B, n]."""
        ...

    def read(self, places: IntArray) -> TokenRows:
        """The samples at these places; raises RunFailed where they are damaged."""
        ...


class SampleReader(RowReader, Protocol):
    """A reader that also knows how much work its samples are, so that they can be balanced over ranks."""

    def attention_pairs(self, places: IntArray) -> IntArray:
        """Pairs of a token and one at or before it in its document, for each place: [B]."""
        ...

    def counted_targets(self, places: IntArray) -> IntArray:
        """Targets that enter the loss, for each place: [B]."""
        ...


class FiniteReader:
    """A reader whose samples end at a position: later ones are rows of which nothing enters the loss, so the last
    step of a finite run is exact, and the same one on every rank."""

    def __init__(self, reader: SampleReader, end: int, eot: int) -> None:
        assert end > 0
        self.sequence, self.samples = reader.sequence, reader.samples
        self._reader, self._end, self._eot = reader, end, eot

    def places(self, positions: IntArray) -> IntArray:
        """The place of each position; -1 everywhere beyond the end."""
        positions = np.asarray(positions, dtype=np.int64)
        places = self._reader.places(np.minimum(positions, self._end - 1))
        return np.where((positions < self._end)[:, None], places, -1)

    def attention_pairs(self, places: IntArray) -> IntArray:
        """Pairs of a token and one at or before it in its document, for each place."""
        inside = places[:, 0] >= 0
        pairs = np.full(len(places), self.sequence * (self.sequence + 1) // 2, dtype=np.int64)
        pairs[inside] = self._reader.attention_pairs(places[inside])
        return pairs

    def counted_targets(self, places: IntArray) -> IntArray:
        """Targets that enter the loss, for each place; none beyond the end."""
        inside = places[:, 0] >= 0
        found = np.zeros(len(places), dtype=np.int64)
        found[inside] = self._reader.counted_targets(places[inside])
        return found

    def read(self, places: IntArray) -> TokenRows:
        """The samples at these places; those beyond the end are of one segment, <eot> and nothing to learn."""
        inside = places[:, 0] >= 0
        if inside.all():
            return self._reader.read(places)
        inputs = np.full((len(places), self.sequence), self._eot, dtype=np.int64)
        targets = np.full_like(inputs, IGNORED_TARGET)
        segments: list[IntArray] = [np.array([self.sequence])] * len(places)
        pairs = [PairRows.none((1, self.sequence))] * len(places)
        has_pairs = False
        for row in np.flatnonzero(inside).tolist():
            one = self._reader.read(places[row : row + 1])
            inputs[row], targets[row], segments[row] = one.inputs[0], one.targets[0], one.lengths
            if one.pairs is not None:
                pairs[row], has_pairs = one.pairs, True
        return TokenRows(
            inputs=inputs,
            targets=targets,
            lengths=np.concatenate(segments),
            pairs=joined_pairs(pairs) if has_pairs else None,
        )
