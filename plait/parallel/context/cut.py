"""Which queries of a context rank attend to which keys: the arithmetic of balanced (zig-zag) parts, without a tensor.

Each row of T tokens is cut into 2c chunks, and rank i of c holds chunk i and chunk 2c - 1 - i, one after the other. In
the order of the rank's own tokens a document is then one or more *segments*, each inside one chunk. A segment's queries
attend causally to its own keys, which are all on this rank, and, where its document began in an earlier chunk, to all
of the document's earlier keys: a rectangle. A chunk begins with at most one such segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Literal

TokenSpan = tuple[int, int]
"""(first, count) of consecutive tokens or rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBand:
    """Query number t sees the keys number s with t + shift - window < s <= t + shift, of those that there are."""

    shift: int
    """Position of the first query less that of the first key."""
    window: int

    def keys_of(self, query: int, keys: int) -> range:
        """The numbers of the keys that a query sees, of this many."""
        return range(max(0, query + self.shift - self.window + 1), min(keys, query + self.shift + 1))


Mask = Literal["causal", "none"] | WindowBand
"""The keys that a query sees: "causal" needs as many keys as queries, "none" takes all keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Queries of this rank's rows that attend to keys before their chunk; the same in each of `rows`."""

    rows: TokenSpan
    queries: TokenSpan
    """Span of the queries among the row's tokens on this rank."""
    keys: TokenSpan
    """Span of the keys among all tokens of the row."""
    mask: Mask = "none"

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one row."""
        queries, keys = self.queries[1], self.keys[1]
        if not isinstance(self.mask, WindowBand):
            return queries * keys
        return sum(len(self.mask.keys_of(query, keys)) for query in range(queries))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCut:
    """All that one context rank computes of a micro-batch's attention."""

    rows: int
    sequence: int
    parts: int
    index: int
    segments: tuple[int, ...]
    """Lengths of the segments, in the order of this rank's tokens of all rows."""
    rectangles: tuple[Rectangle, ...]
    crosses: bool
    """Whether some document reaches over a chunk's border, on any rank: the same answer on all ranks."""
    window: int = 0
    """Tokens that a query sees at most, itself included; 0: all before it in its document."""

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key, what attention's cost grows with."""
        squares = sum(_pairs_of_segment(length, self.window) for length in self.segments)
        return squares + sum(one.rows[1] * one.pairs for one in self.rectangles)

    @property
    def has_bands(self) -> bool:
        """Whether the window hides from some query a key that lies in a piece with it."""
        long = bool(self.window) and max(self.segments) > self.window
        return long or any(isinstance(one.mask, WindowBand) for one in self.rectangles)

    @property
    def runs(self) -> tuple[TokenSpan, ...]:
        """(length, how many) of the segments, neighbours of equal length taken together."""
        return tuple((length, len(list(same))) for length, same in groupby(self.segments))


def cut_attention(
    lengths: tuple[int, ...] | None, *, rows: int, sequence: int, parts: int, index: int, window: int = 0
) -> ContextCut:
    """The attention that context rank `index` of `parts` computes.

    `lengths` are those of the documents in the whole rows; None: each row is one. With a `window` a query sees this
    many tokens at most, itself included."""
    chunk, rest = divmod(sequence, 2 * parts)
    assert rest == 0, f"{2 * parts} chunks do not divide a row of {sequence} tokens"
    borders = _borders(lengths, rows, sequence)
    segments: list[int] = []
    rectangles: dict[tuple[TokenSpan, TokenSpan, Mask], list[int]] = {}
    for row, begins in enumerate(borders):
        for place, number in enumerate((index, 2 * parts - 1 - index)):
            first = number * chunk
            edges = [first, *(begin for begin in begins if first < begin < first + chunk), first + chunk]
            segments += [end - begin for begin, end in pairwise(edges)]
            opened = max(begin for begin in begins if begin <= first)
            queries, begin, mask = _seen_behind(opened, first, edges[1] - first, window)
            if queries and begin < first:
                key = ((place * chunk, queries), (begin, first - begin), mask)
                rectangles.setdefault(key, []).append(row)
    return ContextCut(
        rows=rows,
        sequence=sequence,
        parts=parts,
        index=index,
        segments=tuple(segments),
        rectangles=tuple(
            Rectangle(rows=some, queries=queries, keys=keys, mask=mask)
            for (queries, keys, mask), found in rectangles.items()
            for some in _neighbours(found)
        ),
        crosses=any(not set(range(chunk, sequence, chunk)) <= set(begins) for begins in borders),
        window=window,
    )


def _seen_behind(opened: int, first: int, queries: int, window: int) -> tuple[int, int, Mask]:
    """Of `queries` queries from position `first` on, how many see keys before it, the first such key, and the mask; the
    document began at `opened`."""
    if not window:
        return queries, opened, "none"
    queries, begin = min(queries, window - 1), max(opened, first - window + 1)
    sees_all = first + queries - 1 - begin < window
    return queries, begin, "none" if sees_all else WindowBand(shift=first - begin, window=window)


def _pairs_of_segment(length: int, window: int) -> int:
    square = length * (length + 1) // 2
    hidden = length - window if window else 0
    return square - hidden * (hidden + 1) // 2 if hidden > 0 else square


def _borders(lengths: tuple[int, ...] | None, rows: int, sequence: int) -> list[list[int]]:
    """The beginnings of documents within each row, including 0."""
    if lengths is None:
        return [[0] for _ in range(rows)]
    begins = [0, *accumulate(lengths)]
    assert begins.pop() == rows * sequence, "the documents' lengths are those of whole rows"
    borders: list[list[int]] = [[] for _ in range(rows)]
    for begin in begins:
        borders[begin // sequence].append(begin % sequence)
    assert all(begins and begins[0] == 0 for begins in borders), "no document crosses the end of a row"
    return borders


def _neighbours(numbers: list[int]) -> list[TokenSpan]:
    """Ascending numbers as spans of neighbours."""
    spans: list[TokenSpan] = []
    for number in numbers:
        if spans and sum(spans[-1]) == number:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((number, 1))
    return spans
