"""Updates in one pass on processors: the numbers of torch's usual ones, and only where a person leaves it open."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import plait


def loss_sum(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) ** 2).sum(), len(batch)


def model_of() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


MADE: list[Callable[[Any], Optimizer]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    lambda p: Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    lambda p: AdamW([{"params": p, "lr": 0.02}], weight_decay=0.1, betas=(0.8, 0.9), maximize=True),
]


@pytest.mark.parametrize("make", MADE)
def test_fused_updates_are_the_usual_ones(make: Callable[[Any], Optimizer], capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    plain = copy.deepcopy(model)
    optimizer, usual = make(model.parameters()), make(plain.parameters())
    run = plait.spread(model, optimizer, loss_sum=loss_sum)
    assert all(group["fused"] for group in optimizer.param_groups)
    name = type(optimizer).__name__
    assert capsys.readouterr().out.count(f"updates by torch's fused {name}, one pass over weights and state") == 1
    for number in range(4):
        batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(number)).double()
        run.step(batch)
        usual.zero_grad()
        total, count = loss_sum(plain, batch)
        (total / count).backward()
        usual.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class OwnAdam(Adam):
    """May compute something else."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, fused=False),
        lambda p: AdamW(p, foreach=True),
        lambda p: SGD(p, lr=0.1, foreach=False),
        lambda p: Adam(p, capturable=True),
        OwnAdam,
        Adagrad,
    ],
)
def test_what_a_person_chose_stays(make: Callable[[Any], Optimizer], capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    run = plait.spread(model, optimizer, loss_sum=loss_sum)
    after = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    assert after == before and "fused" not in capsys.readouterr().out
    if type(optimizer) is not Adam:  # capturable is for GPUs
        run.step(torch.ones(2, 5).double())
