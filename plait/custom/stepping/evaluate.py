"""The exact mean loss over data that all workers share, without a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.custom.cutting import BatchCut, batch_part
from plait.custom.data.ahead import unseeded
from plait.custom.data.sources import ExamplePositions, Stream, source_of
from plait.custom.group import Workers
from plait.custom.layouts.first_weights import broadcast_all
from plait.custom.program import Program
from plait.custom.seeds import seed_everything, seed_from
from plait.custom.stepping.gradients import divisor_of
from plait.custom.structure import on_device
from plait.errors import PlaitError
from plait.parallel.exchange import gather_json


def evaluate_mean(
    program: Program, workers: Workers, data: Any, batch: int, index: int, cut: BatchCut | None
) -> Tensor:
    """The mean of one loss over all examples: 0-dim, float64; see `evaluate_sums`."""

    def sums(part: Any) -> dict[str, Tensor]:
        terms = program.loss_sum(index, part)
        return {"losses": terms.sums, "counts": terms.counts}

    found = evaluate_sums(program, workers, data, batch, cut, sums)
    return (found["losses"] / divisor_of(found["counts"])).sum()


def evaluate_sums(
    program: Program,
    workers: Workers,
    data: Any,
    batch: int,
    cut: BatchCut | None,
    of_part: Callable[[Any], Mapping[str, Any]],
) -> dict[str, Tensor]:
    """What a function returns for parts of the data (numbers and tensors, by name), summed over all of the data in the
    models' evaluation mode: float64, the same on all workers.

    Every worker must call it; blocks. Buffers are the first worker's meanwhile.
    """
    workers.announce("run.evaluate")()
    totals: dict[str, Tensor] = {}
    with torch.no_grad(), evaluation_mode(*program.models), first_buffers(program, workers):
        source = source_of(data, batch=batch, collate=None, cut=cut)
        for number, (part, counts) in enumerate(_parts(source, batch, workers)):
            if not counts and program.additive == "no":
                part = batch_part(part, 0, 0, cut)  # what is gathered of it would count
            seed_everything(seed_from("evaluate", program.seed, number, workers.rank))
            for name, value in of_part(on_device(part, workers.device)).items():
                found = _as_sum(name, value, workers)
                totals[name] = totals.get(name, torch.zeros_like(found)) + (found if counts else 0)
    workers.order.end()
    shapes: dict[str, list[int]] = {}
    for one in gather_json({name: list(total.shape) for name, total in totals.items()}, workers.sums):
        for name, shape in one.items():
            if shapes.setdefault(name, shape) != shape:
                raise PlaitError(f"what is summed as {name} has unlike shapes: {shapes[name]} and {shape}")
    return {
        name: workers.sums(totals.get(name, torch.zeros(shapes[name], dtype=torch.float64, device=workers.device)))
        for name in sorted(shapes)
    }


def _as_sum(name: str, value: Any, workers: Workers) -> Tensor:
    if not isinstance(value, Tensor | int | float):
        raise PlaitError(f"what is summed as {name} is a {type(value).__name__}; return numbers and tensors")
    return torch.as_tensor(value).detach().to(workers.device, torch.float64)


def _parts(source: ExamplePositions | Stream, batch: int, workers: Workers) -> Iterator[tuple[Any, bool]]:
    """This worker's part of each batch. Where there are fewer examples than workers some get one that another has,
    which does not count: a model whose weights are sharded must run as often on all."""
    if isinstance(source, ExamplePositions):
        for begin in range(0, source.size, batch):
            size = min(batch, source.size - begin)
            first, end, counts = _own(size, workers)
            yield source.read(range(begin + first, begin + end), unseeded), counts
        return
    for size, part in source.batches(batch):
        first, end, counts = _own(size, workers)
        yield part(first, end), counts


def _own(size: int, workers: Workers) -> tuple[int, int, bool]:
    if size < workers.size:
        own = min(workers.rank, size - 1)
        return own, own + 1, workers.rank < size
    return size * workers.rank // workers.size, size * (workers.rank + 1) // workers.size, True


@contextmanager
def evaluation_mode(*roots: nn.Module) -> Iterator[None]:
    """Put these modules and all within them into evaluation mode, and afterwards each back into its own."""
    modules = [module for root in roots for module in root.modules()]
    modes = [module.training for module in modules]
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


@contextmanager
def first_buffers(program: Program, workers: Workers) -> Iterator[None]:
    """The first worker's buffers on all: those of norms over local batches differ from worker to worker."""
    buffers = list(program.named_buffers().values())
    if workers.size == 1 or not buffers:
        yield
        return
    with program.buffers_kept():
        broadcast_all(buffers, workers)
        yield
