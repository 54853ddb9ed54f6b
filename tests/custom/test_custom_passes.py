"""Passes over gradients: none that the mathematics does not ask for, and the same bits after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.custom.run import SpreadRun


class Scalings(TorchDispatchMode):
    """Counts the calls that multiply gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten._foreach_mul_
        return func(*args, **(kwargs or {}))


def loss_sum(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) ** 2).sum(), 3 * len(batch)


def build(dtype: torch.dtype = torch.float32, **options: Any) -> SpreadRun:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return plait.spread(model, optimizer, loss_sum=loss_sum, **options)


def batch_of(examples: int) -> Tensor:
    return torch.randn(examples, 4, generator=torch.Generator().manual_seed(examples))


def scalings(run: SpreadRun, examples: int) -> int:
    with Scalings() as seen:
        run.step(batch_of(examples))
    return seen.count


def test_gradients_are_not_multiplied_where_the_count_is_known_at_the_loss() -> None:
    alone = build()
    assert [scalings(alone, examples) for examples in (6, 7, 8)] == [0, 0, 0]
    in_parts = build(accumulate=2)  # the first part's backward comes before the second one's count
    assert [scalings(in_parts, examples) for examples in (6, 6, 8, 8, 8, 6)] == [1, 0, 1, 0, 0, 1]
    clipped = build(clip=1e-3)
    assert scalings(clipped, 6) == 1
    assert scalings(build(clip=1e3), 6) == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_the_mean_whatever_the_count_was_before(accumulate: int) -> None:
    run = build(torch.float64, accumulate=accumulate)
    model = run._program.models[0]
    for examples in (6, 7, 7):
        batch = batch_of(examples).double()
        total, count = loss_sum(model, batch)
        names = dict(model.named_parameters())
        wanted = torch.autograd.grad(total / count, list(names.values()))
        run.step(batch)
        for name, exact in zip(names, wanted, strict=True):
            torch.testing.assert_close(run.gradients()[name], exact, rtol=1e-13, atol=1e-15)


def test_a_resumed_run_rounds_as_it_would_have_with_the_count_of_its_last_step(tmp_path: Path) -> None:
    run = build(accumulate=2)
    for examples in (7, 5):
        run.step(batch_of(examples))
    run.save(tmp_path)
    run.step(batch_of(6))
    other = build(accumulate=2)
    other.resume(tmp_path)
    other.step(batch_of(6))
    assert all(torch.equal(one, other.gradients()[name]) for name, one in run.gradients().items())
    assert all(torch.equal(one, other.weights()[name]) for name, one in run.weights().items())
