"""Causal attention in shapes that do not depend on the documents, for devices that compile operations for each shape.

Queries are taken in blocks by all keys that come before their end, and a mask hides what lies in an earlier document:
a token at position p of its document sees the p tokens before it. So where documents begin are numbers in a tensor and
never a shape. Scores of a block are there at a time; the backward pass computes them again.

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

BLOCK_SCORES = 2**27
"""Scores of a block, about: half a gigabyte in float32."""


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
    step = max(1, scores_at_once // (q_bthd.shape[0] * q_bthd.shape[1] * q_bthd.shape[2]))
    cut = _Cut(window=window, step=step, cap=cap)
    with torch.autocast(q_bthd.device.type, enabled=False):  # the numbers are in their precision already
        mixed: Tensor = _MaskedAttention.apply(q_bthd, k_bthd, v_bthd, positions_bt, sinks_h, cut)  # type: ignore[assignment]
    return mixed


def attend_last(
    q_b1hd: Tensor, k_bthd: Tensor, v_bthd: Tensor, cap: float = 0.0, sinks_h: Tensor | None = None
) -> Tensor:
    """One query a row, which sees all keys; has no gradient."""
    queries = _grouped(q_b1hd, k_bthd.shape[2])
    hidden = torch.zeros(1, k_bthd.shape[1], dtype=torch.bool, device=q_b1hd.device)
    last = _Block(first=k_bthd.shape[1] - 1, end=k_bthd.shape[1], hidden=hidden, cap=cap)
    shares = last.shares(queries, k_bthd.transpose(1, 2), sinks_h).of_keys
    return _ungrouped(shares.to(v_bthd.dtype) @ v_bthd.transpose(1, 2), 1)


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
            shares = block.shares(queries, keys, sinks_h).of_keys.to(values.dtype)
            mixed.append(_ungrouped(shares @ values, block.count))
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
        found = block.shares(queries, keys, sinks_h)
        shares = found.of_keys
        grad_shares = (grad @ values.mT).to(shares.dtype)
        inner = (grad_shares * shares).sum(-1, keepdim=True)
        grad_scores = (grad_shares - inner) * shares * _scale(q_bthd)
        if found.slopes is not None:
            grad_scores = grad_scores * found.slopes
        grad_scores = grad_scores.to(q_bthd.dtype)
        if grad_sinks is not None and found.of_sinks is not None:
            grad_sinks -= (found.of_sinks * inner.squeeze(-1)).unflatten(2, (-1, block.count)).sum((0, 3)).flatten()
        grad_q.append(_ungrouped(grad_scores @ keys, block.count))
        behind = (0, 0, 0, 0, 0, k_bthd.shape[1] - block.end)
        for total, part in ((grad_k, grad_scores.mT @ queries), (grad_v, shares.to(values.dtype).mT @ grad)):
            total += torch.nn.functional.pad(part.transpose(1, 2).to(exact), behind)
    of_sinks = None if grad_sinks is None or sinks_h is None else grad_sinks.to(sinks_h.dtype)
    return torch.cat(grad_q, dim=1), grad_k.to(k_bthd.dtype), grad_v.to(v_bthd.dtype), of_sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """What queries take."""

    of_keys: Tensor
    """Of each key's value, [b, k, g × t, s], in float32 at least."""
    of_sinks: Tensor | None
    """What sinks take of each query, [b, k, g × t]."""
    slopes: Tensor | None
    """By how much a capped score grows with the score, [b, k, g × t, s]; None: they are not capped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Consecutive queries of all rows, which see no key behind the last of them."""

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
        return queries, k_bthd[:, : self.end].transpose(1, 2), v_bthd[:, : self.end].transpose(1, 2)

    def shares(self, queries: Tensor, keys: Tensor, sinks_h: Tensor | None) -> _Shares:
        """What each query takes of each key's value, and of nothing."""
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.mT  # in this order: fp16 has no number above 65,504
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        slopes = None
        if self.cap:
            bent = (scores / self.cap).tanh()
            scores, slopes = bent * self.cap, 1 - bent.square()
        by_head = scores.unflatten(2, (-1, self.count)).masked_fill(self.hidden, -inf)
        if sinks_h is None:
            return _Shares(of_keys=by_head.softmax(dim=-1).flatten(2, 3), of_sinks=None, slopes=slopes)
        sinks_kg11 = sinks_h.to(by_head.dtype).view(keys.shape[1], -1, 1, 1)
        with_sinks = torch.cat((by_head, sinks_kg11.expand(*by_head.shape[:1], -1, -1, self.count, -1)), dim=-1)
        taken = with_sinks.softmax(dim=-1).flatten(2, 3)
        return _Shares(of_keys=taken[..., :-1], of_sinks=taken[..., -1], slopes=slopes)


def _blocks(q_bthd: Tensor, positions_bt: Tensor | None, cut: _Cut) -> Iterator[_Block]:
    tokens = q_bthd.shape[1]
    for first in range(0, tokens, cut.step):
        end = min(first + cut.step, tokens)
        queries = torch.arange(first, end, device=q_bthd.device).unsqueeze(1)
        behind = queries - torch.arange(end, device=q_bthd.device)  # by how many tokens a key comes before a query
        hidden = behind < 0
        if cut.window:
            hidden = hidden | (behind >= cut.window)
        if positions_bt is not None:
            hidden = hidden | (behind > positions_bt[:, first:end, None])
            hidden = hidden[:, None, None]
        yield _Block(first=first, end=end, hidden=hidden, cap=cut.cap)


def _scale(q_bthd: Tensor) -> float:
    return q_bthd.shape[-1] ** -0.5


def _grouped(x_bthd: Tensor, kv_heads: int) -> Tensor:
    """[b, k, g × t, d]: the queries of all heads that share a key/value head."""
    return x_bthd.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `_grouped`, [b, t, h, d]."""
    return x.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)
