"""Owners of whole matrices: balanced, the same for all, and fed with each piece once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from plait.layout import Layout, equal_share
from plait.model.names import is_hidden_matrix
from plait.model.shape import ModelShape
from plait.partition.boxes import Box, weight_boxes
from plait.partition.matrix_owners import CopiesCompute, MatrixTask, Piece, assign_owners, orthogonalization_flops

SHAPE = ModelShape(layers=12, width=768, heads=12, kv_heads=4, head_width=64, ffn=2048, vocabulary=4096, sequence=64)
LAYOUTS = {
    "copies": Layout(replicate=8),
    "tensor": Layout(tensor=4),
    "copies × tensor": Layout(replicate=2, tensor=4),
    "more ranks than key heads": Layout(tensor=12),
    "rows": Layout(replicate=2, shard=3, shard_what="parameters"),
    "rows × tensor": Layout(shard=2, tensor=2, shard_what="parameters", context=2),
}


def pieces_of(layout: Layout, shape: ModelShape = SHAPE) -> list[list[Piece]]:
    """Each rank's pieces: its box of each matrix, or its rows of it."""
    found: list[list[Piece]] = []
    for rank in range(layout.world_size):
        here = layout.coordinates(rank)
        boxes = {name: box for name, box in weight_boxes(shape, layout, here).items() if is_hidden_matrix(name)}
        found.append([Piece(name=name, box=_rows(box, layout, here["shard"])) for name, box in boxes.items()])
    return found


def _rows(box: Box, layout: Layout, index: int) -> Box:
    first, rows = equal_share(box.extent[0], layout.shard, index)
    return Box(shape=box.shape, offset=(box.offset[0] + first, box.offset[1]), extent=(rows, box.extent[1]))


def loads(tasks: Sequence[MatrixTask], ranks: int) -> list[float]:
    found = [0.0] * ranks
    for task in tasks:
        found[task.owner] += orthogonalization_flops(*task.shape)
    return found


@pytest.mark.parametrize("copies", ["one for all", "each for itself"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_owner_gets_the_whole_matrix_once_and_each_piece_its_result_once(name: str, copies: CopiesCompute) -> None:
    pieces = pieces_of(LAYOUTS[name])
    tasks = assign_owners(pieces, copies)
    received = Counter((one.rank, one.number) for task in tasks for one in task.receivers)
    assert received == {(rank, number): 1 for rank, some in enumerate(pieces) for number in range(len(some))}
    for task in tasks:
        seen = Counter(
            (row, one.box.offset[1])
            for one in task.sources
            for row in range(one.box.offset[0], one.box.offset[0] + one.box.extent[0])
        )
        assert max(seen.values()) == 1
        assert sum(one.box.numbers for one in task.sources) == task.shape[0] * task.shape[1]
        assert all(pieces[one.rank][one.number].name == task.name for one in (*task.sources, *task.receivers))
        ranks = {one.rank for one in task.receivers}
        assert task.owner in ranks and {one.rank for one in task.sources} <= ranks


@pytest.mark.parametrize("name", LAYOUTS)
def test_owners_costs_are_within_a_tenth_of_each_other(name: str) -> None:
    layout = LAYOUTS[name]
    found = loads(assign_owners(pieces_of(layout), "one for all"), layout.world_size)
    assert max(found) <= 1.1 * min(found)


def test_copies_that_compute_for_themselves_send_nothing_and_tensor_ranks_stay_within_their_copy() -> None:
    alone = assign_owners(pieces_of(Layout(replicate=3)), "each for itself")
    assert len(alone) == 3 * 12 * 7 and all(
        {one.rank for one in (*task.sources, *task.receivers)} == {task.owner} for task in alone
    )
    layout = Layout(replicate=2, tensor=4)
    for task in assign_owners(pieces_of(layout), "each for itself"):
        assert {layout.coordinates(one.rank)["replicate"] for one in task.receivers} == {task.owner // 4}


def test_an_owner_takes_pieces_of_its_own_before_those_of_others() -> None:
    for task in assign_owners(pieces_of(Layout(replicate=4)), "one for all"):
        assert [one.rank for one in task.sources] == [task.owner]
