"""Programs with a planted fault each, and what the ranks of the tests of `run.verify` do with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plait.custom.exact_norm.batch_norm import convert_batch_norm
from plait.custom.group import Workers, find_workers
from plait.custom.layouts.description import CustomLayout
from plait.custom.planning.measure import plan_program
from plait.custom.program import Program
from plait.custom.verifying.verify import verify_program
from plait.launch.values.job import RankContext
from plait.parallel.mesh import open_store

SHARES = (7, 3)
WIDTH = 6


class Net(nn.Module):
    """Two layers and whatever stands between them."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.between = nn.Sequential(*between)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(inputs))))


class Centered(nn.Module):
    """Takes off a running mean, which it moves in place."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.center.mul_(0.5).add_(inputs.detach().mean(0), alpha=0.5)
        return inputs - self.center


class Standardized(nn.Module):
    """Mixes samples by a function, of which no module's list tells."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.batch_norm(inputs, None, None, training=True)


class Noisy(nn.Module):
    """Adds numbers that it draws itself."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn_like(inputs)


class Dropped(nn.Module):
    """Dropout by a function and inside an LSTM, of which no module's list tells."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(self.rnn(inputs.view(-1, 2, 4))[0].flatten(1), 0.5, self.training)


class Reshaped(nn.Module):
    """Puts out a view of what it got."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(-1, 2, 4)


class Flattened(nn.Module):
    """Changes in place what it got, and puts out a view of it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mul_(2).view(-1, 8)


class Shifted(nn.Module):
    """Two parameters over the same memory, half of each."""

    def __init__(self) -> None:
        super().__init__()
        room = torch.randn(12)
        self.low, self.high = nn.Parameter(room[:8]), nn.Parameter(room[4:])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.low + self.high


class Spare(nn.Module):
    """A weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class Narrow(nn.Module):
    """Computes in float32, as parts of models of Hugging Face do, and puts out what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.float() @ self.weight.float()).to(inputs.dtype)


class Remembering(nn.Module):
    """Keeps its last output, with its graph, as an attribute."""

    kept: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        self.kept = inputs * 2
        return self.kept


def remembering() -> nn.Module:
    model = Net(Remembering())
    model(torch.randn(2, WIDTH))
    return model


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The sum of cross entropies, and their count."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """A mean, where a sum was promised."""
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def narrow_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """A sum in 16 bits, whatever the model computes in."""
    return F.cross_entropy(model(batch[0]).bfloat16(), batch[1], reduction="sum"), len(batch[1])


PLANTED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "clean": (lambda: Net(nn.LayerNorm(8), nn.GELU(), nn.Flatten()), loss_sum),
    "batch norm": (lambda: Net(nn.BatchNorm1d(8)), loss_sum),
    "own batch norm": (lambda: convert_batch_norm(Net(nn.BatchNorm1d(8))), loss_sum),
    "dropout": (lambda: Net(nn.Dropout(0.5), Dropped()), loss_sum),
    "buffer": (lambda: Net(Centered()), loss_sum),
    "norm by a function": (lambda: Net(Standardized()), loss_sum),
    "noise": (lambda: Net(Noisy()), loss_sum),
    "changed view": (lambda: Net(nn.Linear(8, 8), Reshaped(), Flattened()), loss_sum),
    "views": (lambda: Net(Shifted()), loss_sum),
    "unused": (lambda: Net(Spare()), loss_sum),
    "float32 inside": (lambda: Net(Narrow()), loss_sum),
    "kept output": (remembering, loss_sum),
    "mean": (Net, mean_loss),
    "16 bits": (Net, narrow_loss),
}


def planted_program(name: str) -> Program:
    """A program with one fault, the same weights on every rank."""
    torch.manual_seed(5)
    make, loss = PLANTED[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Program(models=(model,), optimizers=(optimizer,), losses=(loss,))


def whole_batch() -> tuple[Tensor, Tensor]:
    """Inputs [10, WIDTH] and labels [10]."""
    dice = torch.Generator().manual_seed(6)
    return torch.randn(sum(SHARES), WIDTH, generator=dice), torch.randint(3, (sum(SHARES),), generator=dice)


def verify_planted(context: RankContext, argument: str) -> None:
    """Verify each program of a list under a layout; rank 0 tells what each verdict says. The argument is JSON."""
    asked = json.loads(argument)
    workers = _joined(context)
    layout: CustomLayout = asked["layout"]
    told = {}
    for name in asked["programs"]:
        program = planted_program(name)
        before = {key: value.clone() for key, value in program.models[0].state_dict().items()}
        verdict = verify_program(program, workers, layout, _own_share(context.rank, asked["shares"]))
        after = program.models[0].state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        told[name] = {
            "ok": verdict.ok, "error": verdict.max_grad_rel_err, "causes": verdict.causes, "remarks": verdict.remarks,
            "text": str(verdict),
        }  # fmt: skip
    context.send("verdicts", verdicts=told)
    dist.destroy_process_group()


def plan_planted(context: RankContext, argument: str) -> None:
    """Plan the program of that name; rank 0 tells what was measured, and whether the program is what it was."""
    workers = _joined(context)
    program = planted_program(argument)
    before = {key: value.clone() for key, value in program.models[0].state_dict().items()}
    plan = plan_program(program, workers, _own_share(context.rank))
    after = program.models[0].state_dict()
    rows = [(one.name, one.step_s, one.bytes_per_worker, one.refused) for one in plan.measured]
    same = all(torch.equal(value, after[key]) for key, value in before.items())
    context.send("plan", rows=rows, text=str(plan), layout=plan.layout, workers=plan.workers, same=same)
    dist.destroy_process_group()


def _joined(context: RankContext) -> Workers:
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    return find_workers()


def _own_share(rank: int, shares: Sequence[int] = SHARES) -> tuple[Tensor, Tensor]:
    first = sum(shares[:rank])
    inputs, labels = (part[first : first + shares[rank]] for part in whole_batch())
    return inputs, labels
