"""The sum of token losses and their count.

Note [loss is a sum]: a step's loss is the sum over all its tokens divided by their global number. Ranks and
micro-batches only ever add: the sum of cross-entropies, the number of counted tokens, the sum of gradients. The
division by the global number happens once, after everything was added (step.py). So the result does not depend on how a
batch was divided, and unequal shares are as exact as equal ones. A mean inside a rank or micro-batch, averaged again
outside, is wrong as soon as their numbers of counted tokens differ.

Legend: n tokens (rows times columns, flattened), d width, v vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.model.linear import to_compute_precision
from plait.parallel.sharded_model import WHOLE_VOCABULARY, VocabularySplit

IGNORED = -100
"""Target of a token that does not enter the loss."""

_PIECE_NUMBERS = {"cpu": 2**21, "cuda": 2**27}
"""Largest number of logits held at a time, by device: a few megabytes that stay in a core's cache, or half a
gigabyte on a GPU."""


def sum_of_losses(
    hidden_nd: Tensor, head_vd: Tensor, targets_n: Tensor, vocabulary: VocabularySplit = WHOLE_VOCABULARY
) -> Tensor:
    """The summed cross-entropy, in nats, of the next-token logits `hidden @ head.T`; targets of -100 are ignored.

    Works through the tokens in chunks and computes the gradient in the same pass, so that the n × v logits never exist
    at once. Differentiable once, in hidden and head. Returns a scalar in float32, or float64 for float64 inputs. Where
    the vocabulary is split over ranks, each rank passes its rows of the head, and the hidden states and targets of all
    tokens; all ranks get the same sum, and each gets its own entries' contribution to the gradient of the hidden
    states.
    """
    want_grads = torch.is_grad_enabled()
    # Its products are made in place, and those autocast leaves as they are.
    hidden_nd = to_compute_precision(hidden_nd)
    total: Tensor = _SumOfLosses.apply(hidden_nd, head_vd, targets_n, vocabulary, want_grads)  # type: ignore[assignment]
    return total


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        head_vd: Tensor,
        targets_n: Tensor,
        vocabulary: VocabularySplit,
        want_grads: Literal[True, False],
    ) -> Tensor:
        exact = torch.float64 if hidden_nd.dtype == torch.float64 else torch.float32
        weight_vd = head_vd.detach().to(hidden_nd.dtype)
        total = torch.zeros((), dtype=exact, device=hidden_nd.device)
        grad_hidden = torch.empty_like(hidden_nd) if want_grads and ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head_vd, dtype=exact) if want_grads and ctx.needs_input_grad[1] else None
        piece = max(1, _PIECE_NUMBERS[hidden_nd.device.type] // vocabulary.most_entries(len(head_vd)))
        for first in range(0, hidden_nd.shape[0], piece):
            part = slice(first, first + piece)
            hidden, targets = hidden_nd[part].detach(), targets_n[part]
            local = _LocalTargets(targets, vocabulary.first, len(weight_vd))
            losses, probabilities = _losses((hidden @ weight_vd.T).to(exact), targets, local, vocabulary)
            total += losses
            if grad_hidden is not None or grad_head is not None:
                grad = _grad_of_scores(probabilities, targets, local).to(hidden.dtype)
                if grad_hidden is not None:
                    torch.mm(grad, weight_vd, out=grad_hidden[part])
                if grad_head is not None:
                    _add_product(grad_head, grad.T, hidden)
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(head_vd.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad_total,) = grads
        grad_hidden, grad_head = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden.mul_(grad_total),
            None if grad_head is None else grad_head.mul_(grad_total),
            None,
            None,
            None,
        )


class _LocalTargets:
    """Positions of the targets among this rank's vocabulary entries, and a mask of the targets that are among them."""

    def __init__(self, targets_n: Tensor, first: int, entries: int) -> None:
        index = targets_n - first
        self.index_n1 = index.clamp(min=0, max=entries - 1).unsqueeze(1)
        self.here_n = (index >= 0) & (index < entries) & (targets_n != IGNORED)


def _losses(
    scores_nv: Tensor, targets_n: Tensor, local: _LocalTargets, vocabulary: VocabularySplit
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy, and the probabilities, which overwrite the scores."""
    shifted = scores_nv.sub_(vocabulary.largest(scores_nv.amax(dim=1, keepdim=True)))
    picked_n = shifted.gather(1, local.index_n1).squeeze(1) * local.here_n
    exponentials = shifted.exp_()
    sums_n, picked_n = vocabulary.sum(torch.stack([exponentials.sum(dim=1), picked_n]))
    losses_n = sums_n.log() - picked_n
    return (losses_n * (targets_n != IGNORED)).sum(), exponentials.div_(sums_n.unsqueeze(1))


def _grad_of_scores(probabilities_nv: Tensor, targets_n: Tensor, local: _LocalTargets) -> Tensor:
    """Gradient of the scores: probabilities minus one at the target, computed in place; zero where the target is
    ignored."""
    minus_one = local.here_n.unsqueeze(1).to(probabilities_nv.dtype).neg_()
    grad = probabilities_nv.scatter_add_(1, local.index_n1, minus_one)
    return grad.masked_fill_((targets_n == IGNORED).unsqueeze(1), 0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in total's precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
