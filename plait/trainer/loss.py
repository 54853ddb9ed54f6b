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

from plait.accelerator import is_accelerator
from plait.devices import DevicePlace
from plait.model.linear import to_compute_precision
from plait.parallel.sharded_model import WHOLE_VOCABULARY, VocabularySplit
from plait.trainer.score_passes import InPlacePasses, LocalTargets, ScorePasses, exact_dtype

_PIECE_NUMBERS: dict[DevicePlace, int] = {"accelerator": 2**27, "host": 2**21}
"""Largest number of logits held at a time: a quarter of a gigabyte of 16-bit ones on an accelerator, and a few
megabytes on a processor, which stay in a core's cache."""

IN_PLACE = InPlacePasses()


def sum_of_losses(
    hidden_nd: Tensor,
    head_vd: Tensor,
    targets_n: Tensor,
    vocabulary: VocabularySplit = WHOLE_VOCABULARY,
    passes: ScorePasses = IN_PLACE,
    scale: Tensor | None = None,
) -> Tensor:
    """The summed cross-entropy, in nats, of the next-token logits `hidden @ head.T`; targets of -100 are ignored.

    Works through the tokens in pieces and computes the gradient in the same pass, so that the n × v logits never exist
    at once. Differentiable once, in hidden and head. Returns a scalar in float32, or float64 for float64 inputs. Where
    the vocabulary is split over ranks, each rank passes its rows of the head, and the hidden states and targets of all
    tokens; all ranks get the same sum, and each gets its own entries' contribution to the gradient of the hidden
    states. Gradients are multiplied by `scale`, if there is one, and the sum is not.
    """
    want_grads = torch.is_grad_enabled()
    # Its products are made in place, and those autocast leaves as they are.
    hidden_nd = to_compute_precision(hidden_nd)
    total: Tensor = _SumOfLosses.apply(hidden_nd, head_vd, targets_n, vocabulary, passes, want_grads, scale)  # type: ignore[assignment]
    return total


def loss_pieces(hidden_nd: Tensor, head_vd: Tensor, vocabulary: VocabularySplit) -> list[slice]:
    """The tokens whose logits are there at a time: the same on every rank that the vocabulary is split over."""
    most = _PIECE_NUMBERS["accelerator" if is_accelerator(hidden_nd.device) else "host"]
    return even_pieces(len(hidden_nd), most // vocabulary.most_entries(len(head_vd)))


def even_pieces(tokens: int, most: int) -> list[slice]:
    """As few pieces of at most `most` tokens as there can be, of one size but for the last, which may be smaller: a
    compiled kernel is made for a size."""
    count = -(-tokens // max(1, most))
    size = -(-tokens // max(1, count))
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, max(1, size))]


class _SumOfLosses(torch.autograd.Function):
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
        exact = exact_dtype(hidden_nd)
        weight_vd = head_vd.detach().to(hidden_nd.dtype)
        total = torch.zeros((), dtype=exact, device=hidden_nd.device)
        grad_hidden = torch.empty_like(hidden_nd) if want_grads and ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head_vd, dtype=exact) if want_grads and ctx.needs_input_grad[1] else None
        for part in loss_pieces(hidden_nd, head_vd, vocabulary):
            hidden = hidden_nd[part].detach()
            targets = LocalTargets(targets_n[part], vocabulary.first, len(weight_vd))
            own_grad = None if grad_hidden is None else grad_hidden[part]
            total += _add_piece(passes, hidden, weight_vd, targets, vocabulary, own_grad, grad_head, scale)
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
            None,
            None,
        )


def _add_piece(
    passes: ScorePasses,
    hidden_nd: Tensor,
    weight_vd: Tensor,
    targets: LocalTargets,
    vocabulary: VocabularySplit,
    grad_hidden_nd: Tensor | None,
    grad_head_vd: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """The summed loss of a piece, whose gradients are put into `grad_hidden_nd` and added to `grad_head_vd`. When it
    returns, nothing that is as large as the piece's logits is there any more."""
    losses_n, kept = passes.losses(hidden_nd @ weight_vd.T, targets, vocabulary)
    losses = losses_n.sum()
    if grad_hidden_nd is None and grad_head_vd is None:
        return losses
    grad_nv = passes.gradient(kept, targets, hidden_nd.dtype, scale)
    del kept
    if grad_hidden_nd is not None:
        torch.mm(grad_nv, weight_vd, out=grad_hidden_nd)
    if grad_head_vd is not None:
        add_product(grad_head_vd, grad_nv.T, hidden_nd)
    return losses


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in total's precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
