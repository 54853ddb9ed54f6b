"""What ranks do in tests of whole runs: training, saving, resuming, and mistakes that programs make."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import plait
from plait.custom.process.launcher import RENDEZVOUS
from plait.custom.run import SpreadRun
from plait.launch.values.job import RankContext
from plait.parallel.orthogonalize import orthogonalize
from tests.custom.models import CASES, Layers

EXAMPLES = 24


def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Squared differences, and how many."""
    return ((model(batch[0]) - batch[1]) ** 2).sum(), batch[1].numel()


def data() -> list[tuple[Tensor, Tensor]]:
    """Examples that are the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(5, generator=generator, dtype=torch.float64), torch.randn(3, generator=generator).double())
        for _ in range(EXAMPLES)
    ]


def build(asked: dict[str, Any], rank: int) -> SpreadRun:
    """A run with momentum, clipping and a scheduler; ranks but 0 draw other weights, which must not matter."""
    torch.manual_seed(3 + rank)
    model = Layers().double()
    some, rest = list(model.layers.parameters()), [*model.enter.parameters(), *model.leave.parameters()]
    groups = [{"params": some, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return plait.spread(
        model, optimizer, loss_sum=loss_sum, layout=asked["layout"], clip=0.5, accumulate=asked.get("accumulate", 1),
        schedulers=[scheduler], bucket_mib=0.0005, recompute=asked.get("recompute", "none"),
    )  # fmt: skip


def build_whole(asked: dict[str, Any], rank: int) -> SpreadRun:
    """A run whose inner matrices are updated as a whole, and all else by AdamW."""
    torch.manual_seed(3 + rank)
    model = Layers().double()
    inner = [p for p in model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not one for one in inner)]
    whole: dict[str, Any] = {
        "plait.Muon": lambda: plait.Muon(inner, lr=0.05),
        "torch.optim.Muon": lambda: torch.optim.Muon(inner, lr=0.05),
        "Adafactor": lambda: torch.optim.Adafactor(inner, lr=0.05),
        "by part": lambda: SGD_BY_PART(inner, lr=0.05),
    }
    optimizers = (whole[asked["whole"]](), torch.optim.AdamW(rest, lr=0.02))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.5)
    return plait.spread(
        model, optimizers, loss_sum=loss_sum, layout=asked["layout"], clip=0.5, schedulers=[scheduler],
        bucket_mib=0.0005, accumulate=asked.get("accumulate", 1),
    )  # fmt: skip


def _step_by_part(self: torch.optim.Optimizer, closure: None = None) -> None:
    """Muon without momentum, of whatever part of a matrix this worker has."""
    with torch.no_grad():
        for parameter in self.param_groups[0]["params"]:
            part = parameter.grad.reshape(len(parameter), -1)
            turned = part.T if len(part) > part.shape[1] else part
            found = orthogonalize(turned.clone()[None])[0]
            parameter.sub_((found if turned is part else found.T).reshape(parameter.shape), alpha=0.05)


SGD_BY_PART: Any = type(
    "SGD", (torch.optim.SGD,), {"__module__": "torch.optim.by_part", "step": _step_by_part, "__doc__": "A wrong Muon."}
)
"""Passes for an optimizer of torch's that treats each number alone, and does not."""


def verify_whole(context: RankContext, argument: str) -> None:
    """A run's proof, told by each rank."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    run = build_whole(asked, context.rank)
    for batch in run.batches(data(), batch=24, shares=[1, 3]):
        verdict = run.verify(batch)
        context.send("verdict", ok=verdict.ok, failed=[one.kind for one in verdict.findings if not one.passes])


def train(context: RankContext, argument: str) -> None:
    """Steps of a run; rank 0 tells the losses and writes the weights."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    run = (build_whole if "whole" in asked else build)(asked, context.rank)
    if asked.get("resume"):
        run.resume(asked["resume"])
    losses = []
    for batch in run.batches(data(), batch=8, epochs=3, shares=asked.get("shares", "equal")):
        losses.append(float(run.step(batch)))
        if run.steps == asked.get("stop"):
            run.save(asked["save"])
            break
    held_out = float(run.evaluate(data()[:7], batch=4))
    weights = {name: weight.clone() for name, weight in run.weights().items()}
    if context.rank == 0:
        context.send("losses", losses=losses, held_out=held_out)
        save_file(weights, Path(asked["folder"]) / "weights.safetensors")


def skip_a_step(context: RankContext, argument: str) -> None:
    """Rank 1 leaves a batch out."""
    os.environ[RENDEZVOUS] = context.rendezvous
    run = build({"layout": "replicate"}, context.rank)
    for number, batch in enumerate(run.batches(data(), batch=8)):
        if context.rank == 1 and number == 1:
            continue
        run.step(batch)


def convert_later(context: RankContext, argument: str) -> None:
    """The model's weights change their kind before the first step, or after each."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    run = build(asked, context.rank)
    (model,) = run._program.models  # pyright: ignore[reportPrivateUsage]
    if asked["when"] == "before":
        model.to(getattr(torch, asked["to"]))
    for batch in run.batches(data(), batch=8):
        run.step(batch)
        model.to(getattr(torch, asked["to"]))


class Chosen(nn.Module):
    """Layers that examples choose by their first number."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 5), nn.Linear(5, 3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        entered = torch.tanh(self.enter(x))
        found = entered.clone()
        for number, layer in enumerate(self.layers):
            chosen = (x[:, 0] == number).nonzero()[:, 0]
            if len(chosen):
                found = found.index_add(0, chosen, layer(entered[chosen]))
        return self.leave(found)


def choose_by_example(context: RankContext, argument: str) -> None:
    """Examples of rank 0 choose one layer, those of rank 1 another."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(1)
    model = Chosen().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = plait.spread(model, optimizer, loss_sum=loss_sum, layout=json.loads(argument)["layout"])
    chosen = [0, 0, 0, 0, 1, 1, 1, 1]
    examples = [(torch.full((5,), float(chosen[number % 8])).double(), y) for number, (_, y) in enumerate(data())]
    for batch in run.batches(examples, batch=8, order="given"):
        run.step(batch)


def call_alone(context: RankContext, argument: str) -> None:
    """Rank 0 calls what all must call."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    run = build(asked, context.rank)
    calls = {
        "run.save": lambda batch: run.save(asked["folder"]),
        "run.evaluate": lambda batch: run.evaluate(data()),
        "run.verify": run.verify,
        "run.plan": lambda batch: run.plan(),
    }
    for batch in run.batches(data(), batch=8):
        run.step(batch)
        if context.rank == 0:
            calls[asked["call"]](batch)


def call_a_part(context: RankContext, argument: str) -> None:
    """The loss uses a part of the model without a call of the whole."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model = Layers().double()
    run = plait.spread(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_sum=lambda model, batch: loss_sum(model.enter, (batch[0], batch[0][:, :1])),
        layout="shard parameters",
    )
    for batch in run.batches(data(), batch=8):
        run.step(batch)


class Custom(torch.optim.SGD):
    """An optimizer of a person's own, of which plait knows nothing."""


def refuse(context: RankContext, argument: str) -> None:
    """Layouts that cannot carry a model or an optimizer; each rank tells the sentences."""
    os.environ[RENDEZVOUS] = context.rendezvous
    told = []
    for name, layout, kind in (
        ("mixed", "shard parameters", "SGD"),
        ("one_memory", "shard optimizer", "SGD"),
        ("mlp", "shard optimizer", "Custom"),
        ("across", "shard parameters", "SGD"),
    ):
        if name == "across":
            model: nn.Module = Layers()
            model.leave.bias = model.layers[0][1].bias = nn.Parameter(torch.zeros(6))  # type: ignore[union-attr, index]
        elif name == "mixed":
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3).to(torch.bfloat16))
        else:
            model = CASES[name]().model
        try:
            options: Any = {"layout": layout}
            made = Custom if kind == "Custom" else torch.optim.SGD
            plait.spread(model, made(model.parameters(), lr=0.1), loss_sum=loss_sum, **options)
        except plait.PlaitError as refusal:
            told.append(str(refusal))
    context.send("told", told=told)


def travel(context: RankContext, argument: str) -> None:
    """Gradients in bf16, over buckets measured on the link: rank 0 tells the error against exact ones."""
    os.environ[RENDEZVOUS] = context.rendezvous
    asked = json.loads(argument)
    found = []
    for options in ({}, {"transfer": "bf16", "bucket_mib": "auto"}):
        torch.manual_seed(3)
        model = Layers()
        made: Any = {"layout": asked["layout"], **options}
        run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum, **made)
        for batch in run.batches([(x.float(), y.float()) for x, y in data()], batch=12, order="given"):
            run.step(batch)
            break
        found.append(torch.cat([one.flatten() for one in run.gradients().values()]))
    error = float((found[1] - found[0]).norm() / found[0].norm())
    if context.rank == 0:
        context.send("error", error=error)


def unlike_models(context: RankContext, argument: str) -> None:
    """Ranks build models of different depth."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model = Layers(depth=2 + context.rank)
    plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)


class Slow(nn.Module):
    """Takes its time for each example, on one rank more than on the others."""

    def __init__(self, per_example_s: float) -> None:
        super().__init__()
        self.inside, self.per_example_s = nn.Linear(6, 6), per_example_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(len(x) * self.per_example_s)
        return self.inside(x)


def measured_shares(context: RankContext, argument: str) -> None:
    """Rank 1 is slow: its layer sleeps longer for each example. With norms over all workers, or sharded parameters,
    fast ranks wait for it inside of their own forward passes."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(1)
    model: nn.Module = Layers(depth=1).double()
    layers: Any = model
    layers.layers.append(Slow(0.01 if context.rank == 1 else 0.002).double())
    if asked["kind"] == "norms":
        layers.layers.append(nn.BatchNorm1d(6).double())
        plait.convert_batch_norm(model)
    layout: Any = "shard parameters" if asked["kind"] == "shards" else "replicate"
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_sum=loss_sum, layout=layout)
    sizes, losses = [], []
    for batch in run.batches(data(), batch=24, epochs=16, shares="measured", order="given"):
        sizes.append(len(batch[0]))
        losses.append(float(run.step(batch)))
    context.send("sizes", sizes=sizes, losses=losses, shares=list(run.shares))


def parts_of_a_small_share(context: RankContext, argument: str) -> None:
    """One rank's share has fewer examples than there are parts, and norms wait for each other in each part."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(1)
    model = plait.convert_batch_norm(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double())
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum, accumulate=4)
    losses = [float(run.step(batch)) for batch in run.batches(data(), batch=8, shares=[3, 1], order="given")]
    context.send("losses", losses=losses)


def helpers(context: RankContext, argument: str) -> None:
    """Values from rank to rank."""
    os.environ[RENDEZVOUS] = context.rendezvous
    rank = context.rank
    assert plait.broadcast(10 + rank, source=1) == 11
    assert plait.all_reduce(1.5 + rank, "mean") == 2.0
    assert plait.all_reduce(rank, "largest") == 1
    tensor = torch.full((2,), float(rank))
    assert plait.all_reduce(tensor) is tensor and tensor.tolist() == [1.0, 1.0]
    assert (plait.rank(), plait.size()) == (rank, 2)
    large = 2**60 + 1  # no float has it
    assert plait.broadcast(large + rank) == large and plait.all_reduce(large + rank, "largest") == large + 1
    across = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() + rank
    assert plait.all_reduce(across.t()).tolist() == [[3.0, 5.0], [7.0, 9.0]]
    weight = torch.full((2,), float(rank), requires_grad=True)
    assert plait.broadcast(weight, source=1) is weight and weight.tolist() == [1.0, 1.0]
    context.send("done", ok=True)


def grown_batch(context: RankContext, argument: str) -> None:
    """The batch grows with the workers, and the rate with it."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(1)
    model = nn.Linear(5, 3).double()
    start = model.weight.detach().clone()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    factors, sizes = [], []
    for batch in run.batches(data(), batch_per_worker=4, epochs=2, order="given"):
        run.step(batch)
        sizes.append(len(batch[0]))
        moved = model.weight.detach() - start
        start = model.weight.detach().clone()
        factors.append(float((moved / run.gradients()["weight"]).mean() / -0.1))
    run.timeline(json.loads(argument)["trace"])
    if context.rank == 0:
        context.send("rates", factors=factors, sizes=sizes)


def recorded_steps(context: RankContext, argument: str) -> None:
    """A model of three layers whose second step is recorded; tells the weights, for a comparison without."""
    os.environ[RENDEZVOUS] = context.rendezvous
    asked = json.loads(argument)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum, layout=asked["layout"])
    for number, batch in enumerate(run.batches(data(), batch_per_worker=4, order="given")):
        if number == 1 and asked["trace"]:
            run.record_steps(asked["trace"], 1)
        run.step(batch)
    weights = run.weights()
    if context.rank == 0:
        context.send("weights", weights=[weight.tolist() for weight in weights.values()])


def worker_that_raises(context: RankContext, argument: str) -> None:
    """A GAN-like pair whose second loss fails on one rank."""
    os.environ[RENDEZVOUS] = context.rendezvous
    first, second = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    optimizers = tuple(torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second))

    def one(models: Any, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(models[0](batch[0]), batch[1], reduction="sum"), batch[1].numel()

    def other(models: Any, batch: Any) -> tuple[Tensor, int]:
        if context.rank == 1:
            raise ValueError("no such label")
        return F.mse_loss(models[1](batch[0]), batch[1], reduction="sum"), batch[1].numel()

    run = plait.spread((first, second), optimizers, loss_sum=(one, other))
    for batch in run.batches(data(), batch=8):
        run.step(batch)


def renormed(context: RankContext, argument: str) -> None:
    """An embedding that shortens the rows that it looks up."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model = nn.Sequential(nn.Embedding(9, 3, max_norm=0.5), nn.Linear(3, 2))
    plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)


def drift_apart(context: RankContext, argument: str) -> None:
    """One rank changes a weight beside the steps: before the first one, or between two."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    run = build({"layout": "replicate"}, context.rank)
    (model,) = run._program.models  # pyright: ignore[reportPrivateUsage]
    for number, batch in enumerate(run.batches(data(), batch=8, epochs=20)):
        run.step(batch)
        if context.rank == 1 and number == asked["after"]:
            with torch.no_grad():
                model.layers[1][1].weight[0] *= 0.9  # type: ignore[index]
