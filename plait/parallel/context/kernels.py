"""Attention in pieces that can be joined, on each kind of device.

Note [joined pieces]: let a query attend to its keys in pieces, each with output o and logsumexp l. The whole has the
logaddexp of all l, and as output the o weighted by exp(l - whole l). Going back, each piece's kernel gets the *whole's*
output and logsumexp: then its probabilities are the true ones, and the gradients of the pieces simply add.

Legend: b rows or segments, t queries and s keys of each, n all queries, h heads, k key/value heads, g heads that share
one of them, d elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from plait.accelerator import suits_flash_kernels
from plait.model.attention import unfused_scores
from plait.model.masked_attention import queries_at_once
from plait.model.matmul import matmul_library, product_in_float32
from plait.parallel.context.cut import Mask, TokenSpan, WindowBand

SegmentRuns = tuple[TokenSpan, ...]
"""(length, how many) of segments one after the other."""

SegmentEnds = tuple[Tensor, Tensor, int, int]
"""Offsets at which packed queries and packed keys begin and end, and their greatest lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Attention of q_bthd over k_bskd and v_bskd, and over segments that lie one after the other."""

    forward: Callable[[Tensor, Tensor, Tensor, Mask], AttentionResult]
    backward: Callable[[tuple[Tensor, ...], Mask], Grads]
    """From grad_bthd, q, k, v and the whole's out_bthd and logsumexp_bth to the gradients of q, k and v."""
    segments_forward: Callable[[Tensor, Tensor, Tensor, SegmentRuns], AttentionResult]
    """Causal attention inside each of the segments that q_nhd, k_nkd and v_nkd consist of."""
    segments_backward: Callable[[tuple[Tensor, ...], SegmentRuns], Grads]


def kernel_for(q: Tensor, window: int = 0, cap: float = 0.0) -> Kernel:
    """The fastest kernel for queries of this device, type and head width. With a `window`, which segments and
    rectangles reach beyond, or capped scores, it is that of plain products."""
    if window or cap:
        return blocked_kernel(unfused_scores(q.device), window=window, cap=cap)
    if q.device.type == "cpu":
        return _in_runs(_cpu_forward, _cpu_backward)
    if suits_flash_kernels(q) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return Kernel(
            forward=_cuda_forward,
            backward=_cuda_backward,
            segments_forward=_cuda_segments_forward,
            segments_backward=_cuda_segments_backward,
        )
    return blocked_kernel(unfused_scores(q.device))


def blocked_kernel(scores_at_once: int, window: int = 0, cap: float = 0.0) -> Kernel:
    """Plain products for every device and type, a fixed number of scores at a time: memory does not grow with t × s.
    In segments a query sees `window` keys at most, where that is not 0."""
    forward, backward = partial(blocked_forward, scores_at_once), partial(blocked_backward, scores_at_once)
    return _in_runs(partial(forward, cap=cap), partial(backward, cap=cap), window)


def merge_results(outcome: AttentionResult, piece: AttentionResult) -> None:
    """Take another piece's keys into an outcome, in place: Note [joined pieces]."""
    (out, total), (piece_out, piece_total) = outcome, piece
    weight = torch.sigmoid(piece_total - total).unsqueeze(-1)
    if out.dtype == total.dtype:
        out.lerp_(piece_out, weight)
    else:
        out.copy_(torch.lerp(out.to(total.dtype), piece_out.to(total.dtype), weight))
    total.copy_(torch.logaddexp(total, piece_total))


def _in_runs(
    forward: Callable[[Tensor, Tensor, Tensor, Mask], AttentionResult],
    backward: Callable[[tuple[Tensor, ...], Mask], Grads],
    window: int = 0,
) -> Kernel:
    """A kernel for rows of one length takes segments in one call for each run of equal lengths."""

    def mask(x: Tensor) -> Mask:
        return WindowBand(shift=0, window=window) if 0 < window < x.shape[1] else "causal"

    def segments_forward(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, runs: SegmentRuns) -> AttentionResult:
        found = [forward(q, k, v, mask(q)) for q, k, v in _by_run((q_nhd, k_nkd, v_nkd), runs)]
        out, total = (_flat(parts) for parts in zip(*found, strict=True))
        return out, total

    def segments_backward(tensors: tuple[Tensor, ...], runs: SegmentRuns) -> Grads:
        found = [backward(some, mask(some[0])) for some in _by_run(tensors, runs)]
        grad_q, grad_k, grad_v = (_flat(parts) for parts in zip(*found, strict=True))
        return grad_q, grad_k, grad_v

    return Kernel(
        forward=forward,
        backward=backward,
        segments_forward=segments_forward,
        segments_backward=segments_backward,
    )


def _by_run(tensors: tuple[Tensor, ...], runs: SegmentRuns) -> Iterator[tuple[Tensor, ...]]:
    """Views [how many, length, ...] of each run's tokens."""
    first = 0
    for length, times in runs:
        yield tuple(x[first : first + length * times].unflatten(0, (times, length)) for x in tensors)
        first += length * times


def _flat(parts: tuple[Tensor, ...]) -> Tensor:
    flat = [part.flatten(0, 1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> AttentionResult:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with matmul_library("default"):  # see note [attention keeps the default library] in model/matmul.py
        out, total = flash(*_swapped((q, k, v)), 0.0, mask == "causal")
    return out.transpose(1, 2), total.transpose(1, 2)


def _cpu_backward(tensors: tuple[Tensor, ...], mask: Mask) -> Grads:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    with matmul_library("default"):
        grad_q, grad_k, grad_v = _swapped(flash(*_swapped(tensors), 0.0, mask == "causal"))
    return grad_q, grad_k, grad_v


def _swapped(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> AttentionResult:
    ends = (_even_ends(q), _even_ends(k), q.shape[1], k.shape[1])
    out, total = _cuda_packed_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, mask)
    return out.view(q.shape), total.view(q.shape[:-1])


def _cuda_backward(tensors: tuple[Tensor, ...], mask: Mask) -> Grads:
    _, q, k, v, _, _ = tensors
    ends = (_even_ends(q), _even_ends(k), q.shape[1], k.shape[1])
    grads = _cuda_packed_backward(tuple(x.flatten(0, 1) for x in tensors), ends, mask)
    return grads[0].view(q.shape), grads[1].view(k.shape), grads[2].view(v.shape)


def _cuda_segments_forward(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, runs: SegmentRuns) -> AttentionResult:
    return _cuda_packed_forward(q_nhd, k_nkd, v_nkd, _ragged_ends(runs, q_nhd.device), "causal")


def _cuda_segments_backward(tensors: tuple[Tensor, ...], runs: SegmentRuns) -> Grads:
    return _cuda_packed_backward(tensors, _ragged_ends(runs, tensors[0].device), "causal")


def _cuda_packed_forward(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, ends: SegmentEnds, mask: Mask) -> AttentionResult:
    """The kernel under torch.nn.attention.varlen, whose own backward would not take a whole's output and logsumexp."""
    flash = torch.ops.aten._flash_attention_forward
    out, total_hn, *_ = flash(q_nhd, k_nkd, v_nkd, *ends, 0.0, mask == "causal", False, **_window(mask))
    return out, total_hn.T.contiguous()


def _cuda_packed_backward(tensors: tuple[Tensor, ...], ends: SegmentEnds, mask: Mask) -> Grads:
    flash = torch.ops.aten._flash_attention_backward
    *first, total_nh = tensors
    # Where a kernel with dropout would find its random state.
    state = torch.zeros(2, dtype=torch.uint64, device=total_nh.device), torch.empty(0, device=total_nh.device)
    return flash(*first, total_nh.T.contiguous(), *ends, 0.0, mask == "causal", *state, **_window(mask))


def _window(mask: Mask) -> dict[str, int]:
    return {"window_size_left": -1, "window_size_right": 0 if mask == "causal" else -1}


def _even_ends(x: Tensor) -> Tensor:
    rows, tokens = x.shape[:2]
    return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=x.device)


def _ragged_ends(runs: SegmentRuns, device: torch.device) -> SegmentEnds:
    """The ends of the segments, made on the host and copied without waiting for the device."""
    lengths = [length for length, times in runs for _ in range(times)]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).pin_memory().to(device, non_blocking=True)
    return ends, ends, max(lengths), max(lengths)


# Attention by plain products, for every device, type and mask: a fixed number of scores at a time.
#
# Legend: b rows or segments, t queries and s keys of each, h heads, k key/value heads, g heads that share one of them,
# d elements of a head.


AttentionResult = tuple[Tensor, Tensor]
"""The output, as the queries, and the logsumexp [b, t, h], in float32 at least."""

Grads = tuple[Tensor, Tensor, Tensor]


def blocked_forward(
    scores_at_once: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, cap: float = 0.0
) -> AttentionResult:
    """The output and logsumexp of queries over the keys that the mask lets them see; each must see one."""
    out = torch.empty_like(q)
    total = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for block, seen in _blocks(scores_at_once, q, k, mask):
        some = q[:, block]
        mixed, sums = _mixed(some, k[:, seen], v[:, seen], (block, seen), mask, cap)
        out[:, block], total[:, block] = _ungrouped(mixed, some), _ungrouped(sums, some).squeeze(-1)
    return out, total


def _mixed(
    q: Tensor, k: Tensor, v: Tensor, places: tuple[slice, slice], mask: Mask, cap: float
) -> tuple[Tensor, Tensor]:
    """The values that a block's queries take, and the logsumexp of their scores."""
    scores = _scores(q, k, places, mask, cap)
    sums = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(sums).exp_().to(v.dtype) @ v.transpose(1, 2), sums


def blocked_backward(scores_at_once: int, tensors: tuple[Tensor, ...], mask: Mask, cap: float = 0.0) -> Grads:
    """The gradients of q, k and v from grad_bthd, q, k, v and the whole's output and logsumexp."""
    grad, q, k, v, out, total = tensors
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(x, dtype=total.dtype) for x in (k, v))  # sums over blocks
    for block, seen in _blocks(scores_at_once, q, k, mask):
        own = tuple(x[:, block] for x in (grad, q, out, total))
        queries, keys, values = _block_gradients(own, k[:, seen], v[:, seen], (block, seen), mask, cap)
        grad_q[:, block] = _ungrouped(queries, own[1])
        grad_k[:, seen] += keys.transpose(1, 2)
        grad_v[:, seen] += values.transpose(1, 2)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _block_gradients(
    own: tuple[Tensor, ...], k: Tensor, v: Tensor, places: tuple[slice, slice], mask: Mask, cap: float
) -> Grads:
    """What a block's queries give, from their grad_bthd, q, out and total."""
    grad, q, out, total = own
    keys, values, kv_heads = k.transpose(1, 2), v.transpose(1, 2), k.shape[2]
    grad_out, sums = _grouped(grad, kv_heads), _grouped(total.unsqueeze(-1), kv_heads)
    inner = (grad.to(total.dtype) * out).sum(-1, keepdim=True)
    scores = _scores(q, k, places, mask, cap)
    # Of hidden keys, whose scores are -inf, the share is 0 whatever the slope.
    slopes = scores.clamp(min=-cap).div_(cap).square_().neg_().add_(1) if cap else None
    shares = scores.sub_(sums).exp_()
    grad_v = shares.to(v.dtype).mT @ grad_out
    grad_scores = shares.mul_(product_in_float32(grad_out, values.mT).sub_(_grouped(inner, kv_heads)))
    if slopes is not None:
        grad_scores.mul_(slopes)
    grad_scores = grad_scores.mul_(q.shape[-1] ** -0.5).to(q.dtype)
    return grad_scores @ keys, grad_scores.mT @ _grouped(q, kv_heads), grad_v


def _blocks(scores_at_once: int, q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that one of a block sees."""
    queries, keys = q.shape[1], k.shape[1]
    step = queries_at_once(scores_at_once, q, keys, mask.window if isinstance(mask, WindowBand) else 0)
    for first in range(0, queries, step):
        end = min(first + step, queries)
        if isinstance(mask, WindowBand):
            yield slice(first, end), slice(mask.keys_of(first, keys).start, mask.keys_of(end - 1, keys).stop)
        else:
            yield slice(first, end), slice(0, end if mask == "causal" else keys)


def _scores(q_bthd: Tensor, k_bskd: Tensor, places: tuple[slice, slice], mask: Mask, cap: float) -> Tensor:
    """Attention scores [b, k, g × t, s] of the queries and keys at these places, in float32 at least; capped where
    `cap` is not 0."""
    scores = product_in_float32(_grouped(q_bthd, k_bskd.shape[2]), k_bskd.permute(0, 2, 3, 1))
    scores = scores.mul_(q_bthd.shape[-1] ** -0.5)
    scores = scores.div_(cap).tanh_().mul_(cap) if cap else scores
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
