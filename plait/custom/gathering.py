"""`run.gather`: every worker's rows inside of a loss, with gradients back to whom they came from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.custom.group import Workers
from plait.errors import PlaitError
from plait.parallel.exchange import gather_tensors

_ALONE: ContextVar[bool] = ContextVar("plait_alone", default=False)
"""Whether this process computes a whole batch by itself, as a proof does, so that there is nothing to gather."""


@contextmanager
def gathering_nothing() -> Iterator[None]:
    """Within the block `gather` returns what it is given: the whole batch is here."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


class Gathering:
    """Gathers rows for a run, and knows how long it waited for other workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._begin = workers, workers.order.message("run.gather")
        self.waited_s = 0.0

    def gather(self, rows: Tensor) -> Tensor:
        """All workers' rows [rows of all, …] in rank order, of this worker's [rows, …]; a worker may have none.

        The gradient of each row is the sum over all workers' losses. Every worker must call it, and use what it
        returns in its loss, as often and in the same order; blocks.
        """
        if self._workers.size == 1 or _ALONE.get():
            return rows
        if not rows.dim():
            raise PlaitError("run.gather takes rows, one for each example; give x.reshape(1) for a single number")
        return _Gather.apply(rows, self)  # type: ignore[no-any-return]

    def own_places(self, rows: Tensor) -> Tensor:
        """The indices [rows] of this worker's rows in what `gather` returns, on the rows' device. Every worker must
        call it; blocks."""
        first = 0
        if self._workers.size > 1 and not _ALONE.get():
            counts = self._workers.sums.gather(torch.tensor([len(rows)]))
            first = sum(int(one) for one in counts[: self._workers.rank])
        return torch.arange(first, first + len(rows), device=rows.device)

    def rows_of_all(self, rows: Tensor) -> tuple[Tensor, int]:
        """All workers' rows without a graph, and how many stand before this worker's own."""
        began = time.perf_counter()
        self._check_place()
        found = gather_tensors(rows, self._workers.sums)
        self.waited_s += time.perf_counter() - began
        for rank, other in enumerate(found):
            if other.dtype != rows.dtype or other.shape[1:] != rows.shape[1:]:
                raise PlaitError(
                    f"run.gather: worker {rank} has rows of shape {list(other.shape[1:])} and {other.dtype}, worker "
                    f"{self._workers.rank} of shape {list(rows.shape[1:])} and {rows.dtype}; bring them to one, as by "
                    "padding them alike"
                )
        return torch.cat(found), sum(map(len, found[: self._workers.rank]))

    def sum(self, gradient: Tensor) -> Tensor:
        """The sum over all workers, in numbers that gloo can add."""
        began = time.perf_counter()
        self._check_place()
        narrow = gradient.dtype in (torch.float16, torch.bfloat16)
        summed = self._workers.sums(
            gradient.float() if narrow else gradient.clone(memory_format=torch.contiguous_format)
        )
        self.waited_s += time.perf_counter() - began
        return summed.to(gradient.dtype)

    def _check_place(self) -> None:
        """Raise PlaitError where others wait for something else."""
        _, compare = self._begin(0)
        compare()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathering: Gathering) -> Tensor:
        found, ctx.first = gathering.rows_of_all(rows)
        ctx.count, ctx.gathering = len(rows), gathering
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        summed = ctx.gathering.sum(grad_outputs[0])
        return summed[ctx.first : ctx.first + ctx.count], None
