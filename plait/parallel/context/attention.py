"""`context` (CP): each rank holds a balanced part of every row's tokens, and its queries attend to all ranks' keys.

Note [gathered twice]: a rank computes its causal squares, for which it has all keys, while keys and values of the axis
are on their way; then the rectangles that look further back (cut.py). Only its own keys and values are kept for
the backward pass, which gathers again and returns the gradients of the others' keys by one sum.

Legend: b rows of the batch, t tokens of a row on this rank, h heads, k key/value heads, d elements of a head; c ranks
of the axis, m tokens of a chunk (t = 2m).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from plait.model.attention import Attention, Documents
from plait.model.experts.capacity import RowSpans
from plait.model.experts.mixture import Mixture
from plait.model.latent.attention import LatentAttention
from plait.parallel.context.cut import ContextCut, Rectangle, cut_attention
from plait.parallel.context.exchange import Exchange
from plait.parallel.context.kernels import Kernel, kernel_for, merge_results
from plait.parallel.outside_graphs import outside_graphs
from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution


def context(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """All layers' attention over the axis `context`; size 1 leaves it as it is. Every rank must call it."""
    if mesh["context"].size() == 1:
        return sharded
    # Its collectives belong to no graph.
    attend = outside_graphs(ContextAttend(mesh.get_group("context")), execution.compile)
    sums = partial(_summed_over, mesh.get_group("context"))
    parts, index = mesh["context"].size(), mesh.get_local_rank("context")
    spans = RowSpans(of=2 * parts, own=(index, 2 * parts - 1 - index))
    for chunk in sharded.chunks:
        for module in chunk.modules():
            if isinstance(module, (Attention, LatentAttention)):
                module.attend = attend
            elif isinstance(module, Mixture):
                module.over_sequence, module.spans = sums, spans
    return replace(sharded, over_sequence=sums)


def _summed_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total


class ContextAttend:
    """Attention of this rank's queries over all keys of the axis: an `Attend` that takes the *whole* rows' documents.

    Tensors are in the order of `zigzag_columns`. Every rank of the group must call it, forward and backward, in the
    same order and with the same documents.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.exchange = Exchange(group)
        self._last: dict[int, tuple[tuple[object, ...], ContextCut]] = {}

    def __call__(
        self, q_bthd: Tensor, k_btkd: Tensor, v_btkd: Tensor, documents: Documents | None, window: int = 0
    ) -> Tensor:
        kind = q_bthd.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q_bthd.dtype
        q, k, v = (x.to(dtype) for x in (q_bthd, k_btkd, v_btkd))
        mixed = _Attend.apply(q, k, v, self._cut(q_bthd, documents, window), self.exchange)
        assert isinstance(mixed, Tensor)
        return mixed

    def _cut(self, q_bthd: Tensor, documents: Documents | None, window: int) -> ContextCut:
        """The cut of a micro-batch's attention; it is the same for all its layers of one window, so the last one is
        kept."""
        lengths = None if documents is None else documents.lengths
        key = (lengths, q_bthd.shape[:2])
        if window not in self._last or self._last[window][0] != key:
            rows, tokens = q_bthd.shape[:2]
            parts, index = self.exchange.parts, self.exchange.index
            sizes = {"rows": rows, "sequence": tokens * parts, "parts": parts, "index": index}
            self._last[window] = (key, cut_attention(lengths, **sizes, window=window))
        return self._last[window][1]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cut: ContextCut, exchange: Exchange) -> Tensor:
        kernel = kernel_for(q, cut.window if cut.has_bands else 0)
        gathering = exchange.gather(k, v) if cut.crosses else None
        outcome = kernel.segments_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cut.runs)
        out, total = (x.unflatten(0, q.shape[:2]) for x in outcome)
        if gathering is not None:
            keys, values = gathering.wait()
            for one in cut.rectangles:
                piece = kernel.forward(_queries(q, one), _keys(keys, one), _keys(values, one), one.mask)
                merge_results((_queries(out, one), _queries(total, one)), piece)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.cut, ctx.exchange = cut, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        (grad,), (q, k, v, out, total) = grads, ctx.saved_tensors
        cut = ctx.cut
        kernel = kernel_for(q, cut.window if cut.has_bands else 0)
        gathering = ctx.exchange.gather(k, v) if cut.crosses else None
        flat = tuple(x.flatten(0, 1) for x in (grad, q, k, v, out, total))
        squares = kernel.segments_backward(flat, cut.runs)
        grad_q, grad_k, grad_v = (x.unflatten(0, q.shape[:2]) for x in squares)
        if gathering is not None:
            keys, values = gathering.wait()
            grads_kv = torch.zeros((2, *keys.shape), dtype=keys.dtype, device=keys.device)
            for one in cut.rectangles:
                _rectangle_backward(kernel, one, (grad, q, keys, values, out, total), (grad_q, *grads_kv))
            del gathering, keys, values
            ctx.exchange.add_home(grads_kv, grad_k, grad_v)
        return grad_q, grad_k, grad_v, None, None


def _rectangle_backward(kernel: Kernel, one: Rectangle, tensors: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
    """Add a rectangle's gradients to those of this rank's queries and of all keys and values."""
    grad, q, keys, values, out, total = tensors
    own = [_queries(x, one) for x in (grad, q)]
    whole = [_queries(x, one) for x in (out, total)]
    found = kernel.backward((*own, _keys(keys, one), _keys(values, one), *whole), one.mask)
    places = (_queries(sums[0], one), _keys(sums[1], one), _keys(sums[2], one))
    for place, part in zip(places, found, strict=True):
        place.add_(part)


def _queries(x: Tensor, one: Rectangle) -> Tensor:
    return x.narrow(0, *one.rows).narrow(1, *one.queries)


def _keys(x: Tensor, one: Rectangle) -> Tensor:
    return x.narrow(0, *one.rows).narrow(1, *one.keys)
