"""The two norms, chosen by the model's shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.shape import ModelShape, has_norm_bias


def make_norm(shape: ModelShape, *, factor: float = 1.0) -> nn.Module:
    """A norm over the model's width, whose result is multiplied by `factor`."""
    if shape.norm == "layernorm":
        assert factor == 1.0, "a LayerNorm has no factor"
        return LayerNorm(shape.width, shape.norm_eps, bias=has_norm_bias(shape))
    return RMSNorm(shape.width, shape.norm_eps, offset=norm_offset(shape), factor=factor)


def make_last_norm(shape: ModelShape) -> nn.Module:
    """A norm in front of the output matrix: what divides scores divides its result."""
    return make_norm(shape, factor=1.0 / shape.logit_divisor)


def norm_offset(shape: ModelShape) -> float:
    """The number added to the weights of norms."""
    return 1.0 if shape.norm_weight == "one plus" else 0.0


def make_head_norm(shape: ModelShape) -> nn.Module:
    """A norm over one head's queries or keys (Qwen 3): always RMSNorm."""
    return RMSNorm(shape.head_width, shape.norm_eps, offset=norm_offset(shape))


def make_value_norm(shape: ModelShape) -> nn.Module:
    """A norm over one head's values, without a weight (Gemma 4)."""
    return WeightlessRMSNorm(shape.head_width, shape.norm_eps)


# Note [norms of wider streams]: where weights are gathered in bfloat16 (parallel/sharding), the stream stays float32,
# and torch's kernels on processors take both only in one dtype.


class LayerNorm(nn.Module):
    """Subtract the mean, divide by the standard deviation (Ba et al. 2016), then multiply by the weight and add the
    bias, if there is one."""

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.dtype == torch.float32:  # Note [norms of wider streams]
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """Divide by the root of the mean square (Zhang and Sennrich 2019), then multiply by the weight, to which `offset`
    is added (Gemma), and by `factor`."""

    def __init__(self, width: int, eps: float, *, offset: float = 0.0, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps = eps
        self.offset, self.factor = offset, factor

    def forward(self, x: Tensor) -> Tensor:
        if self.offset or self.factor != 1.0:
            exact = torch.promote_types(x.dtype, torch.float32)  # 1 + weight in 16 bits would lose most of the weight
            weight = (self.weight.to(exact) + self.offset) * self.factor
            if x.device.type == "cpu" and not torch.compiler.is_compiling():
                return _RMSNorm.apply(x.to(exact), weight, self.eps).to(x.dtype)
            return F.rms_norm(x.to(exact), weight.shape, weight, self.eps).to(x.dtype)
        # GPUs have a fused kernel; on CPUs torch runs ten operations, and this class takes a third of their time.
        exact = x.dtype in (torch.float32, torch.float64)
        weight = self.weight.to(x.dtype) if exact else self.weight  # Note [norms of wider streams]
        if x.device.type == "cpu" and exact and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, weight, self.eps)
        return F.rms_norm(x, self.weight.shape, weight, self.eps)


class WeightlessRMSNorm(nn.Module):
    """Divide by the root of the mean square."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), None, self.eps)


class _RMSNorm(torch.autograd.Function):
    """With n = x / rms(x): y = w n, and dx = (w dy - n mean(w dy n)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        (grad,), (x, scale, weight) = grads, ctx.saved_tensors
        width = x.shape[-1]
        weight_terms = torch.mul(grad, x).mul_(scale).reshape(-1, width)
        along = torch.mv(weight_terms, weight).view(scale.shape).mul_(scale).div_(-width)
        grad_x = torch.mul(grad, weight).addcmul_(x, along).mul_(scale)
        return grad_x, weight_terms.sum(0) if ctx.needs_input_grad[1] else None, None
