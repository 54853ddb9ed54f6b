"""What ranks do to train a model whose examples choose its layers, and to call it at unlike places."""

from __future__ import annotations

import json
import os
import random
import signal
from typing import Any, Literal

import torch
from torch import Tensor, nn

import plait
from plait.custom.process.launcher import RENDEZVOUS
from plait.launch.values.job import RankContext
from tests.custom.kind import squared

LAYERS, EXAMPLES, BATCH, WIDTH = 3, 12, 6, 5
MOST_S = 60
"""A rank that waits for ever is ended then."""


class Routes(nn.Module):
    """Layers, and by which of them each example runs: as rows of one call a layer, or one example after the other."""

    def __init__(self, form: Literal["rows", "each"], layers: nn.ModuleList) -> None:
        super().__init__()
        self.form, self.layers = form, layers

    def forward(self, x: Tensor, plans: Tensor) -> Tensor:
        """`plans` [examples, calls] are numbers of layers, -1 for none."""
        if self.form == "each":
            rows = []
            for row, plan in zip(x.split(1), plans.tolist(), strict=True):
                for number in plan:
                    row = row + torch.tanh(self.layers[number](row)) if number >= 0 else row
                rows.append(row)
            return torch.cat(rows) if rows else x
        for call in range(plans.shape[1]):
            found = torch.zeros_like(x)
            for number, layer in enumerate(self.layers):
                chosen = (plans[:, call] == number).nonzero()[:, 0]
                if len(chosen):
                    found = found.index_add(0, chosen, torch.tanh(layer(x[chosen])))
            x = x + found
        return x


class Routed(nn.Module):
    """Each example chooses its layers by its last numbers; they are units, or all `inside` of one, or the `whole`
    model is one."""

    def __init__(self, form: Literal["rows", "each"], place: Literal["units", "inside", "whole"]) -> None:
        super().__init__()
        self.chosen_in = "both"
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        routes: Any = Routes(form, layers)
        self.body = nn.ModuleList([routes]) if place == "inside" else routes  # a member of a list is gathered as one

    def forward(self, x: Tensor) -> Tensor:
        x, plans = x[:, :WIDTH], x[:, WIDTH:].long()
        if self.chosen_in == "training" and not self.training:
            plans = torch.zeros_like(plans)
        if self.chosen_in == "evaluation" and self.training:
            plans = torch.zeros_like(plans)
        body = self.body[0] if isinstance(self.body, nn.ModuleList) else self.body
        return self.leave(body(torch.tanh(self.enter(x)), plans))


def examples(choice: str, draw: random.Random) -> list[tuple[Tensor, Tensor]]:
    """Numbers, and behind them the layers that they choose: all the same, or each its own."""
    generator = torch.Generator().manual_seed(draw.randrange(2**30))
    alike = [draw.randrange(-1, LAYERS) for _ in range(2)]
    found = []
    for _ in range(EXAMPLES):
        plan = alike if choice == "alike" else [draw.randrange(-1, LAYERS) for _ in range(2)]
        x = torch.randn(WIDTH, generator=generator).double()
        found.append((torch.cat([x, torch.tensor(plan).double()]), torch.randn(3, generator=generator).double()))
    return found


def train(context: RankContext, argument: str) -> None:
    """Some steps, and an evaluation of each: rank 0 tells the error beside plain torch's."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MOST_S)
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(2)
    model, plain = (Routed(asked["form"], asked["place"]).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one.chosen_in = asked["chosen_in"]
    data = examples(asked["choice"], random.Random(asked["seed"]))
    spread: Any = plait.spread
    run = spread(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), loss_sum=squared, layout="shard parameters",
        accumulate=asked["accumulate"], seed=asked["seed"], **({"units": []} if asked["place"] == "whole" else {}),
    )  # fmt: skip
    usual, errors = torch.optim.AdamW(plain.parameters(), lr=0.05), []
    for number, batch in enumerate(run.batches(data, batch=BATCH, epochs=2, order="given")):
        loss, held_out = run.step(batch), run.evaluate(data, batch=BATCH)
        at = number % (EXAMPLES // BATCH) * BATCH
        usual.zero_grad()
        total, count = squared(plain, [torch.stack(side) for side in zip(*data[at : at + BATCH], strict=True)])
        (total / count).backward()
        usual.step()
        plain.eval()
        with torch.no_grad():
            total_held_out, held_out_count = squared(plain, [torch.stack(side) for side in zip(*data, strict=True)])
        plain.train()
        errors += [float(loss - total / count), float(held_out - total_held_out / held_out_count)]
    weights = run.weights()
    errors += [float((weights[name] - one).abs().max()) for name, one in plain.named_parameters()]
    if context.rank == 0:
        context.send("error", error=max(map(abs, errors)))


class ChosenNorms(nn.Module):
    """Examples choose a BatchNorm, or none, by their first number."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.leave = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number, norm in enumerate(self.norms):
            if bool((x[:, 0] == number).any()):
                x = norm(x)
        return self.leave(x)


def choose_norms(context: RankContext, argument: str) -> None:
    """Each rank's examples choose as asked: the number of a norm, or -1."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MOST_S)
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(2)
    model = plait.convert_batch_norm(ChosenNorms().double())
    chosen = json.loads(argument)
    data = [
        (torch.cat([torch.tensor([float(chosen[number // 2 % 3])]).double(), x[1:WIDTH]]), y)
        for number, (x, y) in enumerate(examples("alike", random.Random(1)))
    ]
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_sum=squared, layout="replicate")
    for batch in run.batches(data, batch=BATCH, order="given", shares="equal"):
        run.step(batch)


def call_alone(context: RankContext, argument: str) -> None:
    """Rank 0 calls the model between steps, as for a sample to look at; then all of them do what is asked."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MOST_S)
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(2)
    model = Routed("rows", "units").double()
    data = examples("alike", random.Random(1))
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_sum=squared, layout="shard parameters")
    for batch in run.batches(data, batch=BATCH, order="given"):
        run.step(batch)
        if context.rank == 0:
            with torch.no_grad():
                model(batch[0])
        if argument == "weights":
            run.weights()
        elif argument == "save":
            run.save("nowhere")
