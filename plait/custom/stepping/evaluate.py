"""The exact mean loss over data that all workers share, without a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.custom.cutting import BatchCut
from plait.custom.data.ahead import unseeded
from plait.custom.data.moving import on_device
from plait.custom.data.sources import ExamplePositions, Stream, source_of
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.seeds import seed_everything, seed_from
from plait.custom.stepping.gradients import divisor_of
from plait.custom.strands.description import Strands
from plait.custom.strands.first_weights import broadcast_all


def evaluate_mean(
    program: Program, strands: Strands, workers: Workers, data: Any, batch: int, index: int, cut: BatchCut | None
) -> Tensor:
    """The mean of one loss over all examples, in the models' evaluation mode: 0-dim, float64, the same on all workers.

    Every worker must call it; blocks. Buffers are the first worker's meanwhile.
    """
    workers.announce("run.evaluate")()
    total = torch.zeros(2, dtype=torch.float64, device=workers.device)
    with torch.no_grad(), evaluation_mode(*program.models), first_buffers(program, workers):
        for number, (part, counts) in enumerate(
            _parts(source_of(data, batch=batch, collate=None, cut=cut), batch, workers)
        ):
            seed_everything(seed_from("evaluate", program.seed, number, workers.rank))
            loss, count = program.loss_sum(index, on_device(part, workers.device))
            if counts:
                total += torch.stack([loss.to(torch.float64), count])
    workers.sums(total)
    return total[0] / divisor_of(total[1])


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
    own = [buffer.clone() for buffer in buffers]
    broadcast_all(buffers, workers)
    try:
        yield
    finally:
        for buffer, kept in zip(buffers, own, strict=True):
            buffer.copy_(kept)
