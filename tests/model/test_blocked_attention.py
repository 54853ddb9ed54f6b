"""Attention in blocks is torch's attention, with its gradients, in every precision, for rows that no block divides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.model.attention import Documents, attend
from plait.model.blocked_attention import LEAST_TOKENS, attend_in_blocks, suits_blocks
from plait.model.matmul import has_onednn, matmul_library, select_matmul_library


@pytest.fixture(autouse=True)
def default_afterwards() -> Iterator[None]:
    yield
    select_matmul_library("default")


def inputs(rows: int, heads: int, kv_heads: int, tokens: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(tokens)
    sizes = [(rows, count, tokens, width) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


def with_gradients(mixed: Tensor, given: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    grad = torch.randn(mixed.shape, dtype=torch.float64).to(mixed.dtype)
    return [mixed.detach(), *torch.autograd.grad(mixed, given, grad)]


@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 700])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
def test_it_is_attention_with_its_gradients(tokens: int, heads: int, kv_heads: int) -> None:
    given = inputs(2, heads, kv_heads, tokens, 8, torch.float64)
    blocked = with_gradients(attend_in_blocks(*given), given)
    q, k, v = given
    torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    for one, other in zip(blocked, with_gradients(torchs, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("tokens", [130, 600])
def test_it_rounds_as_its_precision_does(dtype: torch.dtype, error: float, tokens: int) -> None:
    given = inputs(2, 2, 2, tokens, 64, dtype)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in given]
    wanted = with_gradients(F.scaled_dot_product_attention(q, k, v, is_causal=True), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as a forward pass calls it
        mixed = attend_in_blocks(*given)
    for one, other in zip(with_gradients(mixed, given), wanted, strict=True):
        assert one.dtype == dtype
        assert float((one - other).norm() / other.norm()) < error


def test_it_is_taken_for_long_rows_in_bf16_or_by_onednn() -> None:
    long, short = (torch.zeros(1, 2, tokens, 8) for tokens in (LEAST_TOKENS, LEAST_TOKENS - 1))
    assert suits_blocks(long.bfloat16()) and not suits_blocks(short.bfloat16())
    assert not suits_blocks(long) and not suits_blocks(long.double())
    if has_onednn():
        with matmul_library("onednn"):
            assert suits_blocks(long) and not suits_blocks(short) and not suits_blocks(long.double())


@pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")
def test_documents_attend_alone_by_either_library_within_float32s_rounding() -> None:
    torch.manual_seed(0)
    q, k, v = given = [torch.randn(2, 400, 2, 16, requires_grad=True) for _ in range(3)]
    documents = Documents(lengths=(300, 10, 90, 400))
    default = with_gradients(attend(q, k, v, documents), given)
    with matmul_library("onednn"):
        onednn = with_gradients(attend(q, k, v, documents), given)
    assert not torch.equal(default[0], onednn[0])
    for one, other in zip(default, onednn, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
