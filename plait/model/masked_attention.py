"""Causal attention in shapes that do not depend on the documents, for devices that compile operations for each shape.

Queries are taken in blocks by all keys that come before their end, and a mask hides what lies in an earlier document:
a token at position p of its document sees the p tokens before it. So where documents begin are numbers in a tensor and
never a shape. Scores of a block are there at a time; the backward pass computes them again.

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
) -> Tensor:
    """Each token sees itself and the earlier ones of its document, in which `positions_bt` are the tokens' positions
    (None: a row is one document); of these the last `window` ones, itself included, where that is not 0. Differentiable
    once."""
    step = max(1, scores_at_once // (q_bthd.shape[0] * q_bthd.shape[1] * q_bthd.shape[2]))
    cut = _Cut(window=window, step=step)
    with torch.autocast(q_bthd.device.type, enabled=False):  # the numbers are in their precision already
        mixed: Tensor = _MaskedAttention.apply(q_bthd, k_bthd, v_bthd, positions_bt, cut)  # type: ignore[assignment]
    return mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How far queries see, 0 for all before them, and how many are in a block."""

    window: int
    step: int


class _MaskedAttention(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor | None, cut: _Cut
    ) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(q_bthd, k_bthd, v_bthd, positions_bt)
        mixed = []
        for block in _blocks(q_bthd, positions_bt, cut):
            queries, keys, values = block.parts(q_bthd, k_bthd, v_bthd)
            shares = block.shares(queries, keys).to(values.dtype)
            mixed.append(_ungrouped(shares @ values, block.count))
        return torch.cat(mixed, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_bthd, k_bthd, v_bthd, positions_bt = ctx.saved_tensors
        with torch.autocast(q_bthd.device.type, enabled=False):
            grad_q, grad_k, grad_v = _gradients(grads[0], q_bthd, k_bthd, v_bthd, positions_bt, ctx.cut)
        return grad_q, grad_k, grad_v, None, None


def _gradients(
    grad_bthd: Tensor, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor | None, cut: _Cut
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, each in its own dtype; keys' and values' are added up in float32 or
    better."""
    kv_heads, grad_q = k_bthd.shape[2], []
    exact = torch.promote_types(k_bthd.dtype, torch.float32)
    grad_k, grad_v = (torch.zeros_like(x, dtype=exact) for x in (k_bthd, v_bthd))
    for block in _blocks(q_bthd, positions_bt, cut):
        queries, keys, values = block.parts(q_bthd, k_bthd, v_bthd)
        grad = _grouped(grad_bthd[:, block.first : block.end], kv_heads)
        shares = block.shares(queries, keys)
        grad_shares = (grad @ values.mT).to(shares.dtype)
        inner = (grad_shares * shares).sum(-1, keepdim=True)
        grad_scores = ((grad_shares - inner) * shares * _scale(q_bthd)).to(q_bthd.dtype)
        grad_q.append(_ungrouped(grad_scores @ keys, block.count))
        behind = (0, 0, 0, 0, 0, k_bthd.shape[1] - block.end)
        for total, part in ((grad_k, grad_scores.mT @ queries), (grad_v, shares.to(values.dtype).mT @ grad)):
            total += torch.nn.functional.pad(part.transpose(1, 2).to(exact), behind)
    return torch.cat(grad_q, dim=1), grad_k.to(k_bthd.dtype), grad_v.to(v_bthd.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Consecutive queries of all rows, which see no key behind the last of them."""

    first: int
    end: int
    hidden: Tensor
    """True for keys that a query does not see: [t, s], or [b, 1, 1, t, s] where rows consist of documents."""

    @property
    def count(self) -> int:
        return self.end - self.first

    def parts(self, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, k, g × t, d], and keys and values [b, k, s, d]."""
        queries = _grouped(q_bthd[:, self.first : self.end], k_bthd.shape[2])
        return queries, k_bthd[:, : self.end].transpose(1, 2), v_bthd[:, : self.end].transpose(1, 2)

    def shares(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What each query takes of each key's value, [b, k, g × t, s], in float32 at least."""
        scores = queries @ keys.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * queries.shape[-1] ** -0.5
        by_head = scores.unflatten(2, (-1, self.count)).masked_fill(self.hidden, -inf)
        return by_head.softmax(dim=-1).flatten(2, 3)


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
        yield _Block(first=first, end=end, hidden=hidden)


def _scale(q_bthd: Tensor) -> float:
    return q_bthd.shape[-1] ** -0.5


def _grouped(x_bthd: Tensor, kv_heads: int) -> Tensor:
    """[b, k, g × t, d]: the queries of all heads that share a key/value head."""
    return x_bthd.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `_grouped`, [b, t, h, d]."""
    return x.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)
