"""Attention and experts in shapes that documents and routing do not change, for devices that compile each shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from plait.model.attention import Documents, attend, attend_cached
from plait.model.expert_blocks import block_product, blocks_by_expert, from_blocks, to_blocks
from plait.model.masked_attention import LEAST_WINDOW_BLOCK, attend_masked
from plait.model.mixture import from_experts, grouped_product, order_by_expert, to_experts

LENGTHS = (5, 7, 1, 1, 10)


@pytest.mark.parametrize("documents", ["one a row", "several"])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masked_attention_is_that_of_each_document(documents: str, window: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 12, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    )
    grad = torch.randn(2, 12, 4, 8, dtype=torch.float64)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, 12)
    several = documents == "several"
    expected = attend(q, k, v, Documents(LENGTHS) if several else None, window)
    found = attend_masked(q, k, v, positions if several else None, window, scores_at_once=2 * 4 * 12 * 5)
    assert_same([expected, *gradients(expected, [q, k, v], grad)], [found, *gradients(found, [q, k, v], grad)])


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("cap", "sinks"), [(0.7, False), (0.0, True), (0.7, True)])
def test_caps_and_sinks_are_what_their_formula_says(cap: float, sinks: bool, window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    own = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    of, grad = [q, k, v, *([] if own is None else [own])], torch.randn(2, 12, 4, 8, dtype=torch.float64)
    result = by_formula(q, k, v, window, cap, own)
    expected = [result, *gradients(result, of, grad)]
    for found in (
        attend(q, k, v, None, window, cap, own),
        attend_masked(q, k, v, None, window, 2 * 4 * 12 * 5, cap, own),
    ):
        assert_same(expected, [found, *gradients(found, of, grad)])
    last = attend_cached(q[:, -1:], k, v, window, cap, own)
    assert_same([result[:, -1:]], [last])


@pytest.mark.parametrize("window", [1, 3, 200])
def test_a_window_in_blocks_is_that_of_the_whole_row(window: int) -> None:
    """Blocks that begin behind the row's first key, also with documents."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 700, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    grad, lengths = torch.randn(2, 700, 2, 4, dtype=torch.float64), (650, 50, 300, 400)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(2, 700)
    for documents in (None, Documents(lengths, positions_bt=positions)):
        expected = attend(q, k, v, documents, window)
        found = attend_masked(q, k, v, None if documents is None else positions, window)
        assert_same([expected, *gradients(expected, [q, k, v], grad)], [found, *gradients(found, [q, k, v], grad)])


def test_the_cost_of_a_window_does_not_grow_with_the_square_of_the_row() -> None:
    counts = []
    for tokens in (1024, 2048):
        q, k, v = (torch.randn(1, tokens, 2, 8, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            attend_masked(q, k, v, None, 16).sum().backward()
        counts.append(counter.get_total_flops())
    most = 7 * 2 * 2 * 8 * 1024 * (LEAST_WINDOW_BLOCK + 16)  # seven products of two heads
    assert counts[0] <= most and counts[1] <= 2 * most


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_scores_are_not_rounded_before_the_softmax(dtype: torch.dtype, error: float) -> None:
    """Scores of about 60 that differ by little: in bf16 each would be off by up to 0.125, its share by an eighth."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 64, heads, 32, dtype=torch.float64) for heads in (4, 2, 2, 4))
    narrow = [x.to(dtype).requires_grad_() for x in (q * 0.3 + 3.3, k * 0.3 + 3.3, v)]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    found, expected = (attend_masked(x[0], x[1], x[2], None, 0) for x in (narrow, exact))
    pairs = zip(
        [found, *gradients(found, narrow, grad.to(dtype))],
        [expected, *gradients(expected, exact, grad.to(dtype).double())],
        strict=True,
    )
    errors = [float(((one.double() - other).norm() / other.norm()).detach()) for one, other in pairs]
    assert max(errors[0], errors[3]) < error, errors  # the result and the values' gradient
    assert max(errors) < 3 * error, errors  # of queries and keys, whose addends nearly cancel here


def test_float16_scores_beyond_its_largest_number_are_exact() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 2, 64, dtype=torch.float64) for _ in range(3))
    halves = [x.half().requires_grad_() for x in (q + 40, k + 40, v)]
    assert (halves[0].double() @ halves[1].double().mT).max() > 65_504
    found = attend_masked(halves[0], halves[1], halves[2], None, 0)
    exact = [x.detach().double() for x in halves]
    expected = attend_masked(exact[0], exact[1], exact[2], None, 0)
    assert float((found.detach().double() - expected).abs().max()) < 2e-3
    assert all(x.isfinite().all() for x in gradients(found, halves, torch.ones_like(found)))


def by_formula(q: Tensor, k: Tensor, v: Tensor, window: int, cap: float, sinks: Tensor | None) -> Tensor:
    keys, values = (one.repeat_interleave(2, dim=2).transpose(1, 2) for one in (k, v))
    scores = q.transpose(1, 2) @ keys.mT / 8**0.5
    scores = (scores / cap).tanh() * cap if cap else scores
    behind = torch.arange(12).unsqueeze(1) - torch.arange(12)
    scores = scores.masked_fill((behind < 0) | (behind >= (window or 12)), float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ values).transpose(1, 2)
    with_sinks = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 12, 1)], dim=-1)
    return (with_sinks.softmax(-1)[..., :-1] @ values).transpose(1, 2)


@pytest.mark.parametrize("nowhere", [0.0, 0.2])
def test_blocks_of_experts_compute_what_rows_of_each_do(nowhere: float) -> None:
    torch.manual_seed(0)
    tokens, experts = 13, 5
    x = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(experts)]
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)])  # nobody chooses the last two
    chosen = chosen.masked_fill(torch.rand(tokens, 2) < nowhere, experts)
    grad = torch.randn(tokens, 2, 6, dtype=torch.float64)
    order, blocks = order_by_expert(chosen, experts), blocks_by_expert(chosen, experts)
    expected = from_experts(grouped_product(to_experts(x, order), weights, order.counts), order)
    found = from_blocks(block_product(to_blocks(x, blocks), weights, blocks), blocks)
    assert_same([expected, *gradients(expected, [x, *weights], grad)], [found, *gradients(found, [x, *weights], grad)])


def test_the_number_of_blocks_does_not_depend_on_the_routing() -> None:
    everybody_to_one, spread = torch.zeros(16, 2, dtype=torch.int64), torch.arange(32).view(16, 2) % 4
    assert {blocks_by_expert(one, 4).number for one in (everybody_to_one, spread)} == {20}


def gradients(result: Tensor, of: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, of, grad)


def assert_same(expected: list[Tensor], found: list[Tensor]) -> None:
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
