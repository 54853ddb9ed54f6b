"""Every named size is what its name says; explicit fields win."""

from __future__ import annotations

import pytest

from plait.errors import PlaitError
from plait.model.shape import ModelShape, parameter_count
from plait.model.sizes import MODEL_SIZES, explicit_shape, named_shape, nearest_size
from plait.units import parse_count


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_a_size_has_about_the_parameters_of_its_name(size: str) -> None:
    shape = named_shape(size, vocabulary=MODEL_SIZES[size].vocabulary, sequence=1024)
    assert parameter_count(shape) == pytest.approx(parse_count(size), rel=0.1)
    assert shape.layers >= 2
    assert shape.heads % 2 == 0
    assert shape.head_width in (32, 64, 128)
    assert shape.head_width * shape.heads == shape.width


def test_sizes_stand_in_the_order_of_their_counts() -> None:
    counts = [parse_count(size) for size in MODEL_SIZES]
    assert counts == sorted(counts)


def test_explicit_fields_win_over_the_size() -> None:
    shape = named_shape("5M", vocabulary=300, sequence=64, ffn=100, bias="all", tied=False, norm="layernorm")
    assert (shape.ffn, shape.bias, shape.tied, shape.norm) == (100, "all", False, "layernorm")
    assert (shape.vocabulary, shape.sequence) == (300, 64)


def test_open_fields_follow_an_explicit_width_or_activation() -> None:
    wider = named_shape("5M", vocabulary=300, sequence=64, width=384)
    assert (wider.heads, wider.head_width, wider.ffn) == (12, 32, 1024)
    assert named_shape("5M", vocabulary=300, sequence=64, activation="gelu").ffn == 4 * 256
    grouped = named_shape("8B", vocabulary=300, sequence=64, heads=16)
    assert (grouped.kv_heads, grouped.head_width) == (16, 256)


def test_a_shape_without_a_size_needs_layers_and_width_only() -> None:
    shape = explicit_shape(layers=3, width=96, vocabulary=50, sequence=16)
    assert shape == ModelShape(
        layers=3, width=96, heads=4, kv_heads=4, head_width=24, ffn=256, vocabulary=50, sequence=16, tied=True
    )
    assert explicit_shape(layers=3, width=96, vocabulary=50, sequence=16, heads=2, kv_heads=1).head_width == 48


def test_head_width_need_not_follow_from_the_width() -> None:
    shape = explicit_shape(layers=3, width=100, vocabulary=50, sequence=16, heads=6, head_width=32)
    assert (shape.head_width, shape.heads) == (32, 6)


def test_unknown_sizes_and_heads_that_do_not_fit_are_refused_with_a_choice() -> None:
    with pytest.raises(PlaitError, match='no model size "6M"; choose one of 250K, 500K, 1M, 3M'):
        named_shape("6M", vocabulary=300, sequence=64)
    with pytest.raises(PlaitError, match="heads = 7 does not divide width 96; choose 2 or 4 or 6"):
        explicit_shape(layers=3, width=96, vocabulary=50, sequence=16, heads=7)
    with pytest.raises(PlaitError, match="width = 50 cannot be shared"):
        explicit_shape(layers=3, width=50, vocabulary=50, sequence=16)


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_the_nearest_size_to_a_size_is_itself(size: str) -> None:
    vocabulary = MODEL_SIZES[size].vocabulary
    count = parameter_count(named_shape(size, vocabulary=vocabulary, sequence=1024))
    assert nearest_size(count * 1.02, vocabulary) == size
