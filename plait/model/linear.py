"""A linear layer whose product can be replaced, for example to delay the weight's gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., in], weight [out, in] and bias [out] or None to x @ weight.T + bias."""


class Linear(nn.Module):
    """A product with a weight [width_out, width_in], plus a bias if requested.

    `multiply` may be replaced by a function with the same result: a zero-bubble pipeline delays the weight's gradient.
    """

    def __init__(self, width_in: int, width_out: int, *, bias: bool) -> None:
        super().__init__()
        like = nn.Linear(width_in, width_out, bias=bias)
        self.weight, self.bias = like.weight, like.bias
        self.multiply: Multiply = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)


def to_compute_precision(x: Tensor) -> Tensor:
    """Cast to the dtype that products compute in: under autocast this halves the bytes to send or to keep."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # numbers that are only counted have no autocast
        return x
    return x.to(torch.get_autocast_dtype(kind))
