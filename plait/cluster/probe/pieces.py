"""The pieces that a probe lets a device compute one by one: products, attention, passes through memory.

Legend: b rows, t tokens of a row, h heads, d numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.cluster.measured import MeasuredWork
from plait.model.attention import Documents, attend

ATTENTION_TOKENS: Mapping[str, int] = {"cpu": 2048, "cuda": 16384}
"""Tokens of the attention that is timed beside that of the probed models."""
COPY_BYTES = (2**18, 2**26)
"""What a core's own cache holds, and what it does not."""

TOUCHED_BYTES = 2**24
"""Size of a block; a larger one might be borrowed from the system each time."""

ProbedPiece = Literal["layer", "layer_backward"]
PieceKey = tuple[MeasuredWork | ProbedPiece, tuple[int, ...]]
PieceRuns = dict[PieceKey, Callable[[], object]]


def check_device(device: torch.device) -> str | None:
    """Why a device cannot compute, if so: it fails, or its sums are wrong."""
    try:
        ones = torch.ones(256, 256, device=device)
        total = (ones @ ones).sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if total == 256**3 else f"a product that must add up to {256**3} adds up to {total:g}"


def product_keys(product: tuple[int, int, int]) -> tuple[PieceKey, PieceKey, PieceKey]:
    """A linear layer's product and the gradients of its input and of its weight."""
    rows, inner, columns = product
    return (
        ("product", (rows, inner, columns)),
        ("product_input", (rows, columns, inner)),
        ("product_weight", (columns, rows, inner)),
    )


def product_runs(sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """A linear layer's product and its two gradients, called as autograd calls them."""
    rows, inner, columns = sizes
    x, weight, grad = (noise(two, device, dtype) for two in ((rows, inner), (columns, inner), (rows, columns)))
    forward, to_input, to_weight = product_keys(sizes)
    return {
        forward: lambda: F.linear(x, weight),
        to_input: lambda: grad.mm(weight),
        to_weight: lambda: grad.t().mm(x),
    }


def attention_runs(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """The model's attention over sequences of equal length, forward and backward."""
    sequences, length, heads, kv_heads, head_width = sizes
    documents = Documents(lengths=(length,) * sequences).on(device)
    q_bthd, k_bthd, v_bthd = (
        noise((sequences, length, some, head_width), device, dtype).requires_grad_()
        for some in (heads, kv_heads, kv_heads)
    )

    def forward() -> Tensor:
        return attend(q_bthd, k_bthd, v_bthd, documents)

    return {
        ("attention", sizes): forward,
        ("attention_backward", sizes): _backward(forward(), [q_bthd, k_bthd, v_bthd]),
    }


def memory_runs(device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """Copies, gradients added up, and the smallest kernel there is."""
    runs: PieceRuns = {}
    for size in COPY_BYTES:
        source, target = (torch.zeros(size // 4, device=device) for _ in range(2))
        runs["copy", (size,)] = lambda target=target, source=source: target.copy_(source)
    total, more = (torch.zeros(2**22, device=device) for _ in range(2))
    one = torch.zeros(1, device=device, dtype=dtype)
    runs["accumulate", (total.numel(),)] = lambda: total.add_(more)
    runs["launch", ()] = lambda: one.add_(1)
    return runs


def touch_memory(size: int) -> None:
    """Make the process own this many bytes of freed memory, which launch/local/heap.py keeps.

    Pages that the system has yet to find would double the time of a large micro-batch, while training's steps reuse
    those of the step before.
    """
    blocks = [torch.zeros(TOUCHED_BYTES // 4).add_(1) for _ in range(-(-size // TOUCHED_BYTES))]
    del blocks


def _backward(result: Tensor, wanted: list[Tensor]) -> Callable[[], object]:
    """A backward pass that may be repeated."""
    grad = noise(tuple(result.shape), result.device, result.dtype)
    return lambda: torch.autograd.grad(result, wanted, grad, retain_graph=True)


def noise(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random numbers over and over again: drawing all of them would take longer than what is measured."""
    block = torch.randn(min(2**16, prod(sizes)), device=device, dtype=dtype) * scale
    return block.repeat(-(-prod(sizes) // len(block)))[: prod(sizes)].view(sizes)
