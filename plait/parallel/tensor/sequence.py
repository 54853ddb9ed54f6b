"""The flat stream shared out over the ranks of `tensor`: each holds as many of its consecutive rows.

Between the products that a layer shares out, every rank norms and adds up its own rows only. Before such products the
rows are gathered, after them the ranks' partial results are summed and each keeps its rows of the sum; one is the
other's backward. Where the ranks do not divide the rows, the last ones hold rows of padding behind the end, whose
gradients are zero.

Legend: n all rows of the stream, m those of one rank, d numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.parallel.comm.collectives import SPREAD_TAG, SUM_TAG, all_gather, reduce_scatter, spread_own, sum_parts


def stream_rows(rows: int, parts: int) -> int:
    """Rows of a stream that each of `parts` ranks holds, padding included."""
    return -(-rows // parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSplit:
    """Converts between a rank's rows and all rows. Every rank of the group must make the same calls in order."""

    group: dist.ProcessGroup
    parts: int
    index: int
    gather: Callable[[Tensor, int], Tensor]
    """From this rank's rows [m, d] to all rows [n, d], given n; backward sums the ranks' gradients."""
    scatter: Callable[[Tensor], Tensor]
    """From this rank's addend of all rows [n, d] to its own rows of the sum [m, d]."""


def sequence_split(group: dist.ProcessGroup) -> SequenceSplit:
    """The SequenceSplit over the ranks of a group."""

    def gather(own_md: Tensor, rows: int) -> Tensor:
        every_nd: Tensor = _Gather.apply(own_md, rows, group)  # type: ignore[assignment]
        return every_nd

    def scatter(partial_nd: Tensor) -> Tensor:
        own_md: Tensor = _Scatter.apply(partial_nd, group)  # type: ignore[assignment]
        return own_md

    parts, index = dist.get_world_size(group), dist.get_rank(group)
    return SequenceSplit(group=group, parts=parts, index=index, gather=gather, scatter=scatter)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_md: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own_md, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _summed(grads[0], ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_nd: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = len(partial_nd), group
        return _summed(partial_nd, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gathered(grads[0], ctx.rows, ctx.group), None


def _gathered(own_md: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    parts = dist.get_world_size(group)
    every = own_md.new_empty((parts * len(own_md), *own_md.shape[1:]))
    if every.device.type == "cpu":  # see Note [room first] in collectives.py
        every.chunk(parts)[dist.get_rank(group)].copy_(own_md)
        for work in spread_own(every, group, SPREAD_TAG):
            work.wait()
    else:
        all_gather(every, own_md.contiguous(), group=group)
    return every if len(every) == rows else every[:rows]


def _summed(partial_nd: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = dist.get_world_size(group)
    sent = _padded(partial_nd.contiguous(), parts)
    own = sent.new_empty((len(sent) // parts, *sent.shape[1:]))
    if sent.device.type == "cpu":  # see Note [room first] in collectives.py
        sum_parts(own, sent, group, SUM_TAG)
    else:
        reduce_scatter(own, sent, group=group)
    return own


def _padded(rows_nd: Tensor, parts: int) -> Tensor:
    """Rows of zeros behind the last, until the parts are equal."""
    missing = stream_rows(len(rows_nd), parts) * parts - len(rows_nd)
    return torch.nn.functional.pad(rows_nd, (0, 0, 0, missing)) if missing else rows_nd
