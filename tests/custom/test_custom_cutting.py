"""Batches cut by examples, and whole numbers of examples from shares."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from plait.custom.cutting import BatchCut, batch_part, batch_parts, batch_size, cut_sizes
from plait.errors import PlaitError

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    image: Tensor
    name: str


TEN = torch.arange(10)


@pytest.mark.parametrize(
    "batch",
    [
        TEN,
        (TEN, TEN * 2),
        [TEN, TEN.view(10, 1)],
        {"a": TEN, "b": [TEN, TEN], "scale": 2.0, "name": "x"},
        Pair(TEN, TEN),
        Record(image=TEN, name="x"),
        list("abcdefghij"),
        [{"nodes": number} for number in range(10)],
        [torch.zeros(1 + number) for number in range(10)],
        np.arange(10),
    ],
)
def test_a_batch_has_a_size_and_parts(batch: Any) -> None:
    assert batch_size(batch) == 10
    part = batch_part(batch, 2, 5)
    assert type(part) is type(batch)
    assert batch_size(part) == 3
    assert [batch_size(one) for one in batch_parts(batch, 4)] == [2, 3, 2, 3]


def test_parts_hold_the_examples_in_turn() -> None:
    assert torch.equal(torch.cat([part[0] for part in batch_parts((TEN, TEN), 3)]), TEN)
    assert [len(part) for part in batch_parts(TEN[:2], 5)] == [1, 1]


@pytest.mark.parametrize(
    "batch",
    [(TEN, TEN[:3]), 3, object(), {"a": object()}, pack_sequence([TEN, TEN[:2]]), torch.tensor(1.0), None],
)
def test_a_batch_that_cannot_be_cut_says_how_it_could(batch: Any) -> None:
    with pytest.raises(PlaitError, match="BatchCut"):
        batch_size(batch)


def test_a_kind_of_its_own_is_cut_as_told() -> None:
    cut = BatchCut(size=lambda batch: len(batch["x"]), part=lambda batch, first, end: {"x": batch["x"][first:end]})
    assert batch_size({"x": "abc", "y": object()}, cut) == 3
    assert batch_part({"x": "abc", "y": object()}, 1, 3, cut) == {"x": "bc"}


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 500))
def test_sizes_follow_shares_and_add_up(shares: list[float], more: int) -> None:
    total = len(shares) + more
    sizes = cut_sizes(total, shares)
    assert sum(sizes) == total and min(sizes) >= 1
    assert cut_sizes(total, shares) == sizes
    for size, share in zip(sizes, shares, strict=True):
        assert size >= int(share * total / sum(shares)) - len(shares)


def test_equal_shares_differ_by_one_at_most() -> None:
    assert cut_sizes(10, [1, 1, 1]) == (4, 3, 3)
    assert cut_sizes(6, [2, 1]) == (4, 2)
    with pytest.raises(PlaitError, match="each needs one example"):
        cut_sizes(2, [1, 1, 1])
