"""A linear layer whose product can be replaced, for example to delay the weight's gradient, and that may have an
adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.model.adapter_shape import AdapterShape

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., in], weight [out, in] and bias [out] or None to x @ weight.T + bias."""
Around = Callable[[Multiply, Tensor, Tensor, Tensor | None], Tensor]
"""A function that calls the first argument with the others, changed or not, and does more before or after it."""


class Linear(nn.Module):
    """A product with a weight [width_out, width_in], plus a bias if requested, plus an adapter's two products.

    `product` may be replaced by a function with the same result: a zero-bubble pipeline delays the weight's gradient.
    `around` is what a parallelism does around the whole of it: tensor parallelism sums over ranks, once for the layer
    and its adapter together.
    """

    def __init__(self, width_in: int, width_out: int, *, bias: bool, adapter: AdapterShape | None = None) -> None:
        super().__init__()
        like = nn.Linear(width_in, width_out, bias=bias)
        self.weight, self.bias = like.weight, like.bias
        self.scale = 0.0 if adapter is None else adapter.scale
        self.lora_a = None if adapter is None else nn.Parameter(torch.zeros(adapter.rank, width_in))
        self.lora_b = None if adapter is None else nn.Parameter(torch.zeros(width_out, adapter.rank))
        self.product: Multiply = F.linear
        self.around: Around | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.around is None:
            return self.multiply(x, self.weight, self.bias)
        return self.around(self.multiply, x, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's product with this weight and bias, and its adapter's share."""
        if self.lora_a is None or self.lora_b is None:
            return self.product(x, weight, bias)
        if self.product is F.linear and x.device.type == "cpu" and not torch.compiler.is_compiling():
            return adapted_product(x, weight, bias, self.lora_a, self.lora_b, self.scale)
        low = self.product(x, self.lora_a, None) * self.scale
        return self.product(x, weight, bias) + self.product(low, self.lora_b, None)


HALF_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of runs that compute in 16 bits from float32 weights."""


def to_compute_precision(x: Tensor) -> Tensor:
    """Cast to the dtype that products compute in: under autocast this halves the bytes to send or to keep."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # numbers that are only counted have no autocast
        return x
    return x.to(torch.get_autocast_dtype(kind))


# A frozen product and its adapter's on processors, without the passes through memory that adding them up takes.
#
# Legend: n rows, i numbers of an input, o of a result, r the adapter's rank.


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
