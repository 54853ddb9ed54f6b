"""Shapes of sizes that have no row of their own."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import PlaitError
from plait.model.requested_size import parameters_of_size, shape_of_size
from plait.model.shape import ModelShape, parameter_count
from plait.model.sizes import MODEL_SIZES, named_shape
from plait.units import parse_count
from tests.matrix import few_fast


def shape(size: str, vocabulary: int = 50304, **explicit: Any) -> ModelShape:
    return shape_of_size(size, vocabulary=vocabulary, sequence=1024, **explicit)


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_named_sizes_stay_as_they_are_however_they_are_written(size: str) -> None:
    row = named_shape(size, vocabulary=32000, sequence=1024)
    for text in (size, size.lower(), str(parse_count(size))):
        assert shape(text, 32000) == row
    assert parameters_of_size(size, vocabulary=32000) == parameter_count(row)


@pytest.mark.parametrize(
    ("size", "vocabulary"),
    few_fast(
        [
            ("600K", 300),
            ("2M", 1024),
            ("16M", 4096),
            ("200M", 32768),
            ("900M", 50304),
            ("2.6B", 50304),
            ("1.2T", 128256),
        ],
        ("600K", 300),
        ("16M", 4096),
        ("1.2T", 128256),
    ),
)
def test_any_size_has_about_its_number_of_parameters_and_a_usual_ratio(size: str, vocabulary: int) -> None:
    found = shape(size, vocabulary)
    assert parameter_count(found) == pytest.approx(parse_count(size), rel=0.04)
    assert 24 <= found.width / found.layers <= 192 or found.width == 64
    assert found.heads % 2 == 0 and found.head_width in (32, 64, 128)
    assert parameters_of_size(size, vocabulary=vocabulary) == parse_count(size)


def test_published_shapes_of_the_size_are_near() -> None:
    """GPT-3 2.7B (Brown et al. 2020, table 2.1) has 32 layers of width 2560."""
    found = shape("2.7B")
    assert 28 <= found.layers <= 34 and found.width == 2560


def test_what_is_named_beside_the_size_is_kept_and_the_rest_makes_the_size() -> None:
    assert shape("2.6B", layers=20).layers == 20
    assert parameter_count(shape("2.6B", layers=20)) == pytest.approx(2.6e9, rel=0.03)
    assert shape("2.6B", width=2048).width == 2048
    assert parameter_count(shape("2.6B", width=2048)) == pytest.approx(2.6e9, rel=0.03)
    grouped = shape("2.6B", kv_heads=4, activation="gelu", tied=True)
    assert (grouped.kv_heads, grouped.activation, grouped.tied) == (4, "gelu", True)
    assert parameter_count(grouped) == pytest.approx(2.6e9, rel=0.04)


@pytest.mark.parametrize(
    ("size", "explicit", "told"),
    [
        ("100K", {}, 'a vocabulary of 50304 has about 100K parameters; choose model.size = "3.'),
        ("2.6B", {"width": 100}, 'and width = 100 has about 2.6B parameters; choose model.size = "1'),
        ("2.6B", {"layers": 4, "width": 256}, "or leave out layers = 4 and width = 256"),
        ("2.6B", {"width": 2050}, "width = 2050"),
    ],
)
def test_a_size_that_no_shape_has_is_refused_with_the_nearest(size: str, explicit: dict[str, int], told: str) -> None:
    with pytest.raises(PlaitError, match=told):
        shape(size, **explicit)
