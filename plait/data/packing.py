"""Where documents begin inside the windows of a micro-batch, so that attention can stay within them."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.data.shards import Shard

Lengths = np.ndarray[Any, np.dtype[np.int64]]


def segment_lengths(shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: Lengths, sequence: int) -> Lengths:
    """Lengths of the document segments of the flattened rows, in order; no segment crosses a row.

    Row i reads `sequence` inputs of shards[shard[i]] from start[i]; the <eot> before a document opens its segment.
    """
    begins = [np.arange(len(start)) * sequence]
    for number in np.unique(shard):
        rows = np.flatnonzero(shard == number)
        begins.append(_inner_begins(shards[number].starts, rows, start[rows], sequence))
    edges = np.sort(np.concatenate(begins)) if len(begins) > 1 else begins[0]
    return np.diff(edges, append=len(start) * sequence)


def restarting_positions(lengths: Lengths) -> Lengths:
    """0, 1, 2, … within each segment, for all segments one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def zigzag_columns(sequence: int, parts: int, index: int) -> Lengths:
    """The columns of a row that one of `parts` context ranks holds, in their order: two of 2 × parts equal chunks.

    Chunk `index` and the one as far from the row's end, so that all ranks have equally many pairs of a token and an
    earlier one. `parts` 1 holds the whole row.
    """
    chunk, rest = divmod(sequence, 2 * parts)
    assert parts == 1 or rest == 0, f"{2 * parts} chunks do not divide a row of {sequence} tokens"
    if parts == 1:
        return np.arange(sequence)
    firsts = (index * chunk, (2 * parts - 1 - index) * chunk)
    return np.concatenate([np.arange(first, first + chunk) for first in firsts])


def _inner_begins(starts: Lengths, rows: Lengths, first: Lengths, sequence: int) -> Lengths:
    """Flat places of the documents that begin inside the rows, row beginnings left out."""
    low = np.searchsorted(starts, first, side="right")
    high = np.searchsorted(starts, first + sequence, side="left")
    counts = high - low
    which = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows[which] * sequence + starts[low[which] + within] - first[which]
