"""Causal attention in shapes that do not depend on the documents, for devices that compile operations for each shape.

Queries are taken in blocks by all keys that come before their end, and a mask hides what lies in an earlier document:
a token at position p of its document sees the p tokens before it. So where documents begin are numbers in a tensor and
never a shape. A window is a number of the model, and with one a block has only the keys that its queries can see. One
block's scores are in memory at a time, in float32 at least; the backward pass computes them again.

It also computes what no fused kernel of torch does, on every device: capped scores (Gemma 2), which become
cap × tanh(score / cap), and sinks (gpt-oss), a learned score for each head that takes a share of every softmax and
gives nothing for it.

Legend: b rows of the batch, t queries and s keys of a row, h heads, k key/value heads, g heads that share one of them,
d numbers of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.model.matmul import product_in_float32

BLOCK_SCORES = 2**27
"""Scores of a block, about: half a gigabyte in float32."""
LEAST_WINDOW_BLOCK = 256
"""Queries of a block where a window is shorter: smaller products would take longer than the hidden keys do."""


def attend_masked(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthd: Tensor,
    positions_bt: Tensor | None,
    window: int,
    scores_at_once: int = BLOCK_SCORES,
    cap: float = 0.0,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """Each token sees itself and the earlier ones of its document, in which `positions_bt` are the tokens' positions
    (None: a row is one document); of these the last `window` ones, itself included, where that is not 0. Scores are
    capped where `cap` is not 0. Differentiable once."""
    cut = _Cut(window=window, step=queries_at_once(scores_at_once, q_bthd, q_bthd.shape[1], window), cap=cap)
    with torch.autocast(q_bthd.device.type, enabled=False):  # the numbers are in their precision already
        mixed: Tensor = _MaskedAttention.apply(q_bthd, k_bthd, v_bthd, positions_bt, sinks_h, cut)  # type: ignore[assignment]
    return mixed


def attend_last(
    q_b1hd: Tensor, k_bthd: Tensor, v_bthd: Tensor, cap: float = 0.0, sinks_h: Tensor | None = None
) -> Tensor:
    """One query a row, which sees all keys; has no gradient."""
    queries, keys, values = _grouped(q_b1hd, k_bthd.shape[2]), k_bthd.transpose(1, 2), v_bthd.transpose(1, 2)
    hidden = torch.zeros(1, k_bthd.shape[1], dtype=torch.bool, device=q_b1hd.device)
    last = _Block(begin=0, first=k_bthd.shape[1] - 1, end=k_bthd.shape[1], hidden=hidden, cap=cap)
    return _ungrouped(last.mixed(queries, keys, values, sinks_h), 1)


def queries_at_once(scores_at_once: int, q_bthd: Tensor, keys: int, window: int) -> int:
    """How many queries form a block: its scores are no more than `scores_at_once`, unless one query has more, and with
    a window few of them are of keys that it hides. `keys` is the number of all keys."""
    rows, queries, heads, _ = q_bthd.shape
    wanted = max(window, LEAST_WINDOW_BLOCK) if window else queries
    seen = min(keys, wanted + window) if window else keys
    return max(1, min(wanted, scores_at_once // (rows * heads * seen)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How far queries see, 0 for all before them, how many are in a block, and the cap of their scores."""

    window: int
    step: int
    cap: float = 0.0


class _MaskedAttention(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(
        ctx: Any,
        q_bthd: Tensor,
        k_bthd: Tensor,
        v_bthd: Tensor,
        positions_bt: Tensor | None,
        sinks_h: Tensor | None,
        cut: _Cut,
    ) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(q_bthd, k_bthd, v_bthd, positions_bt, sinks_h)
        mixed = []
        for block in _blocks(q_bthd, positions_bt, cut):
            queries, keys, values = block.parts(q_bthd, k_bthd, v_bthd)
            mixed.append(_ungrouped(block.mixed(queries, keys, values, sinks_h), block.count))
        return torch.cat(mixed, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_bthd, k_bthd, v_bthd, positions_bt, sinks_h = ctx.saved_tensors
        with torch.autocast(q_bthd.device.type, enabled=False):
            grad_q, grad_k, grad_v, grad_sinks = _gradients(
                grads[0], q_bthd, k_bthd, v_bthd, positions_bt, sinks_h, ctx.cut
            )
        return grad_q, grad_k, grad_v, None, grad_sinks, None


def _gradients(
    grad_bthd: Tensor,
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthd: Tensor,
    positions_bt: Tensor | None,
    sinks_h: Tensor | None,
    cut: _Cut,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and sinks, each in its own dtype; all but queries' are added up in float32 or
    better."""
    kv_heads, grad_q = k_bthd.shape[2], []
    exact = torch.promote_types(k_bthd.dtype, torch.float32)
    grad_k, grad_v = (torch.zeros_like(x, dtype=exact) for x in (k_bthd, v_bthd))
    grad_sinks = None if sinks_h is None else torch.zeros_like(sinks_h, dtype=exact)
    for block in _blocks(q_bthd, positions_bt, cut):
        queries, keys, values = block.parts(q_bthd, k_bthd, v_bthd)
        grad = _grouped(grad_bthd[:, block.first : block.end], kv_heads)
        found = block.gradients(grad, queries, keys, values, sinks_h)
        grad_q.append(_ungrouped(found.queries, block.count))
        grad_k[:, block.begin : block.end] += found.keys.transpose(1, 2)
        grad_v[:, block.begin : block.end] += found.values.transpose(1, 2)
        if grad_sinks is not None and found.sinks_h is not None:
            grad_sinks += found.sinks_h
    if grad_sinks is not None and sinks_h is not None:
        grad_sinks = grad_sinks.to(sinks_h.dtype)
    return torch.cat(grad_q, dim=1), grad_k.to(k_bthd.dtype), grad_v.to(v_bthd.dtype), grad_sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockGradients:
    """What a block's queries give: their own gradients, and addends of all keys', values' and sinks'."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    sinks_h: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Consecutive queries of all rows, and the keys that one of them may see."""

    begin: int
    """The first of these keys; the last is that of the last query."""
    first: int
    end: int
    hidden: Tensor
    """True for keys that a query does not see: [t, s], or [b, 1, 1, t, s] where rows consist of documents."""
    cap: float = 0.0

    @property
    def count(self) -> int:
        return self.end - self.first

    def parts(self, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, k, g × t, d], and keys and values [b, k, s, d]."""
        queries = _grouped(q_bthd[:, self.first : self.end], k_bthd.shape[2])
        keys, values = (x[:, self.begin : self.end].transpose(1, 2) for x in (k_bthd, v_bthd))
        return queries, keys, values

    def mixed(self, queries: Tensor, keys: Tensor, values: Tensor, sinks_h: Tensor | None) -> Tensor:
        """The values that queries take, [b, k, g × t, d]."""
        shares, _ = self.shares(self.scores(queries, keys), sinks_h)
        return shares.to(values.dtype) @ values

    def gradients(
        self, grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, sinks_h: Tensor | None
    ) -> _BlockGradients:
        """Gradients from that of `mixed`. At most four tensors of scores are in memory at a time, three where scores
        are not capped: the planner counts on it (BLOCK_NUMBER_BYTES)."""
        scores = self.scores(queries, keys)
        slopes = (scores / self.cap).square_().neg_().add_(1) if self.cap else None
        shares, of_sinks = self.shares(scores, sinks_h)
        del scores
        grad_scores = product_in_float32(grad, values.mT)
        inner = (grad_scores * shares).sum(-1, keepdim=True)
        grad_scores.sub_(inner).mul_(shares).mul_(_scale(queries))
        if slopes is not None:
            grad_scores.mul_(slopes)
        grad_scores, shares = grad_scores.to(queries.dtype), shares.to(values.dtype)
        taken = None if of_sinks is None else (of_sinks * inner.squeeze(-1)).unflatten(2, (-1, self.count))
        return _BlockGradients(
            queries=grad_scores @ keys,
            keys=grad_scores.mT @ queries,
            values=shares.mT @ grad,
            sinks_h=None if taken is None else -taken.sum((0, 3)).flatten(),
        )

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores [b, k, g × t, s] of all keys, capped where `cap` is not 0, in float32 at least."""
        scores = product_in_float32(queries, keys.mT).mul_(_scale(queries))
        return scores.div_(self.cap).tanh_().mul_(self.cap) if self.cap else scores

    def shares(self, scores: Tensor, sinks_h: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What each query takes of each key's value, [b, k, g × t, s], and of its head's sink, [b, k, g × t]. Writes
        into the scores."""
        by_head = scores.unflatten(2, (-1, self.count)).masked_fill_(self.hidden, -inf)
        if sinks_h is None:
            return by_head.softmax(dim=-1).flatten(2, 3), None
        sinks_kg11 = sinks_h.to(by_head.dtype).view(by_head.shape[1], -1, 1, 1)
        with_sinks = torch.cat((by_head, sinks_kg11.expand(*by_head.shape[:1], -1, -1, self.count, -1)), dim=-1)
        taken = with_sinks.softmax(dim=-1).flatten(2, 3)
        return taken[..., :-1], taken[..., -1]


def _blocks(q_bthd: Tensor, positions_bt: Tensor | None, cut: _Cut) -> Iterator[_Block]:
    tokens = q_bthd.shape[1]
    for first in range(0, tokens, cut.step):
        end = min(first + cut.step, tokens)
        begin = max(0, first - cut.window + 1) if cut.window else 0
        queries = torch.arange(first, end, device=q_bthd.device)
        keys = torch.arange(begin, end, device=q_bthd.device)
        hidden = keys > queries.unsqueeze(1)
        if cut.window:
            hidden = hidden | (keys <= queries.unsqueeze(1) - cut.window)
        if positions_bt is not None:
            begins_bt = queries - positions_bt[:, first:end]  # of the queries' documents
            hidden = (hidden | (keys < begins_bt.unsqueeze(2)))[:, None, None]
        yield _Block(begin=begin, first=first, end=end, hidden=hidden, cap=cut.cap)


def _scale(queries: Tensor) -> float:
    return queries.shape[-1] ** -0.5


def _grouped(x_bthd: Tensor, kv_heads: int) -> Tensor:
    """[b, k, g × t, d]: the queries of all heads that share a key/value head."""
    return x_bthd.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `_grouped`, [b, t, h, d]."""
    return x.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)
