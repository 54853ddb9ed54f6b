"""A program as people write it, trained for some steps by plain torch and by `plait.spread`: float64, with a batch that
three workers do not divide."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait
from plait.custom.gathering import Gathering
from plait.custom.group import alone

LAYOUTS = ("replicate", "shard optimizer", "shard parameters")
EXAMPLES, BATCH, EPOCHS = 13, 5, 2
LossSum = Callable[[Any, Any], Any]
Change = Callable[[Any, Any, int], None]


def squared(model: Any, batch: Any) -> tuple[Tensor, int]:
    """The sum of squared differences, and how many."""
    return ((model(batch[0]) - batch[1]) ** 2).sum(), batch[1].numel()


def nothing(model: Any, optimizer: Any, step: int) -> None:
    """Most programs do nothing between steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A program: models, optimizers and losses are one each, or tuples. `before` and `after` are what it does around
    each step; `refused` layouts are those that cannot carry it. The data are a list, or a loader made of it."""

    model: Callable[[], Any]
    data: Callable[[], Any]
    optimizer: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters(), lr=0.05)
    loss_sum: LossSum | tuple[LossSum, ...] = squared
    gathers: Callable[[Any], LossSum] | None = None
    """A loss across the batch, made from the run that gathers rows; in place of `loss_sum`."""
    options: Callable[[Any], Mapping[str, Any]] = lambda optimizer: {}
    """What else plait.spread takes, from the optimizer."""
    batches: Mapping[str, Any] | None = None
    """What else run.batches takes."""
    losses: Callable[[int], Sequence[int]] | None = None
    """Of several losses those that a step takes."""
    spread_model: Callable[[Any], Any] = lambda model: model
    """What is changed of the model for several workers."""
    before: Change = nothing
    after: Change = nothing
    refused: Sequence[str] = ()


def numbers(*shape: int, out: int = 3, examples: int = EXAMPLES) -> Any:
    """Examples that are the same everywhere."""
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(*shape, generator=generator).double(), torch.randn(out, generator=generator).double())
        for _ in range(examples)
    ]


def in_order(data: Any, batch: int = BATCH, **options: Any) -> DataLoader[Any]:
    """A loader as most programs have it: in order here, and with the rest of a pass."""
    return DataLoader(data, batch_size=batch, **options)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def made(kind: Kind) -> tuple[Any, Any]:
    """The models in float64, with their memory order, and their optimizers: the same everywhere."""
    torch.manual_seed(3)
    model = kind.model()
    where = "cuda" if torch.cuda.is_available() else "cpu"  # where plait.spread moves them
    model = tuple(one.double().to(where) for one in model) if isinstance(model, tuple) else model.double().to(where)
    return model, kind.optimizer(model)


def trained_by_torch(kind: Kind, batches: Sequence[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of one process that takes these whole batches."""
    model, optimizer = made(kind)
    options = kind.options(optimizer)
    losses: list[float] = []
    for step, batch in enumerate(batches):
        kind.before(model, optimizer, step)
        losses += _torch_step(kind, model, optimizer, batch, step, options)
        for scheduler in options.get("schedulers", ()):
            scheduler.step()
        kind.after(model, optimizer, step)
    return losses, {name: p.detach().clone() for name, p in named(model).items()}


def named(model: Any) -> dict[str, nn.Parameter]:
    """The parameters by the names that plait.spread gives them."""
    if not isinstance(model, tuple):
        return dict(model.named_parameters())
    return {f"{number}.{name}": p for number, one in enumerate(model) for name, p in one.named_parameters()}


def _torch_step(
    kind: Kind, model: Any, optimizer: Any, batch: Any, step: int, options: Mapping[str, Any]
) -> list[float]:
    optimizers = optimizer if isinstance(optimizer, tuple) else (optimizer,)
    loss_sum = kind.gathers(Gathering(alone())) if kind.gathers else kind.loss_sum
    losses = loss_sum if isinstance(loss_sum, tuple) else (loss_sum,)
    means = []
    for index in kind.losses(step) if kind.losses else range(len(losses)):
        own = optimizers if len(losses) == 1 else (optimizers[index],)
        learn = [p for one in own for group in one.param_groups for p in group["params"] if p.requires_grad]
        for one in own:
            one.zero_grad()
        found = losses[index](model, batch)
        pairs = found if isinstance(found[0], tuple) else [found]
        mean: Any = sum(total / max(1, count) for total, count in pairs)
        mean.backward(inputs=learn if len(losses) > 1 else None)
        if "before_update" in options:
            gradients = {name: p.grad for name, p in named(model).items() if p.grad is not None}
            options["before_update"](gradients)
            for name, gradient in gradients.items():
                named(model)[name].grad = gradient
        if "clip" in options:
            nn.utils.clip_grad_norm_(learn, options["clip"])
        for one in own:
            one.step()
        means.append(float(mean.detach()))
    return means


class Later:
    """A run that a loss knows before there is one, as by the name of a global variable."""

    run: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)


def trained_by_spread(kind: Kind, layout: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of all workers together."""
    model, optimizer = made(kind)
    options = kind.options(optimizer)
    later = Later()
    loss_sum = kind.gathers(later) if kind.gathers else kind.loss_sum
    spread: Any = plait.spread
    run = spread(
        kind.spread_model(model), optimizer, loss_sum=loss_sum, layout=layout, bucket_mib=0.0002, **options,
        **({"additive": "no"} if kind.gathers else {}),
    )  # fmt: skip
    later.run = run
    losses: list[float] = []
    for batch in run.batches(kind.data(), epochs=EPOCHS, shares="equal", **(kind.batches or {})):
        kind.before(model, optimizer, run.steps)
        found = run.step(batch, losses=kind.losses(run.steps) if kind.losses else "all")
        losses += found.reshape(-1).tolist()
        kind.after(model, optimizer, run.steps - 1)
    return losses, {name: one.clone() for name, one in run.weights().items()}


def whole_batches(kind: Kind) -> list[Any]:
    """The batches of a run in one process, from which plain torch learns, too."""
    model = nn.Linear(1, 1)
    run = plait.spread(model, torch.optim.SGD(model.parameters()), loss_sum=squared)
    batches = run.batches(kind.data(), epochs=EPOCHS, **(kind.batches or {}))
    return [copy.deepcopy(batch) for batch in batches]
