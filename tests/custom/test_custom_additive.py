"""Losses that are no sums over examples are found at the first step, and named; those that are pass, however random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.custom.stepping.additive import check_additive
from plait.errors import PlaitError

LossSum = Callable[[Any, Any], tuple[Tensor, Any]]


class Body(nn.Module):
    """A small classifier with an output that it has in training alone."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.enter, self.more, self.leave = nn.Linear(6, 8), nn.Sequential(*more), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.more(torch.tanh(self.enter(x))))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 4, (8, 5), generator=generator)
    labels[0, 1:] = labels[1, 2:] = labels[5, 3:] = -100
    return torch.randn(8, 5, 6, generator=generator), labels


def entropy(model: Any, batch: Any, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


def counted(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


def noisy(model: Any, batch: Any) -> tuple[Tensor, Any]:
    """A variational autoencoder's noise, with its divergence as a sum."""
    hidden = model(batch[0]).sum(1)
    drawn = hidden + torch.randn_like(hidden) * torch.exp(0.1 * hidden)
    return (drawn**2).sum() + 0.5 * (hidden**2).sum(), len(hidden)


def noisy_mean(model: Any, batch: Any) -> tuple[Tensor, Any]:
    hidden = model(batch[0]).sum(1)
    drawn = hidden + torch.randn_like(hidden) * torch.exp(0.1 * hidden)
    return (drawn**2).sum() + 0.5 * (hidden**2).mean(), len(hidden)


def diffusion(model: Any, batch: Any) -> tuple[Tensor, Any]:
    """Noise and time drawn for each example."""
    x = batch[0]
    times = torch.randint(0, 10, (len(x),), device=x.device)
    noise, kept = torch.randn(x.shape, dtype=x.dtype), torch.rand(len(x), 1, 1) < 0.7
    share = ((times + 1) / 11).view(-1, 1, 1).to(x.dtype)
    return (((model(x * share + noise) - 1) ** 2) * kept).sum(), x.numel()


def mixed(model: Any, batch: Any) -> tuple[Tensor, Any]:
    """Mixup: a share by numpy, and partners by a permutation."""
    share, partners = np.random.beta(0.3, 0.3), torch.randperm(len(batch[0]))
    x = share * batch[0] + (1 - share) * batch[0][partners]
    return (model(x) ** 2).sum(), len(x)


def two_denominators(model: Any, batch: Any) -> tuple[Tensor, Any]:
    """Classes over tokens, and boxes over examples that have some."""
    outputs = model(batch[0])
    there = batch[1][:, 1] != -100
    boxes = (outputs[:, 1] ** 2).sum(-1)[there].sum() / there.sum().clamp(min=1) * counted(batch)
    return entropy(model, batch) + boxes, counted(batch)


def only_in_training(model: Any, batch: Any) -> tuple[Tensor, Any]:
    extra = model.enter(batch[0]).square().mean() if model.training else 0.0
    return entropy(model, batch) + extra, counted(batch)


def balance(model: Any, batch: Any) -> tuple[Tensor, Any]:
    """A hundredth of a loss that wants experts to be used alike."""
    used = model(batch[0]).softmax(-1).mean((0, 1))
    return entropy(model, batch) + 0.01 * 4 * (used * used).sum(), counted(batch)


def decay(model: Any, batch: Any) -> tuple[Tensor, Any]:
    return entropy(model, batch) + 1e-4 * sum((p**2).sum() for p in model.parameters()), counted(batch)


def contrastive(model: Any, batch: Any) -> tuple[Tensor, Any]:
    x = F.normalize(model(batch[0]).sum(1), dim=1)
    return F.cross_entropy(x @ x.t(), torch.arange(len(x)), reduction="sum"), len(x)


def padded_mean(model: Any, batch: Any) -> tuple[Tensor, Any]:
    """As Hugging Face returns it: a mean over the tokens that count, times the examples."""
    return entropy(model, batch, "mean") * len(batch[0]), len(batch[0])


def sums(model: Any, batch: Any) -> tuple[Tensor, Any]:
    return entropy(model, batch), counted(batch)


class Checkpointed(Body):
    """Runs its middle a second time in the backward pass, dropout included."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        return self.leave(checkpoint(self.more, x, use_reentrant=False))


class DropPath(nn.Module):
    """Leaves a branch out for some examples."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.6)
        return x + kept * torch.sin(x) / 0.6


class Recurrent(nn.Module):
    """Dropout between layers of an LSTM, which counts examples in its second dim."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cells, self.leave = nn.LSTM(6, 8, num_layers=2, dropout=0.5, **options), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.cells.batch_first:
            return self.leave(self.cells(x)[0])
        return self.leave(self.cells(x.transpose(0, 1))[0].transpose(0, 1))


class Attending(nn.Module):
    """torch's own encoder layer with its examples in the second dim, and its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.leave = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layer(x.transpose(0, 1)).transpose(0, 1))


class Spectral(Body):
    """A norm that moves its buffer in every forward pass."""

    def __init__(self) -> None:
        super().__init__(nn.utils.spectral_norm(nn.Linear(8, 8)))


def step_of(model: nn.Module, loss_sum: LossSum) -> Tensor:
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    return run.step(batch())


@pytest.mark.parametrize(
    ("loss_sum", "words"),
    [
        (lambda model, batch: (entropy(model, batch, "mean"), 1), "first by cross_entropy"),
        (padded_mean, r"first by cross_entropy in test_custom_additive.py, line \d+"),
        (noisy_mean, r"first by mean in test_custom_additive.py, line \d+"),
        (two_denominators, "first by "),
        (only_in_training, r"first by mean in test_custom_additive.py, line \d+"),
        (balance, r"first by sum in test_custom_additive.py, line \d+"),
        (decay, r"first by sum in test_custom_additive.py, line \d+"),
        (contrastive, "depend on each other"),
        (lambda model, batch: (entropy(model, batch), 7), "counts of two halves"),
    ],
    ids=["mean", "padding", "noise", "denominators", "training", "balance", "decay", "contrastive", "count"],
)
def test_what_is_no_sum_is_named(loss_sum: LossSum, words: str) -> None:
    with pytest.raises(PlaitError, match=words):
        step_of(Body(), loss_sum)


@pytest.mark.parametrize("loss_sum", [noisy, diffusion, mixed, sums], ids=["noise", "diffusion", "mixup", "tokens"])
@pytest.mark.parametrize(
    "model",
    [
        Body,
        lambda: Body(nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.2)),
        lambda: Checkpointed(nn.Linear(8, 8), nn.Dropout(0.3)),
        lambda: Body(DropPath()),
        lambda: Body(nn.LayerNorm(8), nn.GELU()),
        Recurrent,
        lambda: Recurrent(batch_first=True),
        Attending,
        Spectral,
    ],
    ids=["plain", "dropout", "checkpoint", "drop path", "norm", "lstm", "lstm of rows", "encoder", "spectral"],
)
def test_sums_pass_whatever_they_draw(model: Callable[[], nn.Module], loss_sum: LossSum) -> None:
    assert torch.isfinite(step_of(model(), loss_sum))


def test_what_is_no_sum_is_found_in_16_bits_too_and_rounding_is_none() -> None:
    def narrow(model: Any, batch: Any) -> tuple[Tensor, Any]:
        return entropy(model.bfloat16(), (batch[0].bfloat16(), batch[1])).bfloat16(), counted(batch)

    assert torch.isfinite(step_of(Body(), narrow))


def test_a_norm_over_the_batch_is_no_reason_to_refuse_a_sum() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    def loss_sum(model: Any, batch: Any) -> tuple[Tensor, Any]:
        return F.cross_entropy(model(batch[0]), batch[1][:, 0], reduction="sum"), len(batch[0])

    assert torch.isfinite(step_of(model, loss_sum))
    norm: Any = model[2]
    assert int(norm.num_batches_tracked) == 1  # the step's alone


def test_looking_changes_nothing() -> None:
    """Buffers that a forward pass counts in, weights, gradients and generators are the step's alone."""

    class Counts(Body):
        def __init__(self) -> None:
            super().__init__(nn.Dropout(0.5))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    torch.manual_seed(4)
    model: Any = Counts()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=sums)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    program = run._program  # pyright: ignore[reportPrivateUsage]
    check_additive(program, 0, batch(), None)
    assert torch.equal(before, torch.get_rng_state()) and float(model.calls) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
