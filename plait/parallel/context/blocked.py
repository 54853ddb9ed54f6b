"""Attention by plain products, for every device, type and mask: a fixed number of scores at a time.

Legend: b rows or segments, t queries and s keys of each, h heads, k key/value heads, g heads that share one of them, d
elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from plait.parallel.context.cut import Mask, WindowBand

AttentionResult = tuple[Tensor, Tensor]
"""The output, as the queries, and the logsumexp [b, t, h], in float32 at least."""

Grads = tuple[Tensor, Tensor, Tensor]


def blocked_forward(scores_at_once: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> AttentionResult:
    """The output and logsumexp of queries over the keys that the mask lets them see; each must see one."""
    out = torch.empty_like(q)
    total = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for block, seen in _blocks(scores_at_once, q, k, mask):
        some = q[:, block]
        scores = _scores(some, k[:, seen], (block, seen), mask)
        sums = scores.logsumexp(-1, keepdim=True)
        mixed = scores.sub_(sums).exp_().to(v.dtype) @ v[:, seen].transpose(1, 2)
        out[:, block], total[:, block] = _ungrouped(mixed, some), _ungrouped(sums, some).squeeze(-1)
    return out, total


def blocked_backward(scores_at_once: int, tensors: tuple[Tensor, ...], mask: Mask) -> Grads:
    """The gradients of q, k and v from grad_bthd, q, k, v and the whole's output and logsumexp."""
    grad, q, k, v, out, total = tensors
    kv_heads = k.shape[2]
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block, seen in _blocks(scores_at_once, q, k, mask):
        some, keys, values = q[:, block], k[:, seen].transpose(1, 2), v[:, seen].transpose(1, 2)
        grad_out = _grouped(grad[:, block], kv_heads)
        inner = (grad[:, block] * out[:, block]).sum(-1, keepdim=True).to(total.dtype)
        sums = _grouped(total[:, block].unsqueeze(-1), kv_heads)
        shares = _scores(some, k[:, seen], (block, seen), mask).sub_(sums).exp_()
        grad_v[:, seen] += (shares.to(v.dtype).mT @ grad_out).transpose(1, 2)
        grad_scores = shares.mul_((grad_out @ values.mT).to(total.dtype) - _grouped(inner, kv_heads))
        grad_scores = grad_scores.mul_(q.shape[-1] ** -0.5).to(q.dtype)
        grad_q[:, block] = _ungrouped(grad_scores @ keys, some)
        grad_k[:, seen] += (grad_scores.mT @ _grouped(some, kv_heads)).transpose(1, 2)
    return grad_q, grad_k, grad_v


def _blocks(scores_at_once: int, q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that one of a block sees."""
    queries, keys = q.shape[1], k.shape[1]
    step = max(1, scores_at_once // (q.shape[0] * q.shape[2] * keys))
    for first in range(0, queries, step):
        end = min(first + step, queries)
        if isinstance(mask, WindowBand):
            yield slice(first, end), slice(mask.keys_of(first, keys).start, mask.keys_of(end - 1, keys).stop)
        else:
            yield slice(first, end), slice(0, end if mask == "causal" else keys)


def _scores(q_bthd: Tensor, k_bskd: Tensor, places: tuple[slice, slice], mask: Mask) -> Tensor:
    """Attention scores [b, k, g × t, s] of the queries and keys at these places, in float32 at least."""
    scores = _grouped(q_bthd, k_bskd.shape[2]) @ k_bskd.permute(0, 2, 3, 1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(q_bthd.shape[-1] ** -0.5)
    if mask != "none":
        queries, keys = (torch.arange(some.start, some.stop, device=scores.device) for some in places)
        ahead = keys - queries.unsqueeze(1)
        hidden = ahead > 0
        if isinstance(mask, WindowBand):
            hidden = (ahead > mask.shift) | (ahead <= mask.shift - mask.window)
        groups = q_bthd.shape[2] // k_bskd.shape[2]
        scores.unflatten(2, (groups, -1)).masked_fill_(hidden, -inf)
    return scores


def _grouped(x_bthd: Tensor, kv_heads: int) -> Tensor:
    """[b, k, g × t, d]: the queries of all heads that share a key/value head."""
    return x_bthd.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x: Tensor, like_bthd: Tensor) -> Tensor:
    """The inverse of `_grouped`."""
    tokens = like_bthd.shape[1]
    return x.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)
