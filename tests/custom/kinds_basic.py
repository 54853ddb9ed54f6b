"""Programs that do something unusual with weights, data or updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler

import plait
from tests.custom.kind import EXAMPLES, Kind, in_order, mlp, numbers, squared


def channels_last() -> nn.Module:
    """A convolution in the memory order that GPUs and processors like best."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(45, 3))
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


class Transposed(nn.Module):
    """A weight that is stored the other way round, and one with gaps in its memory."""

    def __init__(self, gaps: bool) -> None:
        super().__init__()
        stored = torch.randn(7, 5)
        self.weight = nn.Parameter(stored.t() if not gaps else torch.randn(5, 14)[:, ::2])
        self.leave = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(x @ self.weight))


class LayerDrop(nn.Module):
    """A layer that is left out in some steps, so that its first gradient comes after those of others."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.enter, self.maybe, self.leave = (nn.Linear(*size, bias=bias) for size in ((5, 6), (6, 6), (6, 3)))
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        return self.leave(x + self.maybe(x) if self.used else x)


def use_every_second(model: Any, optimizer: Optimizer, step: int) -> None:
    model.used = step % 2 == 1


class WithAverage(nn.Module):
    """A model beside the moving average of its weights, which is no parameter of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.average = {name: p.detach().clone() for name, p in self.inside.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def follow(model: Any, optimizer: Optimizer, step: int) -> None:
    """The average takes a tenth of the new weights, and the weights a part of it: a stale weight would be seen."""
    with torch.no_grad():
        for name, parameter in model.inside.named_parameters():
            average = model.average[name] = model.average[name].to(parameter)
            average.lerp_(parameter.detach(), 0.1)
            parameter.mul_(0.9).add_(average, alpha=0.1)


def clamp(model: Any, optimizer: Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def load_again(model: Any, optimizer: Optimizer, step: int) -> None:
    """Goes on from its own state of that moment, halved."""
    if step == 2:
        state = {name: value.detach().clone() * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(state)


def weighted() -> DataLoader[Any]:
    sampler = WeightedRandomSampler(torch.arange(1, EXAMPLES + 1).tolist(), 9, generator=torch.Generator())
    return DataLoader(numbers(5), batch_size=4, sampler=sampler)


class ByLength:
    """A batch sampler of the person's own: short sequences together."""

    def __init__(self, data: Sequence[Any]) -> None:
        self.order = sorted(range(len(data)), key=lambda position: (len(data[position][0]), position))

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(0, len(self.order), 4):
            yield self.order[begin : begin + 4]

    def __len__(self) -> int:
        return (len(self.order) + 3) // 4


def padded(examples: list[Any]) -> Any:
    """Sequences of unlike lengths side by side, and which of their places count."""
    size = max(len(words) for words, _ in examples)
    words = torch.stack([F.pad(words, (0, size - len(words))) for words, _ in examples])
    return words, torch.stack([target for _, target in examples])


def sequences() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    data = [
        (torch.randint(1, 9, (2 + position % 5,), generator=generator), torch.randn(3, generator=generator).double())
        for position in range(EXAMPLES)
    ]
    sampler: Any = ByLength(data)
    return DataLoader(data, batch_sampler=sampler, collate_fn=padded)  # type: ignore[arg-type]


class Words(nn.Module):
    """Means over the words that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        there = (x > 0).unsqueeze(-1)
        return self.head((self.words(x) * there).sum(1) / there.sum(1))


class ZeroRows(nn.Module):
    """What many write to flatten, and what no batch of no examples survives."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x.view(x.size(0), -1))


class Complex(nn.Module):
    """A weight of complex numbers between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.inside = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128) / 3)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x).to(torch.complex128) @ self.inside
        return self.leave(torch.cat([hidden.real, hidden.imag], dim=1))


def orthogonal() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 3))


class Lion(Optimizer):
    """An optimizer of the person's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_((0.9 * mean + 0.1 * p.grad).sign(), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


def adversarial(model: Any, batch: Any) -> tuple[Tensor, int]:
    """Examples moved by the sign of their own gradient."""
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(((model(x) - batch[1]) ** 2).sum(), x)
    return squared(model, (batch[0] + 0.1 * gradient.sign(), batch[1]))


def physics(model: Any, batch: Any) -> tuple[Tensor, int]:
    """An equation in the output's derivative by the input: a gradient of a gradient."""
    x = batch[0].clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return ((slope.sum(1) + y[:, 0]) ** 2).sum(), len(x)


def smoothed(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Smoothed labels, each class with a weight of its own, which is what counts."""
    weights = batch[0].new_tensor([1.0, 2.0, 0.5])
    labels = batch[1].argmax(1)
    total = F.cross_entropy(model(batch[0]), labels, weights, reduction="sum", label_smoothing=0.1)
    return total, weights[labels].sum()


class WithTarget(nn.Module):
    """A net that learns from a copy of itself, which follows it every second step: DQN's."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.target = mlp(), mlp().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def towards_target(model: Any, batch: Any) -> tuple[Tensor, int]:
    with torch.no_grad():
        best = batch[1][:, :1] + 0.9 * model.target(batch[0]).max(1, keepdim=True).values
    return ((model(batch[0]).gather(1, batch[1].argmax(1, keepdim=True)) - best) ** 2).sum(), len(best)


def copy_to_target(model: Any, optimizer: Optimizer, step: int) -> None:
    if step % 2:
        model.target.load_state_dict(model.inside.state_dict())


class Flow(nn.Module):
    """A normalising flow of one affine coupling; what it puts out is the negative log-likelihood of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept, moved = x[:, :3], x[:, 3:]
        scale = torch.tanh(self.scale(kept))
        z = torch.cat([kept, moved * scale.exp() + self.shift(kept)], dim=1)
        return 0.5 * (z**2).sum(1) - scale.sum(1)


def of_each(model: Any, batch: Any) -> tuple[Tensor, int]:
    return model(batch[0]).sum(), len(batch[0])


BASIC: dict[str, Kind] = {
    "complex weight": Kind(model=Complex, data=lambda: in_order(numbers(5)), refused=("shard parameters",)),
    "orthogonal weight": Kind(model=orthogonal, data=lambda: in_order(numbers(5))),
    "optimizer of one's own": Kind(
        model=mlp,
        data=lambda: in_order(numbers(5)),
        optimizer=lambda model: Lion(model.parameters()),
        refused=("shard optimizer", "shard parameters"),
    ),
    "adversarial examples": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=adversarial),
    "physics": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=physics, refused=("shard parameters",)),
    "smoothed labels": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=smoothed),
    "target net": Kind(
        model=WithTarget,
        data=lambda: in_order(numbers(5)),
        loss_sum=towards_target,
        optimizer=lambda model: torch.optim.AdamW(model.inside.parameters(), lr=0.05),
        after=copy_to_target,
        refused=("shard parameters",),
    ),
    "flow": Kind(model=Flow, data=lambda: in_order(numbers(5)), loss_sum=of_each),
    "rest of a pass": Kind(model=mlp, data=lambda: in_order(numbers(5, examples=11))),
    "channels last": Kind(model=channels_last, data=lambda: in_order(numbers(3, 6, 6)), refused=("shard parameters",)),
    "transposed weight": Kind(
        model=lambda: Transposed(gaps=False), data=lambda: in_order(numbers(5)), refused=("shard parameters",)
    ),
    "weight with gaps": Kind(
        model=lambda: Transposed(gaps=True), data=lambda: in_order(numbers(5)), refused=("shard parameters",)
    ),
    "moving average": Kind(
        model=WithAverage, data=lambda: in_order(numbers(5)), after=follow, refused=("shard parameters",)
    ),
    "clamped weights": Kind(model=mlp, data=lambda: in_order(numbers(5)), after=clamp),
    "state loaded midway": Kind(
        model=mlp, data=lambda: in_order(numbers(5)), after=load_again, refused=("shard parameters",)
    ),
    "layer left out": Kind(
        model=LayerDrop,
        data=lambda: in_order(numbers(5)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        before=use_every_second,
    ),
    "layer left out, whole weights": Kind(
        model=lambda: LayerDrop(bias=False),
        data=lambda: in_order(numbers(5)),
        optimizer=lambda model: plait.Muon(model.parameters(), lr=0.05),
        before=use_every_second,
    ),
    "weighted sampler": Kind(model=mlp, data=weighted),
    "batches by length": Kind(model=Words, data=sequences),
    "flattened by size": Kind(
        model=ZeroRows, data=lambda: in_order(numbers(2, 5, examples=11)), refused=("shard parameters",)
    ),
    "batch sampler of torch": Kind(
        model=mlp,
        data=lambda: DataLoader(numbers(5), batch_sampler=BatchSampler(SequentialSampler(range(9)), 4, False)),
    ),
}
