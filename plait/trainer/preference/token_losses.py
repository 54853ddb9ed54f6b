"""The cross-entropy of each token, where a loss is not their plain sum.

Legend: n tokens (rows times columns, flattened), d width, v vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.model.linear import to_compute_precision
from plait.parallel.sharded_model import WHOLE_VOCABULARY, VocabularySplit
from plait.trainer.loss import IN_PLACE, add_product, loss_pieces
from plait.trainer.score_passes import LocalTargets, ScorePasses, exact_dtype

# Note [weighed afterwards]: what a token's loss counts is only known when all of its sequence was summed. The gradient
# of the hidden states is a row for each token, so it is made at once and each row weighed later. The gradient of the
# head is a sum over tokens: where the head learns, the logits are computed once more in the backward pass.


def token_losses(
    hidden_nd: Tensor,
    head_vd: Tensor,
    targets_n: Tensor,
    vocabulary: VocabularySplit = WHOLE_VOCABULARY,
    passes: ScorePasses = IN_PLACE,
    scale: Tensor | None = None,
) -> Tensor:
    """The cross-entropy, in nats, of each next-token prediction: [n], in float32, or float64 for float64 inputs; 0
    where the target is ignored.

    As `sum_of_losses`, and differentiable once. Where the vocabulary is split over ranks, all of them must give the
    same gradient of the result. Gradients are multiplied by `scale`, if there is one, and the result is not.
    """
    hidden_nd = to_compute_precision(hidden_nd)
    want_grads = torch.is_grad_enabled()
    losses_n: Tensor = _TokenLosses.apply(hidden_nd, head_vd, targets_n, vocabulary, passes, want_grads, scale)  # type: ignore[assignment]
    return losses_n


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        head_vd: Tensor,
        targets_n: Tensor,
        vocabulary: VocabularySplit,
        passes: ScorePasses,
        want_grads: Literal[True, False],
        scale: Tensor | None,
    ) -> Tensor:
        learns = want_grads and ctx.needs_input_grad[1]
        early = want_grads and ctx.needs_input_grad[0] and not learns
        losses_n = torch.empty(len(hidden_nd), dtype=exact_dtype(hidden_nd), device=hidden_nd.device)
        grad_hidden = torch.empty_like(hidden_nd) if early else None
        weight_vd = head_vd.detach().to(hidden_nd.dtype)
        for part in loss_pieces(hidden_nd, head_vd, vocabulary):
            hidden = hidden_nd[part].detach()
            targets = LocalTargets(targets_n[part], vocabulary.first, len(weight_vd))
            losses_n[part], kept = passes.losses(hidden @ weight_vd.T, targets, vocabulary)
            if grad_hidden is not None:
                torch.mm(passes.gradient(kept, targets, hidden.dtype, scale), weight_vd, out=grad_hidden[part])
        ctx.vocabulary, ctx.passes, ctx.scale = vocabulary, passes, scale
        if learns:
            ctx.save_for_backward(hidden_nd, head_vd, targets_n)
        else:
            ctx.save_for_backward(grad_hidden)
        return losses_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (weight_n,) = grads
        if len(ctx.saved_tensors) == 1:
            (grad_hidden,) = ctx.saved_tensors
            weighed = None if grad_hidden is None else (grad_hidden * weight_n.unsqueeze(1)).to(grad_hidden.dtype)
            return weighed, None, None, None, None, None, None
        return *_both_gradients(ctx, weight_n), None, None, None, None, None


def _both_gradients(ctx: Any, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    hidden_nd, head_vd, targets_n = ctx.saved_tensors
    vocabulary, passes = ctx.vocabulary, ctx.passes
    weight_vd = head_vd.detach().to(hidden_nd.dtype)
    grad_hidden, grad_head = torch.empty_like(hidden_nd), torch.zeros_like(head_vd, dtype=exact_dtype(hidden_nd))
    for part in loss_pieces(hidden_nd, head_vd, vocabulary):
        hidden = hidden_nd[part].detach()
        targets = LocalTargets(targets_n[part], vocabulary.first, len(weight_vd))
        _, kept = passes.losses(hidden @ weight_vd.T, targets, vocabulary)
        grad_nv = passes.gradient(kept, targets, exact_dtype(hidden), ctx.scale)
        grad_nv = grad_nv.mul_(weight_n[part].unsqueeze(1)).to(hidden.dtype)
        torch.mm(grad_nv, weight_vd, out=grad_hidden[part])
        add_product(grad_head, grad_nv.T, hidden)
    return grad_hidden, grad_head.to(head_vd.dtype)
