"""`context` (CP): each rank holds a balanced part of every row's tokens, and its queries attend to all ranks' keys.

Note [gathered twice]: a rank computes its causal squares, for which it has all keys, while keys and values of the axis
are on their way; then the rectangles that look further back (cut.py). Only its own keys and values are kept for
the backward pass, which gathers again and returns the gradients of the others' keys by one sum.

Legend: b rows of the batch, t tokens of a row on this rank, h heads, k key/value heads, d elements of a head; c ranks
of the axis, m tokens of a chunk (t = 2m).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from plait.model.attention import Attention, Documents
from plait.model.latent_attention import LatentAttention
from plait.model.mixture import Mixture, RowSpans
from plait.parallel.compile import outside_graphs
from plait.parallel.context.cut import ContextCut, Rectangle, cut_attention
from plait.parallel.context.kernels import Kernel, kernel_for, merge_results
from plait.parallel.sharded_model import ShardedModel
from plait.parallel.watched import WATCH, PendingSpan
from plait.partition.execution import Execution


def context(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """All layers' attention over the axis `context`; size 1 leaves it as it is. Every rank must call it."""
    if mesh["context"].size() == 1:
        return sharded
    # Its collectives belong to no graph.
    attend = outside_graphs(ContextAttend(mesh.get_group("context")), execution.arithmetic.compile)
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
    with WATCH.exchange("counts", total):
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
        self,
        q_bthd: Tensor,
        k_btkd: Tensor,
        v_btkd: Tensor,
        documents: Documents | None,
        window: int = 0,
        cap: float = 0.0,
        sinks_h: Tensor | None = None,
    ) -> Tensor:
        kind = q_bthd.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q_bthd.dtype
        q, k, v = (x.to(dtype) for x in (q_bthd, k_btkd, v_btkd))
        mixed = _Attend.apply(q, k, v, sinks_h, self._cut(q_bthd, documents, window), cap, self.exchange)
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
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_h: Tensor | None,
        cut: ContextCut,
        cap: float,
        exchange: Exchange,
    ) -> Tensor:
        kernel = kernel_for(q, cut.window if cut.has_bands else 0, cap)
        gathering = exchange.gather(k, v) if cut.crosses else None
        outcome = kernel.segments_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cut.runs)
        out, total = (x.unflatten(0, q.shape[:2]) for x in outcome)
        if gathering is not None:
            keys, values = gathering.wait()
            for one in cut.rectangles:
                piece = kernel.forward(_queries(q, one), _keys(keys, one), _keys(values, one), one.mask)
                merge_results((_queries(out, one), _queries(total, one)), piece)
        if sinks_h is not None:  # one more piece, whose value is zero
            merge_results((out, total), (out.new_zeros(()).expand_as(out), sinks_h.to(total.dtype).expand_as(total)))
        ctx.save_for_backward(q, k, v, out, total, sinks_h)
        ctx.cut, ctx.cap, ctx.exchange = cut, cap, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,), (q, k, v, out, total, sinks_h) = grads, ctx.saved_tensors
        cut = ctx.cut
        kernel = kernel_for(q, cut.window if cut.has_bands else 0, ctx.cap)
        gathering = ctx.exchange.gather(k, v) if cut.crosses else None
        flat = tuple(x.flatten(0, 1) for x in (grad, q, k, v, out, total))
        squares = kernel.segments_backward(flat, cut.runs)
        grad_q, grad_k, grad_v = (x.unflatten(0, q.shape[:2]) for x in squares)
        if gathering is not None:
            keys, values = gathering.wait()
            grad_q, grad_k, grad_v = (x.to(total.dtype) for x in (grad_q, grad_k, grad_v))  # sums of pieces
            grads_kv = torch.zeros((2, *keys.shape), dtype=total.dtype, device=keys.device)
            for one in cut.rectangles:
                _rectangle_backward(kernel, one, (grad, q, keys, values, out, total), (grad_q, *grads_kv))
            del gathering, keys, values
            ctx.exchange.add_home(grads_kv.to(k.dtype), grad_k, grad_v)
            grad_q, grad_k, grad_v = (x.to(q.dtype) for x in (grad_q, grad_k, grad_v))
        return grad_q, grad_k, grad_v, _sinks_gradient(grad, out, total, sinks_h), None, None, None


def _sinks_gradient(grad: Tensor, out: Tensor, total: Tensor, sinks_h: Tensor | None) -> Tensor | None:
    """What the sinks' shares of this rank's queries give: a sink's value is zero, and all others' results shrink."""
    if sinks_h is None:
        return None
    inner_bth = (grad.to(total.dtype) * out).sum(-1)
    return -((sinks_h.to(total.dtype) - total).exp() * inner_bth).sum((0, 1)).to(sinks_h.dtype)


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


# Carries keys and values to the context ranks whose queries look back at them, and their gradients home.
#
# Note [who needs what]: of 2c chunks, rank i has chunks i and 2c - 1 - i, and its rectangles reach before the later of
# the two: it needs chunks 0 … 2c - 2 - i and no more. Messages between pairs of ranks carry just those. With gloo they
# took half the time of its all-gather and reduce-scatter even when they carried everything.
#
# Legend: b rows, m tokens of a chunk, t = 2m tokens of a row on one rank, k key/value heads, d elements of a head.


TensorPairs = Mapping[tuple[int, int], Tensor]
"""Maps (peer, chunk) to a tensor [2, …] of the chunk's keys and values."""


class Exchange:
    """Transfers between one rank and the others of its group; all must make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.parts, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.needed = 2 * self.parts - 1 - self.index
        """How many chunks, from the row's first on, this rank's rectangles can reach."""
        peers = [peer for peer in range(self.parts) if peer != self.index]
        # Note [who needs what]
        self._from = [(peer, c) for peer in peers for c in _chunks_of(peer, self.parts) if c < self.needed]
        self._for = [
            (peer, c) for peer in peers for c in _chunks_of(self.index, self.parts) if c < 2 * self.parts - 1 - peer
        ]

    def gather(self, k_btkd: Tensor, v_btkd: Tensor) -> PendingKeys:
        """Begin to send keys and values; the result waits for those of the other ranks."""
        rows, tokens, *head = k_btkd.shape
        chunks = k_btkd.new_empty((2, 2 * self.parts, rows, tokens // 2, *head))
        for kind, x in enumerate((k_btkd, v_btkd)):
            for half, chunk in zip(x.chunk(2, dim=1), _chunks_of(self.index, self.parts), strict=True):
                chunks[kind, chunk].copy_(half)
        works = self._begin(
            receives={(peer, chunk): chunks[:, chunk] for peer, chunk in self._from},
            sends={(peer, chunk): chunks[:, chunk] for peer, chunk in self._for},
        )
        begun = WATCH.begin("keys and values", *(chunks[:, chunk] for _, chunk in self._for))
        return PendingKeys(chunks[:, : self.needed], chunks, works, begun)

    def add_home(self, grads: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add all ranks' gradients [2, b, needed × m, k, d] of keys and values to those [b, t, k, d] where they live.

        Always in the order of the ranks, so that a repeated step gives the same bits. Blocks.
        """
        chunks = grads.unflatten(2, (self.needed, -1)).movedim(2, 1).contiguous()
        arrived = {place: torch.empty_like(chunks[:, 0]) for place in self._for}
        sends = {(peer, chunk): chunks[:, chunk] for peer, chunk in self._from}
        with WATCH.exchange("keys and values", *sends.values()):
            works = self._begin(receives=arrived, sends=sends)
            for work in works:
                work.wait()
        arrived[self.index, self.index] = chunks[:, self.index]
        own = _chunks_of(self.index, self.parts)
        for (_, chunk), parts in sorted(arrived.items(), key=lambda item: item[0]):
            for home, part in zip((grad_k, grad_v), parts, strict=True):
                home.chunk(2, dim=1)[own.index(chunk)].add_(part)

    def _begin(self, *, receives: TensorPairs, sends: TensorPairs) -> list[dist.Work]:
        """Post all receives before the first send: Note [room first] in collectives.py."""
        return dist.batch_isend_irecv(
            [
                dist.P2POp(kind, x, group=self.group, group_peer=peer, tag=chunk)  # type: ignore[arg-type]
                for kind, pairs in ((dist.irecv, receives), (dist.isend, sends))
                for (peer, chunk), pair in pairs.items()
                for x in pair
            ]
        )


class PendingKeys:
    """Keys and values whose transfer has begun."""

    def __init__(self, needed: Tensor, sent: Tensor, works: list[dist.Work], begun: PendingSpan | None) -> None:
        self._needed, self._begun = needed, begun
        self._sent = sent  # must live until it went out
        self._works = works

    def wait(self) -> Tensor:
        """Keys and values [2, b, needed × m, k, d], in the order of the rows. Blocks."""
        with WATCH.wait("keys and values", self._begun):
            for work in self._works:
                work.wait()
        return self._needed.movedim(1, 2).flatten(2, 3)


def _chunks_of(index: int, parts: int) -> tuple[int, int]:
    return index, 2 * parts - 1 - index
