"""Curves of one line."""

from __future__ import annotations

import math

import pytest

from plait.screen.console import sparkline


def test_a_falling_curve_falls_over_all_levels():
    assert sparkline(list(range(80, 0, -1)), 8, "utf-8") == "█▇▆▅▄▃▂▁"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no such encoding"])
def test_an_encoding_without_blocks_gets_plain_characters(encoding):
    assert sparkline(list(range(8)), 8, encoding) == "_.-=+*%#"


def test_fewer_values_than_columns_have_one_character_each():
    assert sparkline([1.0, 2.0, 3.0], 24, "utf-8") == "▁▅█"


def test_one_value_or_none_is_no_curve_and_equal_ones_are_flat():
    assert [sparkline(values, 8, "utf-8") for values in ([], [1.0], [math.nan, 1.0], [2.0, 2.0])] == ["", "", "", "▁▁"]


def test_what_is_not_finite_is_left_out():
    assert sparkline([3.0, math.inf, math.nan, 1.0], 8, "utf-8") == "█▁"
