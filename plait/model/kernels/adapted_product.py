"""A frozen product and its adapter's on processors, without the passes through memory that adding them up takes.

Legend: n rows, i numbers of an input, o of a result, r the adapter's rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def adapted_product(
    x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None, a_ri: Tensor, b_or: Tensor, scale: float
) -> Tensor:
    """x @ weight.T + bias + scale · (x @ a.T) @ b.T, in autocast's dtype where autocast is on. Gradients reach `x`, `a`
    and `b` alone. Differentiable once."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_ni.dtype
    # The casts stand outside, so that autograd casts gradients back.
    x, weight, a, b = (one.to(dtype) for one in (x_ni, weight_oi, a_ri, b_or))
    bias = None if bias_o is None else bias_o.to(dtype)
    with torch.autocast("cpu", enabled=False):
        result: Tensor = _AdaptedProduct.apply(x, weight, bias, a, b, scale)  # type: ignore[assignment]
    return result


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low_nr = F.linear(x, a).mul(scale)
        ctx.save_for_backward(x, weight, a, b, low_nr)
        ctx.scale = scale
        # Not in place: selective recompute keeps what a product gave as it is.
        return torch.addmm(F.linear(x, weight, bias), low_nr, b.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,), (x, weight, a, b, low_nr) = grads, ctx.saved_tensors
        grad_low = (grad @ b).mul_(ctx.scale)
        grad_x = (grad @ weight).addmm_(grad_low, a) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_low.t() @ x, grad.t() @ low_nr, None
