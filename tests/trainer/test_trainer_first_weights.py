"""First weights that are drawn several at a time are those that are drawn one after the other."""

from __future__ import annotations

import threading

import pytest
import torch

from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.sizes import explicit_shape
from plait.parallel.sharded_model import HeldWeight
from plait.partition.boxes import Box, whole_box
from plait.trainer import first_weights

SHAPE = explicit_shape(layers=3, width=32, vocabulary=64, sequence=16)


@pytest.mark.parametrize("threads", [1, 2, 100])
def test_weights_drawn_at_once_have_the_bits_of_one_process(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set[str]()
    drawn = first_weights.first_value

    def noted(*asked: object) -> torch.Tensor:
        names.add(threading.current_thread().name)
        return drawn(*asked)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(first_weights, "first_value", noted)
    one, other = GPT(SHAPE), GPT(SHAPE)
    initialize(one, 5)
    held = [
        HeldWeight(name=name, tensor=weight, box=whole_box(weight.shape)) for name, weight in other.named_parameters()
    ]
    first_weights.initialize_weights(held, SHAPE, 5)
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    assert 1 <= len(names) <= min(threads, first_weights.WEIGHTS_AT_ONCE)


def test_a_part_of_a_weight_that_learns_is_filled_without_a_graph() -> None:
    whole, part = GPT(SHAPE), torch.nn.Parameter(torch.empty(8, 16))
    initialize(whole, 5)
    name = "layers.1.attention.q.weight"
    first_weights.initialize_weights(
        [HeldWeight(name=name, tensor=part, box=Box(shape=(32, 32), offset=(8, 16), extent=(8, 16)))], SHAPE, 5
    )
    assert torch.equal(part, dict(whole.named_parameters())[name][8:16, 16:32]) and part.is_leaf
