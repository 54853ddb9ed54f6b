"""The summed loss is cross-entropy's, value and gradients, without ever holding all scores."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.parallel.sharded_model import WholeVocabulary
from plait.report.memory import LiveTensorPeak
from plait.trainer.loss import even_pieces, sum_of_losses
from plait.trainer.score_passes import IGNORED, CappedPasses, FusedPasses, InPlacePasses, ScorePasses, score_passes
from plait.trainer.step import make_loss

TOKENS, WIDTH, VOCABULARY = 700, 8, 8192
"""More scores than are held at a time, in pieces that do not come out even."""


def made(dtype: torch.dtype, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[torch.rand(TOKENS, generator=generator) < ignored] = IGNORED
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets


def by_torch(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.T, targets, ignore_index=IGNORED, reduction="sum")


def uncompiled(function: Any) -> Any:
    return function


def traced(function: Any) -> Any:
    """Compiled as far as to one graph, without a break; no machine code is made."""
    return torch.compile(function, dynamic=False, fullgraph=True, backend="eager")


PASSES: dict[str, ScorePasses] = {
    "in place": InPlacePasses(), "fused": FusedPasses(uncompiled), "one graph": FusedPasses(traced),
}  # fmt: skip


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_value_and_gradients_are_those_of_cross_entropy(dtype: torch.dtype, rtol: float, passes: str) -> None:
    hidden, head, targets = made(dtype)
    exact = by_torch(hidden, head, targets)
    wanted = torch.autograd.grad(3 * exact, (hidden, head))
    total = sum_of_losses(hidden, head, targets, passes=PASSES[passes])
    found = torch.autograd.grad(3 * total, (hidden, head))
    torch.testing.assert_close(total, exact, rtol=rtol, atol=0)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol * theirs.abs().max().item())


def test_ignored_targets_count_nothing_and_get_no_gradient() -> None:
    hidden, head, targets = made(torch.float64)
    counted = targets != IGNORED
    total = sum_of_losses(hidden, head, targets)
    assert total.item() == pytest.approx(sum_of_losses(hidden[counted], head, targets[counted]).item(), rel=1e-13)
    total.backward()
    assert hidden.grad is not None and not hidden.grad[~counted].any() and hidden.grad[counted].any()
    nothing = sum_of_losses(hidden, head, torch.full_like(targets, IGNORED))
    assert nothing.item() == 0


@pytest.mark.parametrize("passes", ["in place", "fused"])
def test_scores_far_out_stay_finite(passes: str) -> None:
    hidden, head, targets = made(torch.float32, ignored=0)
    total = sum_of_losses(hidden * 1e4, head, targets, passes=PASSES[passes])
    grads = torch.autograd.grad(total, (hidden, head))
    assert torch.isfinite(total) and all(torch.isfinite(grad).all() for grad in grads)


def test_a_frozen_head_or_hidden_state_gets_no_gradient() -> None:
    hidden, head, targets = made(torch.float64)
    sum_of_losses(hidden, head.detach(), targets).backward()
    wanted = torch.autograd.grad(by_torch(hidden, head, targets), hidden)[0]
    torch.testing.assert_close(hidden.grad, wanted, rtol=1e-11, atol=1e-11)
    assert head.grad is None
    with torch.no_grad():
        value = sum_of_losses(hidden, head, targets)
    assert not value.requires_grad and value.item() == pytest.approx(by_torch(hidden, head, targets).item(), rel=1e-12)


def test_bf16_inputs_give_float32_sums_close_to_exact() -> None:
    hidden, head, targets = made(torch.float32)
    total = sum_of_losses(hidden.bfloat16(), head, targets)
    total.backward()
    exact = torch.autograd.grad(by_torch(hidden, head, targets), head)[0]
    assert total.dtype == torch.float32 and head.grad is not None and head.grad.dtype == torch.float32
    assert total.item() == pytest.approx(by_torch(hidden, head, targets).item(), rel=5e-3)
    assert float((head.grad - exact).norm() / exact.norm()) < 0.02


class Counting(WholeVocabulary):
    """A vocabulary over ranks of which the fullest has so many entries, and what this rank asks of the others."""

    def __init__(self, most: int) -> None:
        self.most, self.rows = most, list[int]()

    def most_entries(self, own: int) -> int:
        return self.most

    def largest(self, values: Tensor) -> Tensor:
        self.rows.append(len(values))
        return values


class Products(TorchDispatchMode):
    """Notes what numbers matrix products multiply."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("mm", "addmm")):
            self.seen.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def test_ranks_with_one_entry_more_or_less_call_for_the_same_sums() -> None:
    hidden, targets = torch.randn(4096, 4), torch.zeros(4096, dtype=torch.int64)
    asked = []
    for entries in (1366, 1365):
        ranks = Counting(most=1366)
        sum_of_losses(hidden, torch.randn(entries, 4), targets, ranks)
        asked.append(ranks.rows)
    assert asked[0] == asked[1] and len(asked[0]) > 1


def test_under_autocast_the_loss_works_in_the_products_precision() -> None:
    def autocast() -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16)

    hidden, head, targets = made(torch.float32)
    chunk, seen = SimpleNamespace(head_weight=lambda: head), Counting(most=len(head))
    micro = SimpleNamespace(targets=targets)
    products: list[torch.dtype] = []
    with Products(products):
        total = make_loss(autocast, seen)(hidden, cast(Any, chunk), cast(Any, micro))
    total.backward()
    assert set(products) == {torch.bfloat16}
    assert hidden.grad is not None and hidden.grad.dtype == head.grad.dtype == total.dtype == torch.float32


@pytest.mark.slow
def test_the_scores_never_exist_at_once() -> None:
    tokens, vocabulary = 4096, 8192
    hidden = torch.randn(tokens, 16, requires_grad=True)
    head = torch.randn(vocabulary, 16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    scores_bytes = tokens * vocabulary * 4
    with LiveTensorPeak(torch.device("cpu"), [hidden, head, targets]) as ours:
        sum_of_losses(hidden, head, targets).backward()
    hidden.grad = head.grad = None
    with LiveTensorPeak(torch.device("cpu"), [hidden, head, targets]) as plain:
        by_torch(hidden, head, targets).backward()
    assert plain.bytes > scores_bytes
    assert ours.bytes < scores_bytes / 3


def test_pieces_are_as_few_as_can_be_and_of_one_size_but_the_last() -> None:
    for tokens, most in [(1, 5), (10, 5), (11, 5), (12, 5), (700, 256), (8, 0)]:
        pieces = even_pieces(tokens, most)
        sizes = [piece.stop - piece.start for piece in pieces]
        assert sum(sizes) == tokens and [piece.start for piece in pieces] == [sizes[0] * i for i in range(len(pieces))]
        assert len(pieces) == -(-tokens // max(1, most)) and len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    assert even_pieces(0, 5) == []


@pytest.mark.parametrize("learns", [True, False])
def test_fused_passes_in_16_bits_are_as_close_as_those_in_place(learns: bool) -> None:
    hidden, head, targets = made(torch.float32)
    exact = torch.autograd.grad(by_torch(hidden, head, targets), head)[0]
    errors = {}
    for name in ("in place", "fused"):
        with torch.set_grad_enabled(learns):
            total = sum_of_losses(hidden.bfloat16(), head, targets, passes=PASSES[name])
        assert total.item() == pytest.approx(by_torch(hidden, head, targets).item(), rel=5e-3)
        if learns:
            grad = torch.autograd.grad(total, head)[0]
            errors[name] = float((grad - exact).norm() / exact.norm())
    assert not learns or errors["fused"] < 1.05 * errors["in place"] < 0.02


def test_the_vocabulary_over_ranks_is_asked_alike_by_both() -> None:
    hidden, head, targets = made(torch.float64)
    asked = []
    for name in ("in place", "fused"):
        ranks = Counting(most=2 * VOCABULARY)
        sum_of_losses(hidden, head, targets, ranks, PASSES[name])
        asked.append(ranks.rows)
    assert asked[0] == asked[1]


def test_the_plan_s_compiling_chooses_the_passes() -> None:
    assert isinstance(score_passes("off"), InPlacePasses) and isinstance(score_passes("blocks"), FusedPasses)


@pytest.mark.parametrize("passes", [InPlacePasses(), FusedPasses(uncompiled)], ids=["in place", "fused"])
def test_capped_scores_lose_what_torch_says(passes: ScorePasses) -> None:
    hidden, head, targets = made(torch.float64)
    capped = 2.0 * (hidden @ head.T / 2.0).tanh()
    expected = F.cross_entropy(capped, targets, ignore_index=IGNORED, reduction="sum")
    found = sum_of_losses(hidden, head, targets, passes=CappedPasses(2.0, passes))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    both = [torch.autograd.grad(one, (hidden, head)) for one in (found, expected)]
    for own, theirs in zip(*both, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-10)
    assert isinstance(score_passes("off", 2.0), CappedPasses)
