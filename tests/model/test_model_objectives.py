"""Heads in the middle and prediction ahead: which shapes have them, what they hold, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from plait.data.loader import IGNORED_TARGET
from plait.data.packing import rows_ahead
from plait.errors import PlaitError
from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape
from plait.model.parts.objectives import NO_OBJECTIVES, ObjectivesShape, objectives_of_keys
from plait.model.shape import ModelShape, parameter_count, weight_sizes
from plait.model.weights import training_flops_per_token
from plait.partition.boxes import all_sharing_sets, model_parts_of, ranks_holding, weight_boxes, whole_box

PLAIN = ModelShape(layers=4, width=64, heads=4, kv_heads=2, head_width=16, ffn=128, vocabulary=96, sequence=16)
BOTH = replace(PLAIN, objectives=ObjectivesShape(heads=(1, 3), head_weights=(0.3, 0.3), ahead=2))


def test_a_model_has_their_weights_and_no_other() -> None:
    added = {name: prod(sizes) for name, sizes in weight_sizes(BOTH).items() if name not in weight_sizes(PLAIN)}
    of_layer = sum(size for name, size in added.items() if name.startswith("layers.4."))
    layer = sum(prod(sizes) for name, sizes in weight_sizes(PLAIN).items() if name.startswith("layers.3."))
    assert of_layer == layer
    assert added["ahead.2.projection.weight"] == 2 * 64 * 64 and added["auxiliary.3.norm.weight"] == 64
    assert parameter_count(BOTH) - parameter_count(PLAIN) == 2 * (layer + 2 * 64 * 64 + 3 * 64) + 2 * 64


def test_a_saved_shape_comes_back_and_an_old_one_is_as_it_was() -> None:
    assert ModelShape.from_dict(json.loads(json.dumps(BOTH.to_dict()))) == BOTH
    assert "objectives" not in PLAIN.to_dict() and ModelShape.from_dict(PLAIN.to_dict()).objectives == NO_OBJECTIVES


def test_their_arithmetic_counts() -> None:
    more = training_flops_per_token(BOTH, 16, "full") - training_flops_per_token(PLAIN, 16, "full")
    matrices = sum(
        prod(sizes) for name, sizes in weight_sizes(PLAIN).items() if name.startswith("layers.3.") and len(sizes) == 2
    )
    assert more == 6 * (4 * 96 * 64 + 2 * (matrices + 2 * 64 * 64)) + 2 * 12 * 64 * 16


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"auxiliary_heads": [2, 4]}, "names 4, and a model of 4 layers has its own head .* from 1 to 3"),
        ({"auxiliary_heads": [9]}, "names 9, .* choose numbers from 1 to 3"),
        ({"auxiliary_heads": [2, 2]}, "names a layer twice; name each once"),
        ({"auxiliary_heads": [2], "auxiliary_head_weight": -0.5}, "auxiliary_head_weight is -0.5; choose a number of"),
        ({"auxiliary_heads": [1, 2], "auxiliary_head_weight": [0.5]}, "has 1 numbers, and there are 2 heads"),
        ({"auxiliary_head_weight": 0.5}, "model.auxiliary_heads names none; take it out"),
        ({"predict_ahead_weight": 0.5}, "model.predict_ahead names none; take it out"),
        ({"predict_ahead": 16}, "looks beyond a sequence of 16 tokens; choose at most 15"),
        (
            {"predict_ahead": 1, "predict_ahead_weight": -1.0},
            "predict_ahead_weight is -1.0; choose a number of at least",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        replace(PLAIN, objectives=objectives_of_keys(keys))


def test_a_model_of_one_layer_and_one_with_an_adapter_are_refused() -> None:
    with pytest.raises(PlaitError, match="no layer in the middle"):
        replace(PLAIN, layers=1, objectives=objectives_of_keys({"auxiliary_heads": [1]}))
    with pytest.raises(PlaitError, match="adapters with"):
        replace(BOTH, adapter=AdapterShape(rank=2, alpha=2.0, targets=("attention.q",)))


def test_weights_go_with_their_heads_and_auto_is_nothing() -> None:
    found = objectives_of_keys(
        {"auxiliary_heads": [3, 1], "auxiliary_head_weight": [0.1, 0.9], "predict_ahead": "auto"}
    )
    assert dict(found.weights) == {"layer_1": 0.9, "layer_3": 0.1}
    assert objectives_of_keys({"auxiliary_heads": "auto", "predict_ahead": 0}) == NO_OBJECTIVES
    assert dict(objectives_of_keys({"predict_ahead": 2}).weights) == {"ahead_1": 0.15, "ahead_2": 0.15}


def test_a_rank_holds_each_table_once_and_all_users_share_it() -> None:
    """Stages 0 to 5 on two ranks; heads on stages 0 and 3, the model's own on 5, which looks tokens up as 0 does."""
    shape = replace(BOTH, layers=6, objectives=replace(BOTH.objectives, heads=(1, 4)))
    layout = Layout(pipeline=2, stage_layers=(1,) * 6, schedule="interleaved")
    head, embedding = ("head.weight", whole_box((96, 64))), ("embed.tokens.weight", whole_box((96, 64)))
    assert ranks_holding(shape, layout, *head) == ranks_holding(shape, layout, *embedding) == (0, 1)
    assert [part.borrows for part in model_parts_of(shape, layout, 0)] == [(), (), ()]
    assert [part.borrows for part in model_parts_of(shape, layout, 1)] == [(), (), ("head.weight",)]
    tied = model_parts_of(replace(shape, tied=True), layout, 1)
    assert [part.borrows for part in tied] == [(), (), ("embed.tokens.weight",)]
    for pipeline in range(2):
        here = {"pipeline": pipeline, "replicate": 0, "shard": 0, "context": 0, "tensor": 0}
        assert {"head.weight", "embed.tokens.weight"} <= set(weight_boxes(shape, layout, here))
    assert (0, 1) in all_sharing_sets(shape, layout)


def test_what_is_ahead_stays_within_row_and_document() -> None:
    inputs, targets = np.arange(12).reshape(2, 6), np.arange(1, 13).reshape(2, 6)
    tokens, wanted = rows_ahead(inputs, targets, np.array([4, 2, 6]), 1, ignored=IGNORED_TARGET)
    skip = IGNORED_TARGET
    assert wanted.tolist() == [[2, 3, 4, skip, 6, skip], [8, 9, 10, 11, 12, skip]]
    assert tokens[:, :-1].tolist() == inputs[:, 1:].tolist()
    _, wanted = rows_ahead(inputs, targets, np.array([4, 2, 6]), 2, ignored=IGNORED_TARGET)
    assert wanted.tolist() == [[3, 4, skip, skip, skip, skip], [9, 10, 11, 12, skip, skip]]
    _, wanted = rows_ahead(inputs, targets, None, 2, ignored=IGNORED_TARGET)
    assert wanted.tolist() == [[3, 4, 5, 6, skip, skip], [9, 10, 11, 12, skip, skip]]
