"""Products whose weight gradient is made later, for schedules that split the backward pass.

Backward through such a product gives the gradients of its input and bias at once, and puts input and gradient aside;
`settle` multiplies them when the pipeline has time. The sum of both halves is plain backward, product by
product.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.model.linear import Linear, Multiply

DeferredProduct = tuple[nn.Parameter, Tensor, Tensor]
"""A weight [out, in], what it multiplied [..., in], and the gradient of the result [..., out]."""


def defer_in(module: nn.Module, multiply: Multiply) -> None:
    """Let every Linear in a module multiply by `multiply`, that of a `DeferredGradients`."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.product = multiply


class DeferredGradients:
    """One rank's deferred weight gradients, in a queue per backward pass; `collect` opens the next one's queue."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[DeferredProduct]] = {}
        self._queue: list[DeferredProduct] | None = None

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product that F.linear returns, in autocast's dtype where autocast is on; nothing is deferred of a frozen
        weight."""
        if not weight.requires_grad:
            return F.linear(x, weight, bias)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        # The cast stands outside, so that autograd casts the input's gradient back.
        product: Tensor = _Product.apply(x.to(dtype), weight, bias, self)  # type: ignore[assignment]
        return product

    def collect(self, key: Hashable) -> None:
        """Open a queue: what backward defers from now on is settled under this key."""
        self._queue = self._queues.setdefault(key, [])

    def put_off(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> None:
        """Defer the weight gradient of one product; called by its backward."""
        assert self._queue is not None, "a product with a deferred weight gradient needs a queue before its backward"
        self._queue.append((weight, x, grad))

    @torch.no_grad()
    def settle(self, key: Hashable) -> None:
        """Add the gradients that were deferred under the key to each weight's `.grad`, and forget them."""
        queue = self._queues.pop(key)
        while queue:
            weight, x, grad = queue.pop(0)
            _accumulate(weight, grad.flatten(0, -2).T, x.flatten(0, -2))


def _accumulate(weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """weight.grad += left @ right, without a second matrix where the dtypes allow it."""
    if weight.grad is None:
        weight.grad = (left @ right).to(weight.dtype)
    elif weight.grad.dtype == left.dtype:
        weight.grad.addmm_(left, right)
    else:
        weight.grad += left @ right


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Not as a saved tensor: the parameter itself, not what a hook makes of it, gets the gradient.
        ctx.parameter, ctx.deferred, ctx.bias_dtype = weight, deferred, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:  # type: ignore[override]
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_bias = None
        if ctx.bias_dtype is not None:
            grad_bias = grad.flatten(0, -2).sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
            grad_bias = grad_bias.to(ctx.bias_dtype)
        ctx.deferred.put_off(ctx.parameter, x, grad)
        return grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, grad_bias, None
