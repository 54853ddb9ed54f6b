"""A linear layer whose product can be replaced, for example to delay the weight's gradient, and that may have an
adapter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.adapter_shape import AdapterShape
from plait.model.kernels.adapted_product import adapted_product

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., in], weight [out, in] and bias [out] or None to x @ weight.T + bias."""
Around = Callable[[Multiply, Tensor, Tensor, Tensor | None], Tensor]
"""A function that calls the first argument with the others, changed or not, and does more before or after it."""


class Linear(nn.Module):
    """A product with a weight [width_out, width_in], plus a bias if requested, plus an adapter's two products.

    `product` may be replaced by a function with the same result: a zero-bubble pipeline delays the weight's gradient.
    `around` is what a strand does around the whole of it: tensor parallelism sums over ranks, once for the layer and
    its adapter together.
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


def to_compute_precision(x: Tensor) -> Tensor:
    """Cast to the dtype that products compute in: under autocast this halves the bytes to send or to keep."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # numbers that are only counted have no autocast
        return x
    return x.to(torch.get_autocast_dtype(kind))
