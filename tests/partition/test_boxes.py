"""Rectangles: a weight's cover it exactly once, heads stay whole, and holders are those who hold the same."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.layout import AXES, Layout
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, weight_sizes
from plait.partition.boxes import (
    Box,
    boxes_of_range,
    cut_box,
    kv_heads_of,
    model_parts_of,
    ranks_holding,
    weight_boxes,
    whole_box,
)

LLAMA = ModelShape(layers=4, width=16, heads=4, kv_heads=2, head_width=4, ffn=25, vocabulary=41, sequence=8)
GPT2 = replace(LLAMA, kv_heads=4, norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True)
QWEN = replace(LLAMA, bias="qkv", qk_norm=True, tied=True)
LAYOUTS = [
    Layout(),
    Layout(tensor=4),
    Layout(tensor=2, replicate=2),
    Layout(pipeline=2, stage_layers=(2, 2)),
    Layout(pipeline=2, stage_layers=(1, 1, 1, 1), tensor=2),
    Layout(pipeline=3, stage_layers=(1, 2, 1), context=2, shard=2),
    Layout(pipeline=2, stage_layers=(3, 1), tensor=4, shard=2, context=2),
]


def held(shape: ModelShape, layout: Layout) -> dict[int, dict[str, Box]]:
    """What every rank holds."""
    return {rank: weight_boxes(shape, layout, layout.coordinates(rank)) for rank in range(layout.world_size)}


def numbers(box: Box) -> set[tuple[int, ...]]:
    """The places of a box' numbers in the whole weight."""
    return set(product(*(range(f, f + length) for f, length in zip(box.offset, box.extent, strict=True))))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [LLAMA, GPT2, QWEN], ids=["llama", "gpt2", "qwen"])
def test_different_rectangles_cover_each_weight_exactly_once(shape: ModelShape, layout: Layout) -> None:
    different: dict[str, set[Box]] = defaultdict(set)
    for places in held(shape, layout).values():
        for name, box in places.items():
            different[name].add(box)
    assert set(different) == set(weight_sizes(shape))
    for name, sizes in weight_sizes(shape).items():
        covered = [place for box in different[name] for place in numbers(box)]
        assert len(covered) == len(set(covered)) == prod(sizes)
        assert all(box.shape == sizes and box.numbers == len(numbers(box)) > 0 for box in different[name])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_holders_are_all_ranks_with_the_same_rectangle(shape: ModelShape, layout: Layout) -> None:
    places = held(shape, layout)
    for rank, own in places.items():
        for name, box in own.items():
            same = tuple(other for other, theirs in places.items() if theirs.get(name) == box)
            assert rank in same
            assert ranks_holding(shape, layout, name, box) == same


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_rank_holds_what_the_parts_of_its_model_have(shape: ModelShape, layout: Layout) -> None:
    for pipeline in range(layout.pipeline):
        with torch.device("meta"):
            chunks = [GPT(shape, part) for part in model_parts_of(shape, layout, pipeline)]
        names = {name for chunk in chunks for name, _ in chunk.named_parameters()}
        coordinates = dict.fromkeys(AXES, 0) | {"pipeline": pipeline}
        assert set(weight_boxes(shape, layout, coordinates)) == names


def test_the_stages_of_a_pipeline_hold_every_layer_once_in_order() -> None:
    layout = Layout(pipeline=2, stage_layers=(1, 0, 2, 1))
    first, second = (model_parts_of(LLAMA, layout, pipeline) for pipeline in range(2))
    assert [part.layers for part in first] == [(0,), (1, 2)]
    assert [part.layers for part in second] == [(), (3,)]
    assert [(part.embeds, part.ends) for part in (*first, *second)] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_both_ends_of_a_pipeline_hold_an_embedding_that_is_also_the_head() -> None:
    layout = Layout(pipeline=3, stage_layers=(1, 2, 1), replicate=2)
    box = whole_box((41, 16))
    assert ranks_holding(QWEN, layout, "embed.tokens.weight", box) == (0, 1, 4, 5)
    assert ranks_holding(LLAMA, layout, "embed.tokens.weight", box) == (0, 1)
    assert ranks_holding(GPT2, layout, "embed.positions.weight", whole_box((8, 16))) == (0, 1)


def test_heads_are_cut_between_heads_and_other_sizes_anywhere() -> None:
    def extents(name: str, parts: int) -> list[tuple[int, int]]:
        cuts = [cut_box(name, GPT2, parts, index) for index in range(parts)]
        (dim,) = [dim for dim in range(len(cuts[0].shape)) if cuts[0].extent[dim] != cuts[0].shape[dim]]
        return [(box.offset[dim], box.extent[dim]) for box in cuts]

    assert extents("layers.1.attention.q.weight", 2) == [(0, 8), (8, 8)]
    assert extents("layers.1.attention.q.bias", 4) == [(0, 4), (4, 4), (8, 4), (12, 4)]
    assert extents("layers.1.attention.o.weight", 2) == [(0, 8), (8, 8)]
    assert extents("layers.0.feedforward.down.weight", 3) == [(0, 9), (9, 8), (17, 8)]
    assert extents("embed.tokens.weight", 2) == [(0, 21), (21, 20)]
    for name in (
        "norm.weight",
        "layers.0.attention.o.bias",
        "layers.0.feedforward.down.bias",
        "embed.positions.weight",
    ):
        assert cut_box(name, GPT2, 4, 3) == whole_box(weight_sizes(GPT2)[name])


def test_key_value_heads_are_own_ones_shared_ones_or_all() -> None:
    def spans(heads: int, kv_heads: int, parts: int) -> list[tuple[int, int]]:
        shape = replace(LLAMA, heads=heads, kv_heads=kv_heads)
        return [kv_heads_of(shape, parts, index) for index in range(parts)]

    assert spans(8, 4, 2) == [(0, 2), (2, 2)]
    assert spans(8, 2, 4) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert spans(8, 1, 4) == [(0, 1)] * 4
    assert spans(6, 2, 3) == [(0, 2)] * 3
    assert spans(6, 3, 2) == [(0, 3)] * 2


@given(group=st.integers(1, 5), kv_heads=st.integers(1, 8), parts=st.integers(1, 8))
def test_a_rank_holds_the_key_value_heads_of_its_queries_and_spans_never_half_overlap(
    group: int, kv_heads: int, parts: int
) -> None:
    heads = group * kv_heads
    parts = min(parts, heads)
    shape = replace(LLAMA, heads=heads, kv_heads=kv_heads)
    spans = [kv_heads_of(shape, parts, index) for index in range(parts)]
    for index, (first, count) in enumerate(spans):
        queries = cut_box("layers.0.attention.q.weight", shape, parts, index)
        for row in range(queries.offset[0], queries.offset[0] + queries.extent[0]):
            assert first <= row // shape.head_width // group < first + count
    covered = [head for first, count in set(spans) for head in range(first, first + count)]
    assert sorted(covered) == list(range(kv_heads))


@given(
    sizes=st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 5), st.integers(1, 6))),
    data=st.data(),
)
def test_a_range_of_a_flattened_rectangle_is_the_same_numbers_in_rows(
    sizes: tuple[int, ...], data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, 3)) for _ in sizes)
    box = Box(shape=tuple(size + 4 for size in sizes), offset=offset, extent=sizes)
    first = data.draw(st.integers(0, box.numbers))
    last = data.draw(st.integers(0, box.numbers))
    flat = sorted(numbers(box))  # row by row, as memory has them
    found: list[tuple[int, ...]] = []
    at = first
    for part, start in boxes_of_range(box, first, last):
        assert part.shape == box.shape and start == at
        found += sorted(numbers(part))
        at += part.numbers
    assert found == flat[first:last]
