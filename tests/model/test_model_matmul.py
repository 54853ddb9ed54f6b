"""The library of float32 products is one switch of a process, which attention and GPUs' settings stay out of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.model.attention import Documents, attend
from plait.model.matmul import (
    has_onednn,
    matmul_library,
    select_matmul_library,
    selected_matmul_library,
)

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def default_afterwards() -> Iterator[None]:
    yield
    select_matmul_library("default")


def attended(library: str) -> list[Tensor]:
    """Attention's result and gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 32, 2, 16, requires_grad=True) for _ in range(3))
    select_matmul_library("onednn" if library == "onednn" else "default")
    mixed = attend(q, k, v, Documents(lengths=(20, 12, 32)))
    return [mixed.detach(), *torch.autograd.grad(mixed.square().sum(), [q, k, v])]


@needs_onednn
def test_attention_computes_the_same_bits_whichever_library_is_selected() -> None:
    default, onednn = attended("default"), attended("onednn")
    assert selected_matmul_library() == "onednn", "as before, also after a backward pass"
    for one, other in zip(default, onednn, strict=True):
        assert torch.equal(one, other)


@needs_onednn
def test_a_linear_layers_products_are_the_selected_librarys_and_nearly_equal() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 257), torch.randn(511, 257)
    exact = x.double() @ weight.double().T
    with matmul_library("onednn"):
        other = F.linear(x, weight)
    default = F.linear(x, weight)
    assert ((default - exact).norm() / exact.norm()) < 1e-6 and other.shape == default.shape
    assert selected_matmul_library() == "default"


@needs_onednn
def test_the_block_gives_back_what_was_selected_also_after_an_error() -> None:
    select_matmul_library("onednn")
    with pytest.raises(ValueError), matmul_library("default"):
        raise ValueError
    assert selected_matmul_library() == "onednn"


def test_gpus_and_the_old_call_stay_as_they_are() -> None:
    before = torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()
    with matmul_library("onednn"):
        assert torch.backends.cuda.matmul.fp32_precision == before[0]
    assert (torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()) == before
