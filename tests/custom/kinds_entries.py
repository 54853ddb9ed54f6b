"""What ranks do to compare programs as people write them with plain torch, and mistakes that they make."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, random_split

import plait
from plait.custom.process.launcher import RENDEZVOUS
from plait.launch.values.job import RankContext
from tests.custom.kind import made, mlp, numbers, squared, trained_by_spread
from tests.custom.kinds import KINDS


def train(context: RankContext, argument: str) -> None:
    """Rank 0 tells the losses and writes the final weights."""
    asked = json.loads(argument)
    os.environ[RENDEZVOUS] = context.rendezvous
    losses, weights = trained_by_spread(KINDS[asked["kind"]], asked["layout"])
    if context.rank == 0:
        context.send("losses", losses=losses)
        real = {name: torch.view_as_real(one) if one.is_complex() else one for name, one in weights.items()}
        kept = {name: one.contiguous() for name, one in real.items()}
        save_file(kept, Path(asked["folder"]) / "weights.safetensors")


class Numbers(IterableDataset[Any]):
    """A stream that begins elsewhere on each rank, as an unseeded generator does."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(24):
            x = torch.randn(5, generator=generator).double()
            yield x, x[:3]


def save_and_resume(context: RankContext, argument: str) -> None:
    """A program's weights and the optimizer's state of them, saved and read back: each rank tells whether every bit is
    there again."""
    os.environ[RENDEZVOUS] = context.rendezvous
    name, _, folder = argument.partition(":")
    kind = KINDS[name]
    runs, weights = [], []
    for _ in range(2):
        model, optimizer = made(kind)
        runs.append(plait.spread(model, optimizer, loss_sum=kind.loss_sum, layout="replicate"))
        weights.append(model)
    for batch in runs[0].batches(kind.data()):
        runs[0].step(batch)
    average = {name: weight.clone() for name, weight in runs[0].weights().items()}
    runs[0].save(folder, extra={"average": average, "best": [0.5, "step 3"]} if context.rank == 0 else None)
    extra = runs[1].resume(folder)
    pairs = zip(weights[0].state_dict().values(), weights[1].state_dict().values(), strict=True)
    kept = all(torch.equal(extra["average"][name], weight) for name, weight in average.items())
    same = all(torch.equal(one, other) for one, other in pairs)
    context.send("same", same=same, kept=kept, best=extra["best"])


def unlike_data(context: RankContext, argument: str) -> None:
    """Each rank has other examples, another order of them, or more; told by all."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model = mlp().double()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    own = torch.Generator().manual_seed(context.rank)
    data: Any = {
        "split": lambda: random_split(numbers(5, examples=24), [12, 12], generator=own)[0],  # type: ignore[arg-type]
        "length": lambda: numbers(5, examples=12 + context.rank),
        "stream": lambda: Numbers(context.rank),
        "noise": Unseeded,
        "pairs": lambda: DataLoader(numbers(5, examples=12), 6, collate_fn=of_two_at_least),
    }[argument]()
    for batch in run.batches(data, batch=6):
        run.step(batch)


def late_hook(context: RankContext, argument: str) -> None:
    """A hook on a gradient, before plait.spread or after it."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model: Any = mlp().double()
    if argument == "before":
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    if argument == "after":
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for batch in run.batches(numbers(5), batch=6):
        run.step(batch)


def clip_by_value(context: RankContext, argument: str) -> None:
    """Whole gradients changed where the sentence says: rank 0 tells the error beside plain torch's."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model, plain = mlp().double(), mlp().double()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.01))
    run = plait.spread(model, optimizer, loss_sum=squared)
    usual = torch.optim.SGD(plain.parameters(), lr=0.1)
    data = numbers(5, examples=12)
    for number, batch in enumerate(run.batches(data, batch=6, order="given")):
        run.step(batch)
        usual.zero_grad()
        whole = [torch.stack([one[side] for one in data[6 * number : 6 * number + 6]]) for side in (0, 1)]
        total, count = squared(plain, whole)
        (total / count).backward()
        nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        usual.step()
    if context.rank == 0:
        pairs = zip(run.weights().values(), plain.parameters(), strict=True)
        context.send("error", error=max(float((one - other).abs().max()) for one, other in pairs))


def spread_twice(context: RankContext, argument: str) -> None:
    """A body is frozen in a first run and trained in a second one, each with an optimizer of its own: rank 0 tells the
    error beside plain torch's."""
    os.environ[RENDEZVOUS] = context.rendezvous
    layout: Any = argument
    torch.manual_seed(3)
    model, plain = mlp().double(), mlp().double()
    plain.load_state_dict(model.state_dict())
    data, run = numbers(5, examples=12), cast(Any, None)
    for body in ("frozen", "trained"):
        if body == "trained" and layout == "shard optimizer":
            with contextlib.suppress(plait.PlaitError):
                plait.spread(model, torch.optim.AdamW(model.parameters()), loss_sum=squared, layout=layout)
                raise AssertionError("the first run still held the weights")
            run.close()
        for net in (model, plain):
            net[0].requires_grad_(body == "trained")  # type: ignore[index]
        optimizer, usual = (
            torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05) for net in (model, plain)
        )
        run = plait.spread(model, optimizer, loss_sum=squared, layout=layout)
        for number, batch in enumerate(run.batches(data, batch=6, order="given")):
            run.step(batch)
            usual.zero_grad()
            total, count = squared(
                plain, [torch.stack([one[side] for one in data[6 * number : 6 * number + 6]]) for side in (0, 1)]
            )
            (total / count).backward()
            usual.step()
    run.close()
    if context.rank == 0:
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        context.send("error", error=max(float((one - other).abs().max()) for one, other in pairs))


def two_runs(context: RankContext, argument: str) -> None:
    """Two runs over one model at once."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model = mlp().double()
    runs = [
        plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared, layout="replicate")
        for _ in range(2)
    ]
    for batch in runs[0].batches(numbers(5), batch=6):
        runs[0].step(batch)


def draw_between(context: RankContext, argument: str) -> None:
    """What a program draws itself after each call, on every rank: its model has dropout, and its data draw, too."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    drawn: list[float] = []

    def draw() -> None:
        drawn.extend([random.random(), float(np.random.random()), float(torch.rand(()))])

    for _ in run.batches(Augmented(), batch=6):
        draw()  # and takes no step
    for batch in run.batches(Augmented(), batch=6):
        draw()
        run.step(batch)
        draw()
    run.evaluate(numbers(5), batch=4)
    draw()
    context.send("drawn", drawn=drawn)


def of_two_at_least(examples: list[Any]) -> Any:
    """A collate that compares its examples."""
    assert len(examples) > 1
    return default_collate(examples)


class Unseeded(Dataset[Any]):
    """Examples with noise of a generator that nobody seeds: other ones on each worker, and each time."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, position: int) -> Any:
        x, y = numbers(5)[position]
        return x + 0.1 * torch.from_numpy(self.generator.normal(size=5)), y


class Augmented(Dataset[Any]):
    """Examples with noise of their own."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, position: int) -> Any:
        x, y = numbers(5)[position]
        return x + 0.1 * torch.randn(5), y
