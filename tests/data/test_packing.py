from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.packing import restarting_positions, segment_lengths
from plait.data.shards import Shard


def shard(starts: list[int], tokens: int) -> Shard:
    return Shard(source=0, tokens=np.zeros(tokens, dtype="<u2"), starts=np.array(starts, dtype=np.int64))


def test_segments_of_one_row_worked_out_by_hand() -> None:
    shards = (shard([0, 3, 7, 8], 20),)
    lengths = segment_lengths(shards, np.array([0, 0]), np.array([2, 7]), 6)
    # Row 2..7: document starts at 3 and 7; row 7..12: at 7 (the row's own beginning) and 8.
    assert lengths.tolist() == [1, 4, 1, 1, 5]
    assert restarting_positions(lengths).tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_positions_restart_exactly_at_row_beginnings_and_document_starts(data: st.DataObject) -> None:
    shards = []
    for _ in range(data.draw(st.integers(1, 3))):
        tokens = data.draw(st.integers(12, 60))
        shards.append(shard(sorted({0, *data.draw(st.lists(st.integers(1, tokens - 2)))}), tokens))
    sequence = data.draw(st.integers(1, 9))
    rows = data.draw(st.lists(st.tuples(st.integers(0, len(shards) - 1), st.integers(0, 60)), min_size=1, max_size=6))
    which = np.array([row[0] for row in rows])
    first = np.array([min(row[1], len(shards[row[0]].tokens) - 1 - sequence) for row in rows])
    lengths = segment_lengths(tuple(shards), which, first, sequence)
    expected = []
    for number, start in zip(which, first, strict=True):
        position = -1
        for place in range(start, start + sequence):
            position = 0 if place == start or place in shards[number].starts else position + 1
            expected.append(position)
    assert restarting_positions(lengths).tolist() == expected
    assert lengths.sum() == len(rows) * sequence and (lengths > 0).all()
    assert set(np.arange(len(rows)) * sequence) <= {0, *np.cumsum(lengths).tolist()}, "a segment crosses a row"
