"""First weights depend on the seed and their names alone."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from plait.model.gpt import GPT
from plait.model.init import first_std, first_value, initialize
from plait.model.shape import ModelShape, weight_sizes

SHAPE = ModelShape(
    layers=4, width=64, heads=4, kv_heads=2, head_width=16, ffn=96, vocabulary=200, sequence=32, bias="qkv"
)


def build(seed: int, *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = GPT(SHAPE).to(dtype)
    model.to_empty(device="cpu")
    initialize(model, seed)
    return dict(model.named_parameters())


def test_weights_do_not_depend_on_the_global_generator_or_the_order_of_modules() -> None:
    torch.manual_seed(1)
    whole = build(7)
    for name in reversed(weight_sizes(SHAPE)):
        assert torch.equal(whole[name], first_value(name, SHAPE, 7)), name


def test_another_seed_and_another_name_draw_other_weights() -> None:
    first, second = build(7), build(8)
    matrices = [name for name, weight in first.items() if weight.ndim == 2]
    assert not any(torch.equal(first[name], second[name]) for name in matrices)
    assert not torch.equal(first["layers.0.attention.q.weight"], first["layers.1.attention.q.weight"])


def test_values_have_the_stated_spread_and_norms_begin_as_the_identity() -> None:
    for name, weight in build(3).items():
        if weight.ndim == 2:
            assert weight.std().item() == pytest.approx(first_std(name, SHAPE), rel=0.05), name
            assert abs(weight.mean().item()) < 4 * first_std(name, SHAPE) / sqrt(weight.numel())
        else:
            assert torch.all(weight == (0.0 if name.endswith("bias") else 1.0)), name


def test_float64_models_begin_with_the_float32_values() -> None:
    single, double = build(3), build(3, dtype=torch.float64)
    assert all(torch.equal(double[name], weight.double()) for name, weight in single.items())


def test_known_draws_stay() -> None:
    """Bits that later versions and other machines must reproduce."""
    drawn = first_value("layers.0.attention.q.weight", SHAPE, 1)
    assert [value.hex() for value in drawn[0, :2].tolist()] == ["0x1.28e82e0000000p-5", "-0x1.a84a340000000p-3"]
