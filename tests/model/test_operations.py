"""The operations written by hand are their plain formulas, value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.model.linear import adapted_product
from plait.model.norm import RMSNorm
from plait.model.rotary import Rotary, rotate

DOUBLE = torch.float64


def same(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Equal values, and equal gradients for every input under the same weights."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=DOUBLE)
    for one, other in zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(2, 5, 12), (3, 4, 2, 12), (7, 12)])
def test_rms_norm(sizes: tuple[int, ...]) -> None:
    norm = RMSNorm(12, eps=1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(sizes, dtype=DOUBLE, requires_grad=True)
    same(norm(x), F.rms_norm(x, (12,), norm.weight, 1e-3), [x, norm.weight])


def test_rms_norm_of_a_strided_input_with_a_strided_gradient() -> None:
    norm = RMSNorm(12, eps=1e-3).double()
    x = torch.randn(5, 3, 12, dtype=DOUBLE, requires_grad=True)
    turned = x.transpose(0, 1)
    same(norm(turned).transpose(0, 1), F.rms_norm(turned, (12,), norm.weight, 1e-3).transpose(0, 1), [x])


def test_rms_norm_of_zeros_stays_finite() -> None:
    norm = RMSNorm(12, eps=1e-5)
    x = torch.zeros(2, 12, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    rotary = Rotary(sequence=50, head_width=6, theta=100.0)
    positions_bt = torch.tensor([[0, 1, 2, 49], [0, 1, 0, 7]])
    x = torch.randn(2, 4, 3, 6, dtype=DOUBLE, requires_grad=True)
    frequencies = torch.tensor([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)], dtype=DOUBLE)
    turns = torch.polar(torch.ones(2, 4, 1, 3, dtype=DOUBLE), (positions_bt[..., None] * frequencies)[:, :, None])
    pairs = torch.complex(x[..., :3], x[..., 3:]) * turns
    same(rotate(x, rotary(positions_bt, DOUBLE)), torch.cat((pairs.real, pairs.imag), dim=-1), [x])


def test_a_rotated_product_depends_on_the_distance_only() -> None:
    rotary = Rotary(sequence=100_001, head_width=8, theta=10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=DOUBLE)

    def product(query_at: int, key_at: int) -> float:
        turned = (rotate(x, rotary(torch.tensor([[at]]), DOUBLE)) for x, at in ((q, query_at), (k, key_at)))
        return float((next(turned) * next(turned)).sum())

    assert product(100_000, 99_990) == pytest.approx(product(10, 0), abs=1e-9)


@pytest.mark.parametrize("biased", ["biased", "plain"])
def test_a_frozen_product_with_its_adapter(biased: str) -> None:
    x, a, b = (torch.randn(size, dtype=DOUBLE, requires_grad=True) for size in ((7, 12), (3, 12), (5, 3)))
    weight, bias = torch.randn(5, 12, dtype=DOUBLE), torch.randn(5, dtype=DOUBLE) if biased == "biased" else None
    expected = F.linear(x, weight, bias) + 0.7 * F.linear(F.linear(x, a), b)
    same(adapted_product(x, weight, bias, a, b, 0.7), expected, [x, a, b])


def test_a_first_layer_s_input_needs_no_gradient() -> None:
    x, weight = torch.randn(7, 12), torch.randn(5, 12)
    a, b = (torch.randn(size, requires_grad=True) for size in ((3, 12), (5, 3)))
    adapted_product(x, weight, None, a, b, 0.7).sum().backward()
    assert x.grad is None and weight.grad is None and a.grad is not None and b.grad is not None


def test_under_autocast_gradients_of_an_adapter_stay_float32() -> None:
    x, weight = torch.randn(64, 12), torch.randn(5, 12)
    a, b = (torch.randn(size, requires_grad=True) for size in ((3, 12), (5, 3)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = adapted_product(x, weight.bfloat16(), None, a, b, 0.7)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), F.linear(x, weight + 0.7 * b @ a), rtol=0.05, atol=0.1)
    actual.float().square().sum().backward()
    assert a.grad is not None and a.grad.dtype == torch.float32
