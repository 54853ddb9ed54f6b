"""The table of weights covers every model, and says what may be cut and what decays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.model.names import DIMS, cut_dim, decays, dims_of, layer_of, pattern_of
from plait.model.shape import ModelShape, weight_sizes

SHAPE = ModelShape(layers=12, width=48, heads=6, kv_heads=2, head_width=8, ffn=80, vocabulary=97, sequence=32)
EVERYTHING = replace(SHAPE, norm="layernorm", positions="learned", bias="all", qk_norm=True)


def test_the_table_has_the_weights_of_the_fullest_shape_and_no_others() -> None:
    assert {pattern_of(name) for name in weight_sizes(EVERYTHING)} == set(DIMS)


def test_a_weight_is_found_by_its_layer() -> None:
    assert layer_of("layers.11.attention.k.weight") == 11
    assert layer_of("norm.weight") is None
    assert dims_of("layers.11.attention.k.weight") == ("kv_heads", "width")
    with pytest.raises(KeyError):
        dims_of("layers.0.attention.z.weight")


def test_columns_are_cut_before_the_nonlinearity_and_rows_after_it() -> None:
    cuts = {
        name: cut_dim(f"layers.0.{name}") for name in ("attention.q.weight", "attention.q.bias", "attention.o.weight")
    }
    assert cuts == {"attention.q.weight": 0, "attention.q.bias": 0, "attention.o.weight": 1}
    assert cut_dim("layers.0.feedforward.down.weight") == 1
    assert cut_dim("layers.0.feedforward.down.bias") is None
    assert cut_dim("embed.tokens.weight") == 0
    assert cut_dim("norm.weight") is None


def test_only_the_matrices_of_linear_layers_decay() -> None:
    decaying = {pattern_of(name) for name in weight_sizes(EVERYTHING) if decays(name)}
    linear = {name for name in DIMS if name.endswith(".weight") and "norm" not in name and not name.startswith("embed")}
    assert decaying == linear
