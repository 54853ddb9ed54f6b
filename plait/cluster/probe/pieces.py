"""The pieces that a device computes one by one in a probe: products, attention, passes through memory.

Legend: b rows, t tokens of a row, h heads, d elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.cluster.measured import WorkKind
from plait.model.attention import Documents, attend

ATTENTION_TOKENS: Mapping[str, int] = {"cpu": 2048, "cuda": 16384}
"""Number of tokens in the attention that is timed besides that of the probed models."""
COPY_BYTES = (2**18, 2**26)
"""A size that fits into a core's own cache, and one that does not."""

TOUCHED_BYTES = 2**24
"""Size of a block of touched memory; the allocator might borrow a larger one from the system each time."""

ProbedPiece = Literal["layer", "layer_backward"]
PieceKey = tuple[WorkKind | ProbedPiece, tuple[int, ...]]
PieceRuns = dict[PieceKey, Callable[[], object]]


def device_failure(device: torch.device) -> str | None:
    """Why a device cannot compute: it fails, or its sums are wrong; None if it can."""
    try:
        ones = torch.ones(256, 256, device=device)
        total = (ones @ ones).sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if total == 256**3 else f"a product that must add up to {256**3} adds up to {total:g}"


def product_keys(product: tuple[int, int, int]) -> tuple[PieceKey, PieceKey, PieceKey]:
    """Keys of a linear layer's product and of the gradients of its input and of its weight."""
    rows, inner, columns = product
    return (
        ("product", (rows, inner, columns)),
        ("product_input", (rows, columns, inner)),
        ("product_weight", (columns, rows, inner)),
    )


def product_runs(sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """A linear layer's product and its two gradients, called as autograd calls them."""
    rows, inner, columns = sizes
    x, weight, grad = (random_tensor(two, device, dtype) for two in ((rows, inner), (columns, inner), (rows, columns)))
    forward, to_input, to_weight = product_keys(sizes)
    return {
        forward: lambda: F.linear(x, weight),
        to_input: lambda: grad.mm(weight),
        to_weight: lambda: grad.t().mm(x),
    }


def attention_runs(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """The model's attention over sequences of equal length, forward and backward."""
    sequences, length, heads, kv_heads, head_width = sizes
    documents = Documents(lengths=(length,) * sequences).on(device, longest=length)
    q_bthd, k_bthd, v_bthd = (
        random_tensor((sequences, length, some, head_width), device, dtype).requires_grad_()
        for some in (heads, kv_heads, kv_heads)
    )

    def forward() -> Tensor:
        return attend(q_bthd, k_bthd, v_bthd, documents)

    return {
        ("attention", sizes): forward,
        ("attention_backward", sizes): _backward(forward(), [q_bthd, k_bthd, v_bthd]),
    }


def memory_runs(device: torch.device, dtype: torch.dtype) -> PieceRuns:
    """Copies, the accumulation of gradients, and the smallest kernel there is."""
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
    """Make the process own `size` bytes of freed memory, which launch/local/heap.py keeps.

    Pages that the system must still provide would double the time of a large micro-batch, while training's steps reuse
    those of the step before.
    """
    blocks = [torch.zeros(TOUCHED_BYTES // 4).add_(1) for _ in range(-(-size // TOUCHED_BYTES))]
    del blocks


def _backward(result: Tensor, wanted: list[Tensor]) -> Callable[[], object]:
    """A backward pass that can be repeated."""
    grad = random_tensor(tuple(result.shape), result.device, result.dtype)
    return lambda: torch.autograd.grad(result, wanted, grad, retain_graph=True)


def random_tensor(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """A tensor of random numbers that repeat in blocks: drawing all of them would take longer than what is measured."""
    block = torch.randn(min(2**16, prod(sizes)), device=device, dtype=dtype) * scale
    return block.repeat(-(-prod(sizes) // len(block)))[: prod(sizes)].view(sizes)
