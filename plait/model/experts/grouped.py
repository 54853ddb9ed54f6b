"""Products of several experts' weights with the rows of each, as one operation: one result, one gradient of the rows.

Expert by expert through autograd, the results would be joined by a copy, the rows' gradients by another, and every
product would be a node of the graph. A loop writes each product to its place; on GPUs in 16 bits torch's grouped kernel
(`F.grouped_mm`) takes all of them in one launch.

Legend: r rows in the order of experts, i numbers of an expert's input, o of its output, e experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_ROW_BYTES = 16
"""Rows that the grouped kernel takes begin at multiples of so many bytes."""


def grouped_product(rows_ri: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Each expert's rows times its weight [o, i], transposed: [r, o], in the dtype of the rows. `counts` are the rows
    of each; an expert without rows gets a gradient of zeros."""
    cast = [weight.to(rows_ri.dtype) for weight in weights]
    if suits_kernel(rows_ri, cast[0]):
        ends_e = torch.tensor(counts, device=rows_ri.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(rows_ri, torch.stack(cast).transpose(1, 2), offs=ends_e)
    product_ro: Tensor = _product(rows_ri, cast, list(counts))
    return product_ro


def suits_kernel(rows_ri: Tensor, weight: Tensor) -> bool:
    """Whether the grouped kernel takes these rows, and is the faster way: on GPUs, in 16 bits."""
    aligned = all(size * rows_ri.element_size() % KERNEL_ROW_BYTES == 0 for size in weight.shape)
    return rows_ri.is_cuda and rows_ri.dtype in (torch.bfloat16, torch.float16) and aligned and len(rows_ri) > 0


@torch.library.custom_op("plait::grouped_product", mutates_args=())
def _product(rows_ri: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
    product_ro = rows_ri.new_empty(len(rows_ri), len(weights[0]))
    for weight, rows, place in zip(weights, rows_ri.split(counts), product_ro.split(counts), strict=True):
        torch.mm(rows, weight.T, out=place)
    return product_ro


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[int]], output: Tensor) -> None:
    rows_ri, weights, ctx.counts = inputs
    ctx.save_for_backward(rows_ri, *weights)


def _gradients(ctx: Any, grad_ro: Tensor) -> tuple[Tensor, list[Tensor], None]:
    rows_ri, *weights = ctx.saved_tensors
    grad_ro = grad_ro.contiguous()
    grad_ri = torch.empty_like(rows_ri)
    of_weights: list[Tensor] = []
    parts = (rows_ri.split(ctx.counts), grad_ro.split(ctx.counts), grad_ri.split(ctx.counts))
    for weight, rows, grad, place in zip(weights, *parts, strict=True):
        torch.mm(grad, weight, out=place)
        of_weights.append(grad.T @ rows)
    return grad_ri, of_weights, None


_product.register_autograd(_gradients, setup_context=_keep)
