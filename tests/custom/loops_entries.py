"""Loops of people's own on several workers, each beside plain torch on the whole batch: rank 0 tells the errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import plait
from plait.custom.process.launcher import RENDEZVOUS
from plait.launch.values.job import RankContext
from tests.custom.kind import Later, mlp, numbers, squared
from tests.custom.kinds_training import mixed


def pair_of(make: Any, optimizer: Any) -> Any:
    """The same model twice, each with an optimizer of its own."""
    torch.manual_seed(3)
    model, plain = make().double(), make().double()
    plain.load_state_dict(model.state_dict())
    return model, optimizer(model), plain, optimizer(plain)


def tell(context: RankContext, model: Any, plain: Any, run: Any, **more: float) -> None:
    pairs = zip(run.weights().values(), plain.parameters(), strict=True)
    error = max(float((one - other).abs().max()) for one, other in pairs)
    if context.rank == 0:
        context.send("told", error=error, **more)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def torch_step(plain: Any, usual: Any, loss_sum: Any, batch: Any) -> None:
    usual.zero_grad()
    total, count = loss_sum(plain, batch)
    (total / count).backward()
    usual.step()


def replay(context: RankContext, argument: str) -> None:
    """DQN's loop: an environment that the net acts in, a buffer, and batches drawn from it between steps."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model, optimizer, plain, usual = pair_of(mlp, adamw)
    run = plait.spread(model, optimizer, loss_sum=squared, layout=argument)  # pyright: ignore[reportArgumentType]
    buffer: list[Any] = []
    state = torch.ones(5, dtype=torch.float64)
    for step in range(12):
        with torch.no_grad():
            acted = model(state[None])[0] if argument == "replicate" else state[:3]
        state = torch.tanh(torch.cat([acted, state[:2]]) + torch.rand(5).double())
        buffer.append((state, acted))
        if step >= 4:
            rows = torch.randint(len(buffer), (5,))
            batch = [torch.stack([buffer[int(row)][side] for row in rows]) for side in (0, 1)]
            run.step(run.share(batch))
            torch_step(plain, usual, squared, batch)
    tell(context, model, plain, run)


def unlike_batches(context: RankContext, argument: str) -> None:
    """Each worker makes another batch."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model = mlp().double()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    run.share((torch.full((4, 5), float(context.rank)), torch.zeros(4, 3)))


class Reader(nn.Module):
    """A recurrent net that begins where it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inside, self.head = nn.Embedding(11, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 11)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, last = self.inside(self.words(x), state.transpose(0, 1).contiguous())
        return self.head(hidden), last.transpose(0, 1)


def next_word(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y, state = batch
    found, last = model(x, state.clone())
    with torch.no_grad():
        state.copy_(last)
    return F.cross_entropy(found.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def carried(context: RankContext, argument: str) -> None:
    """Truncated backpropagation: five long texts, read three words at a time."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model, optimizer, plain, usual = pair_of(Reader, adamw)
    text = torch.randint(11, (5, 19), generator=torch.Generator().manual_seed(2))

    def windows() -> Iterator[Any]:
        for begin in range(0, 18, 3):
            yield text[:, begin : begin + 3], text[:, begin + 1 : begin + 4]

    run = plait.spread(model, optimizer, loss_sum=next_word, accumulate=2)
    state, whole = None, torch.zeros(5, 1, 5, dtype=torch.float64)
    for (x, y), everything in zip(run.batches(windows(), shares="equal"), windows(), strict=True):
        state = torch.zeros(len(x), 1, 5, dtype=torch.float64) if state is None else state
        run.step((x, y, state))
        torch_step(plain, usual, next_word, (*everything, whole))
    tell(context, model, plain, run)


def half(context: RankContext, argument: str) -> None:
    """float16 with a scale of losses, beside torch's GradScaler; in one step the gradients are not finite."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    optimizer, usual = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain))
    scaler = torch.amp.GradScaler("cpu")
    run = plait.spread(model, optimizer, loss_sum=squared, precision="fp16", clip=1.0)
    data = [(x.float(), y.float()) for x, y in numbers(5, examples=30)]
    data[14] = (data[14][0], data[14][1] * 3e4)
    skipped = 0
    for number, batch in enumerate(run.batches(data, batch=5, order="given")):
        run.step(batch)
        whole = [torch.stack([one[side] for one in data[5 * number : 5 * number + 5]]) for side in (0, 1)]
        usual.zero_grad()
        with torch.autocast("cpu", torch.float16):
            total, count = squared(plain, whole)
        scaler.scale(total / count).backward()
        scaler.unscale_(usual)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(usual)
        scaler.update()
        skipped += scaler.get_scale() < before
    tell(context, model, plain, run, skipped=skipped, scale=run._taker.scale.factor, wanted_scale=scaler.get_scale())


def metrics(context: RankContext, argument: str) -> None:
    """Exact sums over all of the data, and every answer in its order, on unlike shares."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model = mlp().double()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    data = numbers(5)
    whole = [torch.stack([one[side] for one in data]) for side in (0, 1)]
    answers = model(whole[0]).detach()
    found = run.evaluate_sums(
        data,
        lambda net, part: {"right": (net(part[0]).argmax(1) == part[1].argmax(1)).sum(), "n": len(part[0])},
        batch=4,
    )
    right = int((answers.argmax(1) == whole[1].argmax(1)).sum())
    gathered = [run.gather(model(x)).detach() for x, _ in run.batches(data, batch=5, order="given", last="keep")]
    if context.rank == 0:
        error = float((torch.cat(gathered) - answers).abs().max())
        context.send("told", error=error, right=int(found["right"]) - right, n=int(found["n"]))


def plateau(context: RankContext, argument: str) -> None:
    """A rate that falls where the loss on held-out data does; saved, and gone on with."""
    os.environ[RENDEZVOUS] = context.rendezvous
    layout, _, folder = argument.partition(":")
    rates = []
    for begun in range(2):
        torch.manual_seed(3)
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        run = plait.spread(
            model,
            optimizer,
            loss_sum=squared,
            schedulers=[scheduler],
            layout=layout,  # pyright: ignore[reportArgumentType]
        )
        if begun:
            run.resume(folder)
        for number in range(3):
            before = run.steps
            for batch in run.batches(numbers(5), batch=6):
                run.step(batch)
            if run.steps == before:
                continue  # a pass that was over when the run was saved
            scheduler.step(float(run.evaluate(numbers(5))) if number else 0.0)
            rates.append(optimizer.param_groups[0]["lr"])
            if not begun and number == 1:
                run.save(folder)
    if context.rank == 0:
        context.send("told", rates=rates)


def stale_update(context: RankContext, argument: str) -> None:
    """A proof of an update that goes wrong on this layout: rank 0 tells the verdict."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model = mlp().double()
    kind = Reversed if argument == "reversed" else torch.optim.AdamW
    run = plait.spread(model, kind(model.parameters(), lr=0.05), loss_sum=squared)
    for batch in run.batches(numbers(5), batch=6):
        verdict = run.verify(batch)
        if context.rank == 0:
            context.send("told", ok=verdict.ok, text=str(verdict))
        break


class Reversed(torch.optim.SGD):
    """Updates otherwise where there are several workers."""

    def step(self, closure: Any = None) -> Any:
        if plait.size() > 1 and any(p.grad is not None and p.grad.untyped_storage().nbytes() > p.grad.nbytes
                                    for group in self.param_groups for p in group["params"]):  # fmt: skip
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = -p.grad
        return super().step(closure)


def contrast(context: RankContext, argument: str) -> None:
    """A proof of a loss across the batch, that gathers rows or forgets to."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model, later = mlp().double(), Later()

    def loss_sum(net: Any, batch: Any) -> tuple[Tensor, int]:
        own = F.normalize(net(batch[0]), dim=1)
        rows = later.gather(own) if argument == "gathers" else own
        place = later.own_places(own) if argument == "gathers" else torch.arange(len(own))
        return F.cross_entropy(own @ rows.T, place, reduction="sum"), len(own)

    run = later.run = plait.spread(model, torch.optim.AdamW(model.parameters()), loss_sum=loss_sum, additive="no")
    for batch in run.batches(numbers(5), batch=6):
        verdict = run.verify(batch)
        run.plan()
        if context.rank == 0:
            context.send("told", ok=verdict.ok, text=str(verdict))
        break


class Noisy(torch.optim.SGD):
    """Langevin dynamics: each update draws noise."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.01 * torch.randn(p.shape))
        return found


def noisy_updates(context: RankContext, argument: str) -> None:
    """Every rank tells the weights that an optimizer with draws of its own has made, and what it draws after a proof
    and a plan, beside what it would have drawn without them."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model = mlp()
    run = plait.spread(model, Noisy(model.parameters(), lr=0.1), loss_sum=squared, layout="replicate")
    drawn = []
    for batch in run.batches([(x.float(), y.float()) for x, y in numbers(5)], batch=6):
        run.step(batch)
        state = torch.get_rng_state()
        drawn.append(float(torch.rand(())))
        torch.set_rng_state(state)
        run.verify(batch)
        run.plan()
        drawn.append(float(torch.rand(())))
    context.send("told", weights=[float(p.sum()) for p in model.parameters()], drawn=drawn)


def unlike_pairs(context: RankContext, argument: str) -> None:
    """A detector that leaves out the pair of boxes where it has none: in a step, or on one worker."""
    os.environ[RENDEZVOUS] = context.rendezvous
    model = mlp().double()

    def loss_sum(net: Any, batch: Any) -> Any:
        pair, boxes = squared(net, batch), batch[1][:, 0] > 0
        return (pair, (pair[0], boxes.sum())) if boxes.any() else (pair,)

    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum, additive="no")
    boxes = [[-1.0] * 4, [1.0] * 4] if argument == "in a step" else [[-1.0, -1.0, 1.0, 1.0]]
    for one in boxes:
        x = torch.ones(4, 5, dtype=torch.float64)
        run.step(run.share((x, torch.tensor(one, dtype=torch.float64)[:, None].expand(4, 3))))


def mixed_stream(context: RankContext, argument: str) -> None:
    """A collate that mixes the examples of an iterable: rank 0 tells the losses."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model = mlp().double()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    data = run.batches(iter(numbers(5)), batch=5, collate=mixed, collated_over="batch")
    losses = [float(run.step(batch)) for batch in data]
    if context.rank == 0:
        context.send("told", losses=losses)


def sums_by_class(context: RankContext, argument: str) -> None:
    """Sums whose names depend on the data, and the mean of a loss across the batch on a batch of fewer examples than
    workers."""
    os.environ[RENDEZVOUS] = context.rendezvous
    torch.manual_seed(3)
    model, later = mlp().double(), Later()

    def loss_sum(net: Any, batch: Any) -> tuple[Tensor, int]:
        own = net(batch[0])
        return (own @ later.gather(own).T).square().sum(), len(own)

    run = later.run = plait.spread(model, torch.optim.SGD(model.parameters()), loss_sum=loss_sum, additive="no")
    data = numbers(5, examples=5)
    found = run.evaluate_sums(data, lambda net, part: {f"class {int(y.argmax())}": 1 for y in part[1]}, batch=4)
    mean = float(run.evaluate(data, batch=4))
    if context.rank == 0:
        context.send("told", names=sorted(found), mean=mean)


def unlike_rows(context: RankContext, argument: str) -> None:
    os.environ[RENDEZVOUS] = context.rendezvous
    model = mlp().double()
    run = plait.spread(model, torch.optim.SGD(model.parameters()), loss_sum=squared, additive="no")
    run.gather(torch.zeros(2, 3 + context.rank))
