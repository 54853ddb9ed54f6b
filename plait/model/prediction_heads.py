"""Heads on layers in the middle, and the first half of prediction ahead; a layer and such a head are its second half.

Note [losses in backward]: the gradient of a head's loss is needed where the stream passes in the backward pass, and
nowhere before. So the forward pass computes nothing of a head: an identity function on the stream remembers it, and its
backward computes norm, loss and gradients, and adds the stream's to those that come from further up. A micro-batch
passes there once, also where layers are computed again, in any order of a pipeline. A loss in the forward pass
would keep a gradient of the size of the output matrix for each micro-batch under way.

Legend: n tokens, b rows of a batch, t tokens of a row, d numbers of the model's width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.model.linear import Linear, to_compute_precision
from plait.model.norm import make_last_norm, make_norm
from plait.model.shape import ModelShape

LookUp = Callable[[Tensor], Tensor]
"""Tokens [b, t] to their embeddings, the flat stream [n, d], without positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """The inputs that a head needs from training, for one objective and micro-batch."""

    sum_of: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """(norm, stream [n, d], output matrix [v, d]) to the summed loss, a scalar that is differentiable once."""
    factor: Tensor
    """By which the gradient of that sum is multiplied."""
    report: Callable[[Tensor], None]
    """Takes the sum, once, in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroObjectives:
    """The objectives of one micro-batch."""

    losses: Mapping[str, HeadLoss]
    """By the names of ObjectivesShape.weights."""
    following_bt: tuple[Tensor, ...] = ()
    """For each depth of prediction ahead the tokens this many further."""
    counted_n: tuple[Tensor, ...] = field(default=())
    """For each depth which tokens enter its loss, where a mixture of experts counts; else empty."""


class AuxiliaryHead(nn.Module):
    """A head in the middle: a separate norm before the model's output matrix."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = make_last_norm(shape)

    def forward(self, stream_nd: Tensor, output_vd: Tensor, loss: HeadLoss) -> Tensor:
        """The stream itself, whose backward adds the head's gradients."""
        return hand_over(stream_nd, stream_nd, output_vd, self.norm, loss)


class AheadInput(nn.Module):
    """The part of DeepSeek-V3's module of one depth before its layer (2412.19437, equation 21), and the norm after
    it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.hidden_norm = make_norm(shape)
        self.embedding_norm = make_norm(shape)
        self.projection = Linear(2 * shape.width, shape.width, bias=False)
        self.norm = make_last_norm(shape)

    def forward(self, stream_nd: Tensor, following_bt: Tensor, look_up: LookUp) -> Tensor:
        """The stream that the depth's layer reads, from that of the depth before and from tokens further on."""
        halves = (self.hidden_norm(stream_nd), self.embedding_norm(look_up(following_bt)))
        joined_nd = self.projection(to_compute_precision(torch.cat(halves, dim=1)))
        return joined_nd.to(stream_nd.dtype)


def hand_over(carrier_nd: Tensor, stream_nd: Tensor, output_vd: Tensor, norm: nn.Module, loss: HeadLoss) -> Tensor:
    """`carrier_nd` itself; its backward hands over the loss of a head that reads `stream_nd`: Note [losses in
    backward]."""
    same_nd: Tensor = _LossInBackward.apply(carrier_nd, stream_nd, output_vd, norm, loss, *norm.parameters())  # type: ignore[assignment]
    return same_nd


class _LossInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        carrier_nd: Tensor,
        stream_nd: Tensor,
        output_vd: Tensor,
        norm: nn.Module,
        loss: HeadLoss,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(stream_nd, output_vd)
        ctx.norm, ctx.loss, ctx.weights = norm, loss, weights
        return carrier_nd.view_as(carrier_nd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        stream_nd, output_vd = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            total = ctx.loss.sum_of(ctx.norm, stream_nd, output_vd)
        ctx.loss.report(total.detach())
        factor = ctx.loss.factor.to(total.dtype)
        found = torch.autograd.grad(total, (stream_nd, output_vd, *ctx.weights), factor)
        return grads[0], *found[:2], None, None, *found[2:]
