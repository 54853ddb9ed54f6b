"""What a loss is a mean of, read from its graph, is what its author divided by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.checking.watch.loss_terms import compares_samples, find_terms, joins_constants, record_coefficients

LABELS = torch.tensor([0, 2, -100, 1, -100, 2])
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("loss", "kind", "count", "coefficient"),
    [
        (lambda x: F.cross_entropy(x, LABELS), "mean", 4, 1.0),
        (lambda x: F.cross_entropy(x, LABELS) / 8, "mean", 4, 1 / 8),
        (lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 4, "sum", 4, 1 / 4),
        (lambda x: F.cross_entropy(x, LABELS, reduction="none").sum() / 4, "sum", 4, 1 / 4),
        (lambda x: (x.square().sum(1) * MASK).sum() / MASK.sum(), "sum", 3, 1 / 3),
        (lambda x: x.square().sum(1)[MASK > 0].mean(), "mean", 3, 1.0),
        (lambda x: F.mse_loss(x, torch.zeros_like(x)) * 2, "mean", 18, 2.0),
        (lambda x: x.square().mean(1).mean(), "mean", 6, 1.0),
        (lambda x: sum((part.square().mean() for part in x.chunk(2)), torch.zeros(())) / 2, "mean", 9, 1 / 2),
    ],
)
def test_a_loss_and_its_count(loss: Callable[[Tensor], Tensor], kind: str, count: int, coefficient: float) -> None:
    x = torch.randn(6, 3, requires_grad=True)
    root = loss(x)
    terms = find_terms(root)
    remove = record_coefficients(terms)
    root.backward()
    remove()
    first = terms[0]
    assert first.kind == kind and first.is_linear
    assert first.units.get("valid", first.units["elements"]) == count
    assert first.coefficient == pytest.approx(coefficient)


def test_numbers_that_a_loss_divides_and_multiplies_by_are_kept_apart() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    term = find_terms(0.5 * (F.mse_loss(x, torch.zeros_like(x)) / 4) / torch.tensor(3.0))[0]
    assert (term.divisors, term.multipliers) == ((3.0, 4.0), (0.5,))


def test_outputs_that_are_joined_with_those_of_other_ranks_are_seen() -> None:
    features = torch.randn(5, 3) @ torch.randn(3, 4, requires_grad=True)
    assert joins_constants(torch.cat([torch.randn(5, 4), features]).mean(), [features.grad_fn])
    assert not joins_constants(torch.cat([features, features]).mean(), [features.grad_fn])


def test_a_root_of_a_mean_is_not_linear() -> None:
    x = torch.randn(4, requires_grad=True)
    assert [term.is_linear for term in find_terms(x.square().mean().sqrt())] == [False]


def test_losses_that_compare_samples_are_seen() -> None:
    x, weight = torch.randn(5, 3), torch.randn(3, 4, requires_grad=True)
    features = x @ weight
    contrastive = F.cross_entropy(features @ features.T, torch.arange(5))
    plain = F.cross_entropy(features, torch.zeros(5, dtype=torch.long))
    assert compares_samples(contrastive, [features.grad_fn], 5)
    assert not compares_samples(plain, [features.grad_fn], 5)
