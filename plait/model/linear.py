"""A linear layer whose product can be replaced, for example to delay the weight's gradient, and that may have an
adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.model.adapter_shape import AdapterShape
from plait.model.dropout import without_dropped
from plait.model.quantization import QuantizedPart, quantized_product, read_matrix

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., in], weight [out, in] and bias [out] or None to x @ weight.T + bias."""
Around = Callable[[Multiply, Tensor, Tensor, Tensor | None], Tensor]
"""A function that calls the first argument with the others, changed or not, and does more before or after it."""
ReadMatrix = Callable[[Tensor, torch.dtype], Tensor]
"""A frozen weight as it is kept, and a dtype, to the matrix [out, in]."""
Drop = Callable[[Tensor], Tensor]
"""What a product reads [n, in], or its gradient, to a copy with zeros where an adapter's dropout says so."""


class Linear(nn.Module):
    """A product with a weight [width_out, width_in], plus a bias if requested, plus an adapter's two products.

    `product` may be replaced by a function with the same result: a zero-bubble pipeline delays the weight's gradient.
    `around` is what a parallelism does around the whole of it: tensor parallelism sums over ranks, once for the layer
    and its adapter together. A quantized layer's `weight` is the blocks of `part`, beside which `scales` belong to the
    whole matrix.
    """

    def __init__(self, width_in: int, width_out: int, *, bias: bool, adapter: AdapterShape | None = None) -> None:
        super().__init__()
        like = nn.Linear(width_in, width_out, bias=bias)
        self.weight, self.bias = like.weight, like.bias
        self.scale = 0.0 if adapter is None else adapter.scale
        self.dropout = 0.0 if adapter is None else adapter.dropout
        self.salt = 0
        """Tells this layer's dropout apart from that of others with the same input (dropout.py)."""
        self.first_input = 0
        """The number of the first input that this rank has, where a parallelism cuts inputs."""
        self.lora_a = None if adapter is None else nn.Parameter(torch.zeros(adapter.rank, width_in))
        self.lora_b = None if adapter is None else nn.Parameter(torch.zeros(width_out, adapter.rank))
        self.product: Multiply = F.linear
        self.around: Around | None = None
        self.part: QuantizedPart | None = None
        self.scales: Tensor | None
        self.register_buffer("scales", None, persistent=False)

    def quantize(self, part: QuantizedPart) -> None:
        """Keep this part of the weight in blocks from now on, which are yet to be filled."""
        blocks = torch.empty(part.blocks, part.block_bytes, dtype=torch.uint8, device=self.weight.device)
        self.weight = nn.Parameter(blocks, requires_grad=False)
        self.scales = torch.empty(part.scales, device=self.weight.device)
        self.part = part

    def forward(self, x: Tensor, noise_n: Tensor | None = None) -> Tensor:
        """The product; `noise_n` are the tokens' hashes in this layer, by which its adapter's dropout goes."""
        multiply = self.multiply if noise_n is None or not self.dropout else partial(self.multiply, noise_n=noise_n)
        if self.around is None:
            return multiply(x, self.weight, self.bias)
        return self.around(multiply, x, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, noise_n: Tensor | None = None) -> Tensor:
        """The layer's product with this weight and bias, and its adapter's share."""
        if self.lora_a is None or self.lora_b is None:
            return self._own_product(x, weight, bias)
        drop: Drop | None = None
        scale = self.scale
        if noise_n is not None:
            drop = partial(without_dropped, noise_n=noise_n, salt=self.salt, first=self.first_input, rate=self.dropout)
            scale = scale / (1 - self.dropout)
        if self.product is F.linear and x.device.type == "cpu" and not torch.compiler.is_compiling():
            read = None
            if self.part is not None and self.scales is not None:
                read = partial(read_matrix, scales=self.scales, part=self.part)
            return adapted_product(x, weight, bias, self.lora_a, self.lora_b, scale, read, drop)
        low = self.product(x if drop is None else drop(x), self.lora_a, None) * scale
        return self._own_product(x, weight, bias) + self.product(low, self.lora_b, None)

    def _own_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.part is None or self.scales is None:
            return self.product(x, weight, bias)
        return quantized_product(x, weight, bias, self.scales, self.part)


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
    x_ni: Tensor,
    weight: Tensor,
    bias_o: Tensor | None,
    a_ri: Tensor,
    b_or: Tensor,
    scale: float,
    read: ReadMatrix | None = None,
    drop: Drop | None = None,
) -> Tensor:
    """x @ weight.T + bias + scale · (x @ a.T) @ b.T, in autocast's dtype where autocast is on. Gradients reach `x`, `a`
    and `b` alone. Differentiable once. The weight is a matrix [o, i], or what `read` makes one of, once in each
    pass. The second x is what `drop` leaves of it, which is made again in the backward pass."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_ni.dtype
    # The casts stand outside, so that autograd casts gradients back.
    x, a, b = (one.to(dtype) for one in (x_ni, a_ri, b_or))
    weight = weight.to(dtype) if read is None else weight
    bias = None if bias_o is None else bias_o.to(dtype)
    with torch.autocast("cpu", enabled=False):
        result: Tensor = _AdaptedProduct.apply(x, weight, bias, a, b, scale, read, drop)  # type: ignore[assignment]
    return result


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        read: ReadMatrix | None,
        drop: Drop | None,
    ) -> Tensor:
        low_nr = F.linear(x if drop is None else drop(x), a).mul(scale)
        ctx.save_for_backward(x, weight, a, b, low_nr)
        ctx.scale, ctx.read, ctx.drop = scale, read, drop
        weight_oi = weight if read is None else read(weight, x.dtype)
        # Not in place: selective recompute keeps what a product gave as it is.
        return torch.addmm(F.linear(x, weight_oi, bias), low_nr, b.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,), (x, weight, a, b, low_nr) = grads, ctx.saved_tensors
        grad_low, grad_x = (grad @ b).mul_(ctx.scale), None
        if ctx.needs_input_grad[0]:
            weight_oi = weight if ctx.read is None else ctx.read(weight, grad.dtype)
            grad_x = grad @ weight_oi
            grad_x = grad_x.addmm_(grad_low, a) if ctx.drop is None else grad_x.add_(ctx.drop(grad_low @ a))
        x = x if ctx.drop is None else ctx.drop(x)
        return grad_x, None, None, grad_low.t() @ x, grad.t() @ low_nr, None, None, None
