"""The arithmetic of zig-zag parts: every pair of a query and a key once, and as many on each rank."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.packing import zigzag_columns
from plait.parallel.context.cut import ContextCut, Rectangle, WindowBand, cut_attention


def test_columns_of_two_ranks() -> None:
    assert zigzag_columns(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_columns(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert zigzag_columns(7, 1, 0).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_every_column_is_on_one_rank(parts: int) -> None:
    columns = np.concatenate([zigzag_columns(48, parts, index) for index in range(parts)])
    assert sorted(columns.tolist()) == list(range(48))


def test_the_cut_of_one_rank_without_documents() -> None:
    found = cut_attention(None, rows=3, sequence=16, parts=2, index=1)
    assert found.segments == (4,) * 6 and found.runs == ((4, 6),) and found.crosses
    assert found.rectangles == (
        Rectangle(rows=(0, 3), queries=(0, 4), keys=(0, 4)),
        Rectangle(rows=(0, 3), queries=(4, 4), keys=(0, 8)),
    )


def test_rows_with_other_documents_have_their_own_rectangles() -> None:
    found = cut_attention((16, 6, 10, 16), rows=3, sequence=16, parts=2, index=1)
    assert found.segments == (4, 4, 2, 2, 4, 4, 4) and found.runs == ((4, 2), (2, 2), (4, 3))
    assert found.rectangles == (
        Rectangle(rows=(0, 1), queries=(0, 4), keys=(0, 4)),
        Rectangle(rows=(2, 1), queries=(0, 4), keys=(0, 4)),
        Rectangle(rows=(0, 1), queries=(4, 4), keys=(0, 8)),
        Rectangle(rows=(2, 1), queries=(4, 4), keys=(0, 8)),
        Rectangle(rows=(1, 1), queries=(0, 2), keys=(0, 4)),
        Rectangle(rows=(1, 1), queries=(4, 4), keys=(6, 2)),
    )


def test_documents_inside_chunks_need_nobody_else() -> None:
    cuts = [cut_attention((2, 2, 4, 4, 1, 3), rows=1, sequence=16, parts=2, index=index) for index in range(2)]
    assert not any(cut.crosses or cut.rectangles for cut in cuts)


def test_all_ranks_agree_on_whether_documents_cross() -> None:
    cuts = [cut_attention((4, 8, 4), rows=1, sequence=16, parts=2, index=index) for index in range(2)]
    assert [cut.crosses for cut in cuts] == [True, True]
    assert [len(cut.rectangles) for cut in cuts] == [0, 1]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_pairs_are_within_three_percent_of_each_other(parts: int) -> None:
    found = [cut_attention(None, rows=2, sequence=16384, parts=parts, index=index).pairs for index in range(parts)]
    assert max(found) <= 1.03 * min(found)
    assert sum(found) == 2 * 16384 * 16385 // 2


@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.integers(0, 9))
def test_every_pair_is_computed_once_by_the_rank_that_has_the_query(
    data: st.DataObject, parts: int, rows: int, window: int
) -> None:
    sequence = 2 * parts * data.draw(st.integers(1, 4))
    inner = data.draw(st.sets(st.integers(1, rows * sequence - 1)))
    edges = sorted({0, *inner, *range(0, rows * sequence + 1, sequence)})
    lengths = tuple(np.diff(edges).tolist())
    counts = np.zeros((rows * sequence, rows * sequence), dtype=int)
    sizes = {"rows": rows, "sequence": sequence, "parts": parts, "window": window}
    cuts = [cut_attention(lengths, **sizes, index=index) for index in range(parts)]
    for cut in cuts:
        before = counts.sum()
        _count(cut, counts)
        assert counts.sum() - before == cut.pairs
    document = np.repeat(np.arange(len(lengths)), lengths)
    wanted = np.tril(document[:, None] == document[None, :])
    if window:
        wanted = np.triu(wanted, 1 - window)
    assert (counts == wanted).all()
    assert len({cut.crosses for cut in cuts}) == 1
    if not window:
        assert cuts[0].crosses == any(cut.rectangles for cut in cuts)
    assert cuts[0].crosses or not any(cut.rectangles for cut in cuts)


def _count(cut: ContextCut, counts: np.ndarray) -> None:
    """Add this rank's pairs to [query, key], both numbered over all rows."""
    columns = zigzag_columns(cut.sequence, cut.parts, cut.index)
    own = np.add.outer(np.arange(cut.rows) * cut.sequence, columns)
    flat = own.ravel()
    for end, length in zip(accumulate(cut.segments), cut.segments, strict=True):
        some = flat[end - length : end]
        square = np.tril(np.ones((length, length), dtype=int))
        counts[np.ix_(some, some)] += np.triu(square, 1 - cut.window) if cut.window else square
    for one in cut.rectangles:
        for row in range(one.rows[0], sum(one.rows)):
            queries = own[row, one.queries[0] : sum(one.queries)]
            keys = row * cut.sequence + np.arange(one.keys[0], sum(one.keys))
            counts[np.ix_(queries, keys)] += _seen(one)


def _seen(one: Rectangle) -> np.ndarray:
    """1 for each pair of a query and a key that it sees, [query, key]."""
    seen = np.ones((one.queries[1], one.keys[1]), dtype=int)
    if isinstance(one.mask, WindowBand):
        seen[:] = 0
        for query, row in enumerate(seen):
            row[list(one.mask.keys_of(query, len(row)))] = 1
        assert seen.any(axis=1).all()
    return seen
