"""Document boundaries inside the windows of a micro-batch, so that attention can stay within documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.data.shards import Shard

Lengths = np.ndarray[Any, np.dtype[np.int64]]


def segment_lengths(shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: Lengths, sequence: int) -> Lengths:
    """Lengths of the document segments in the flattened rows, in order; no segment crosses a row.

    Row i reads `sequence` inputs of shards[shard[i]] from start[i]; the <eot> before a document begins its segment.
    """
    begins = [np.arange(len(start)) * sequence]
    for number in np.unique(shard):
        rows = np.flatnonzero(shard == number)
        begins.append(_inner_begins(shards[number].starts, rows, start[rows], sequence))
    edges = np.sort(np.concatenate(begins)) if len(begins) > 1 else begins[0]
    return np.diff(edges, append=len(start) * sequence)


def restarting_positions(lengths: Lengths) -> Lengths:
    """Positions 0, 1, 2, … within each segment, concatenated over all segments."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def rows_ahead(
    inputs: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    lengths: Lengths | None,
    depth: int,
    *,
    ignored: int,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets `depth` columns further on, [B, T] each, as position i sees them: `ignored` is the target
    where that column is of another row or, where `lengths` are given, of another document.

    The tokens of such positions do not matter: they stand at a document's end, where no later position sees them.
    """
    tokens, wanted = np.zeros_like(inputs), np.full(targets.shape, ignored, dtype=np.int64)
    tokens[:, :-depth], wanted[:, :-depth] = inputs[:, depth:], targets[:, depth:]
    if lengths is not None:
        documents = np.repeat(np.arange(len(lengths)), lengths).reshape(inputs.shape)
        wanted[:, :-depth][documents[:, depth:] != documents[:, :-depth]] = ignored
    return tokens, wanted


def zigzag_columns(sequence: int, context_degree: int, context_rank: int) -> Lengths:
    """Columns of a row that one of `context_degree` context ranks holds, in the rank's order: two of 2 ×
    `context_degree` equal chunks.

    The chunks are number `context_rank` from the row's beginning and the same number from its end, so that all ranks
    have about equally many pairs of a token and an earlier one. With a degree of 1 the rank holds the whole row.
    """
    chunk, rest = divmod(sequence, 2 * context_degree)
    assert context_degree == 1 or rest == 0, f"{2 * context_degree} chunks do not divide a row of {sequence} tokens"
    if context_degree == 1:
        return np.arange(sequence)
    firsts = (context_rank * chunk, (2 * context_degree - 1 - context_rank) * chunk)
    return np.concatenate([np.arange(first, first + chunk) for first in firsts])


def _inner_begins(starts: Lengths, rows: Lengths, first: Lengths, sequence: int) -> Lengths:
    """Positions in the flattened rows at which documents begin, without those at the beginning of a row."""
    low = np.searchsorted(starts, first, side="right")
    high = np.searchsorted(starts, first + sequence, side="left")
    counts = high - low
    which = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows[which] * sequence + starts[low[which] + within] - first[which]
