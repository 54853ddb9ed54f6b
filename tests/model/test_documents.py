"""Masked documents: each gives what it gives alone, and nothing of size T × T is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.model.attention import Documents, attend
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape

ROPE = ModelShape(layers=2, width=32, heads=4, kv_heads=2, head_width=8, ffn=64, vocabulary=50, sequence=24)
SHAPES = pytest.mark.parametrize(
    "shape", [ROPE, replace(ROPE, positions="learned", kv_heads=4)], ids=["rope, grouped", "learned"]
)
UNEVEN = (5, 19, 24, 1, 11, 12)
"""Three rows of 24: two documents, one that fills its row, three."""
LENGTHS = pytest.mark.parametrize("lengths", [UNEVEN, (8,) * 9, (24,) * 3], ids=["uneven", "equal", "whole rows"])


def gradients(model: GPT, hidden: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The gradients of a scalar that weighs every hidden number."""
    model.zero_grad()
    (hidden * weights).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@SHAPES
@LENGTHS
def test_documents_give_what_they_give_alone(shape: ModelShape, lengths: tuple[int, ...]) -> None:
    model = GPT(shape).double()
    initialize(model, 4)
    generator = torch.Generator().manual_seed(2)
    tokens_n = torch.randint(0, shape.vocabulary, (72,), generator=generator)
    weights_nd = torch.randn(72, shape.width, generator=generator, dtype=torch.float64)
    positions_n = torch.cat([torch.arange(length) for length in lengths])

    hidden = model(tokens_n.view(3, 24), positions_n.view(3, 24), Documents(lengths))
    masked = gradients(model, hidden, weights_nd)

    alone = torch.cat([model(part[None]) for part in tokens_n.split(lengths)])
    torch.testing.assert_close(hidden, alone, rtol=0, atol=1e-12)
    expected = gradients(model, alone, weights_nd)
    assert masked.keys() == expected.keys()
    for name, gradient in masked.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-11, msg=name)


def test_without_the_mask_a_document_sees_the_earlier_one() -> None:
    """Guards the test above: the mask must matter."""
    model = GPT(ROPE).double()
    initialize(model, 4)
    tokens_bt = torch.randint(0, ROPE.vocabulary, (3, 24))
    assert (model(tokens_bt) - model(tokens_bt, documents=Documents(UNEVEN))).abs().max() > 1e-3


class Largest(TorchDispatchMode):
    """Watches every operation for the largest tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(item, Tensor):
                self.numbers = max(self.numbers, item.numel())
        return made


@pytest.mark.parametrize("lengths", [(1024,), (300, 724), (128,) * 8])
def test_nothing_of_the_size_of_the_square_is_made(lengths: tuple[int, ...]) -> None:
    q_bthd, k_bthd, v_bthd = (torch.randn(1, 1024, 2, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        attend(q_bthd, k_bthd, v_bthd, Documents(lengths)).sum().backward()
    assert 1024 * 2 * 8 <= largest.numbers < 1024 * 1024 / 8
