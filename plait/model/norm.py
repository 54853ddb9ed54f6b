"""The two norms, chosen by the model's shape."""

from __future__ import annotations

from torch import nn

from plait.model.shape import ModelShape, has_norm_bias


def make_norm(shape: ModelShape) -> nn.Module:
    """A norm over the model's width."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.width, eps=shape.norm_eps, bias=has_norm_bias(shape))
    return nn.RMSNorm(shape.width, eps=shape.norm_eps)


def make_head_norm(shape: ModelShape) -> nn.Module:
    """A norm over one head's queries or keys (Qwen 3): always RMSNorm."""
    return nn.RMSNorm(shape.head_width, eps=shape.norm_eps)
