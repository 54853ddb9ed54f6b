"""Adapters' dropout: a pure function of token and place, of the right rate, and PEFT's arithmetic with its mask."""

from __future__ import annotations

from functools import partial
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from plait.model.adapter_shape import AdapterShape
from plait.model.dropout import input_salt, is_dropped, layer_noise, token_noise, without_dropped
from plait.model.linear import Linear, adapted_product

NUMBERS = torch.arange(5_000_000_000, 5_000_000_400)


def mask(*, seed: int = 1, layer: int = 0, name: str = "attention.q", first: int = 0, rate: float = 0.3) -> Tensor:
    noise = layer_noise(token_noise(NUMBERS, seed), layer)
    return is_dropped(noise, salt=input_salt(name), first=first, width=300 - first, rate=rate)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_in_each_token_and_each_place(rate: float) -> None:
    dropped = mask(rate=rate).double()
    spread = sqrt(rate * (1 - rate))
    assert abs(float(dropped.mean()) - rate) <= 4 * spread / sqrt(dropped.numel())
    for dim in (0, 1):
        means = dropped.mean(dim=dim)
        expected = spread / sqrt(dropped.shape[dim])
        assert float((means - rate).abs().max()) <= 5 * expected
        assert rate == 0 or 0.85 * expected < float(means.std()) < 1.15 * expected, "neither uneven nor too even"


def test_masks_of_other_seeds_layers_products_and_neighbours_have_nothing_in_common() -> None:
    own = mask()
    others = [
        mask(seed=2),
        mask(layer=1),
        mask(name="attention.k"),
        own.roll(1, 0),
        own.roll(1, 1),
        own.roll((1, 1), (0, 1)),
    ]
    for other in others:
        both = float((own & other).double().mean())
        assert abs(both - 0.09) < 5 * sqrt(0.09 * 0.91 / own.numel())


def test_a_token_loses_the_same_numbers_whoever_computes_it() -> None:
    own = mask()
    noise = layer_noise(token_noise(NUMBERS[37:90], 1), 0)
    part = is_dropped(noise, salt=input_salt("attention.q"), first=120, width=50, rate=0.3)
    assert torch.equal(part, own[37:90, 120:170])
    # In blocks, and at once where autograd looks on.
    x = torch.randn(400, 300)
    drop = partial(without_dropped, noise_n=layer_noise(token_noise(NUMBERS, 1), 0), salt=input_salt("attention.q"))
    blocks = drop(x, first=0, rate=0.3)
    assert torch.equal(blocks, x.masked_fill(own, 0.0))
    assert torch.equal(drop(x.requires_grad_(), first=0, rate=0.3), blocks)
    padded = drop(torch.ones(403, 300), first=0, rate=0.3)
    assert torch.equal(padded[:400] == 0, own)


def test_the_product_and_its_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(5)
    x, weight, bias, a, b = (torch.randn(*size, dtype=torch.float64) for size in ((9, 7), (6, 7), (6,), (2, 7), (6, 2)))
    noise = token_noise(torch.arange(9), 3)
    drop = partial(without_dropped, noise_n=noise, salt=4, first=0, rate=0.4)
    kept = ~is_dropped(noise, salt=4, first=0, width=7, rate=0.4)
    own, plain = ([one.clone().requires_grad_() for one in (x, a, b)] for _ in range(2))
    result = adapted_product(own[0], weight, bias, own[1], own[2], 0.7 / 0.6, drop=drop)
    expected = plain[0] @ weight.T + bias + 0.7 * (plain[0] * kept / 0.6) @ plain[1].T @ plain[2].T
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
    for one in (result, expected):
        one.sin().sum().backward()
    for mine, theirs in zip(own, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-13)


class Masked(nn.Module):
    """Stands in the place of PEFT's dropout, with a mask of ours."""

    def __init__(self, kept: Tensor, rate: float) -> None:
        super().__init__()
        self.kept, self.rate = kept, rate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept / (1 - self.rate)


@pytest.mark.slow
def test_with_the_same_mask_peft_computes_the_same() -> None:
    peft = pytest.importorskip("peft")
    adapter = AdapterShape(rank=3, alpha=5.0, targets=("attention.q",), dropout=0.25)
    ours = Linear(8, 6, bias=True, adapter=adapter)
    ours.salt = input_salt("attention.q")
    noise = layer_noise(token_noise(torch.arange(20), 9), 2)
    theirs = peft.get_peft_model(
        nn.Sequential(nn.Linear(8, 6)),
        peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.25, target_modules=["0"], init_lora_weights=False),
    )
    layer = theirs.base_model.model[0]
    assert isinstance(layer.lora_dropout["default"], nn.Dropout) and layer.lora_dropout["default"].p == 0.25
    kept = ~is_dropped(noise, salt=ours.salt, first=0, width=8, rate=0.25)
    layer.lora_dropout["default"] = Masked(kept, 0.25)
    assert ours.lora_a is not None and ours.lora_b is not None and ours.bias is not None
    with torch.no_grad():
        for mine, other in (
            (ours.weight, layer.base_layer.weight),
            (ours.bias, layer.base_layer.bias),
            (ours.lora_a, layer.lora_A["default"].weight),
            (ours.lora_b, layer.lora_B["default"].weight),
        ):
            mine.copy_(other)
    x = torch.randn(20, 8)
    wanted = theirs.train()(x)
    torch.testing.assert_close(ours(x, noise), wanted)
    assert not torch.allclose(ours(x), wanted, atol=1e-3)
