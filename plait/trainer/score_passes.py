"""What the loss does with a piece of logits, in as few passes over memory as the device allows.

Two implementations of the same mathematics: in place, for pieces that stay in a processor's cache or where nothing is
compiled; and three functions that a compiler turns into one kernel each, which read the logits in the precision in
which the product gave them and write nothing of their size but the gradient. Of 16-bit logits, 50,257 to a token, the
first moves 2.6 MB a token on a GPU, the second 0.5.

Legend: n tokens of the piece, v vocabulary entries of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.parallel.sharded_model import VocabularySplit
from plait.partition.execution import Compile

IGNORED = -100
"""Target of a token that does not enter the loss."""

KeptScores = tuple[Tensor, ...]
"""What the gradient needs of the losses: values [n, v], each row's largest score [n, 1], sum of exponentials [n]; of
capped scores also their slopes [n, v]."""


class LocalTargets:
    """The targets of a piece: their places among this rank's vocabulary entries, and masks of those that are among
    them and of those that count at all."""

    def __init__(self, targets_n: Tensor, first: int, entries: int) -> None:
        index = targets_n - first
        self.counted_n = targets_n != IGNORED
        self.index_n1 = index.clamp(min=0, max=entries - 1).unsqueeze(1)
        self.here_n = (index >= 0) & (index < entries) & self.counted_n


class ScorePasses(Protocol):
    """From a piece's scores to its tokens' cross-entropies and to the gradient of the scores."""

    def losses(
        self, scores_nv: Tensor, targets: LocalTargets, vocabulary: VocabularySplit
    ) -> tuple[Tensor, KeptScores]:
        """Of each token over all ranks' entries, 0 where its target is ignored: [n], in at least float32; may overwrite
        the scores."""
        ...

    def gradient(
        self, kept: KeptScores, targets: LocalTargets, dtype: torch.dtype, scale: Tensor | None = None
    ) -> Tensor:
        """Probabilities minus one at the target, zero where the target is ignored, [n, v]; may overwrite `kept`.
        Multiplied by `scale`, if there is one, before they are rounded to `dtype`."""
        ...


class InPlacePasses:
    """One operation after the other, each on the same memory."""

    def losses(
        self, scores_nv: Tensor, targets: LocalTargets, vocabulary: VocabularySplit
    ) -> tuple[Tensor, KeptScores]:
        exact_nv = scores_nv.to(exact_dtype(scores_nv))
        largest_n1 = vocabulary.largest(exact_nv.amax(dim=1, keepdim=True))
        shifted_nv = exact_nv.sub_(largest_n1)
        picked_n = shifted_nv.gather(1, targets.index_n1).squeeze(1) * targets.here_n
        exponentials_nv = shifted_nv.exp_()
        sums_n, picked_n = vocabulary.sum(torch.stack([exponentials_nv.sum(dim=1), picked_n]))
        return _counted(sums_n, picked_n, targets), (exponentials_nv, largest_n1, sums_n)

    def gradient(
        self, kept: KeptScores, targets: LocalTargets, dtype: torch.dtype, scale: Tensor | None = None
    ) -> Tensor:
        exponentials_nv, _, sums_n = kept
        # One pass divides, ignores and scales; an ignored token's target is not here either.
        counted_n, minus_one = targets.counted_n, targets.here_n.unsqueeze(1).to(exponentials_nv.dtype).neg_()
        if scale is not None:
            counted_n, minus_one = counted_n * scale, minus_one * scale
        grad_nv = exponentials_nv.mul_((counted_n / sums_n).unsqueeze(1))
        return grad_nv.scatter_add_(1, targets.index_n1, minus_one).to(dtype)


class FusedPasses:
    """Three functions through `compiler`, such as torch.compile: it must not change what they compute."""

    def __init__(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._row_largest, self._row_sums, self._row_gradients = map(compiler, (row_largest, row_sums, row_gradients))

    def losses(
        self, scores_nv: Tensor, targets: LocalTargets, vocabulary: VocabularySplit
    ) -> tuple[Tensor, KeptScores]:
        largest_n1 = vocabulary.largest(self._row_largest(scores_nv))
        own = self._row_sums(scores_nv, largest_n1, targets.index_n1, targets.here_n)
        sums_n, picked_n = vocabulary.sum(own)
        return _counted(sums_n, picked_n, targets), (scores_nv, largest_n1, sums_n)

    def gradient(
        self, kept: KeptScores, targets: LocalTargets, dtype: torch.dtype, scale: Tensor | None = None
    ) -> Tensor:
        grad_nv: Tensor = self._row_gradients(*kept, targets.index_n1, targets.here_n, targets.counted_n, scale)
        return grad_nv.to(dtype)


class CappedPasses:
    """The passes of others, over scores that are capped first: s becomes cap × tanh(s / cap) (Gemma 2)."""

    def __init__(self, cap: float, passes: ScorePasses) -> None:
        self._cap, self._passes = cap, passes

    def losses(
        self, scores_nv: Tensor, targets: LocalTargets, vocabulary: VocabularySplit
    ) -> tuple[Tensor, KeptScores]:
        bent_nv = scores_nv.to(exact_dtype(scores_nv)).div_(self._cap).tanh_()
        slopes_nv = 1 - bent_nv.square()
        losses_n, kept = self._passes.losses(bent_nv.mul_(self._cap), targets, vocabulary)
        return losses_n, (*kept, slopes_nv)

    def gradient(
        self, kept: KeptScores, targets: LocalTargets, dtype: torch.dtype, scale: Tensor | None = None
    ) -> Tensor:
        *of_capped, slopes_nv = kept
        return slopes_nv.mul_(self._passes.gradient(tuple(of_capped), targets, slopes_nv.dtype, scale)).to(dtype)


def score_passes(compile: Compile, cap: float = 0.0) -> ScorePasses:
    """Compiled where the plan compiles layers; of a model that caps its scores where `cap` is not 0."""
    passes = FusedPasses(partial(torch.compile, dynamic=False)) if compile == "blocks" else InPlacePasses()
    return CappedPasses(cap, passes) if cap else passes


def exact_dtype(scores: Tensor) -> torch.dtype:
    """The precision of sums over scores."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def row_largest(scores_nv: Tensor) -> Tensor:
    """Each row's largest score, [n, 1]."""
    return scores_nv.amax(dim=1, keepdim=True).to(exact_dtype(scores_nv))


def row_sums(scores_nv: Tensor, largest_n1: Tensor, index_n1: Tensor, here_n: Tensor) -> Tensor:
    """Sums of exponentials, and the targets' own scores where they are here, both from the largest on: [2, n]."""
    sums_n = (scores_nv.to(largest_n1.dtype) - largest_n1).exp().sum(dim=1)
    picked_n1 = scores_nv.gather(1, index_n1).to(largest_n1.dtype) - largest_n1
    return torch.stack([sums_n, picked_n1.squeeze(1) * here_n])


def row_gradients(
    scores_nv: Tensor,
    largest_n1: Tensor,
    sums_n: Tensor,
    index_n1: Tensor,
    here_n: Tensor,
    counted_n: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    """The gradient of the scores, times `scale` if there is one, in their dtype."""
    exponentials_nv = (scores_nv.to(largest_n1.dtype) - largest_n1).exp()
    columns_1v = torch.arange(scores_nv.shape[1], device=scores_nv.device).unsqueeze(0)
    target_nv = (columns_1v == index_n1) & here_n.unsqueeze(1)
    grad_nv = exponentials_nv * (counted_n / sums_n).unsqueeze(1) - target_nv.to(largest_n1.dtype)
    if scale is not None:
        grad_nv = grad_nv * scale
    return grad_nv.to(scores_nv.dtype)


def _counted(sums_n: Tensor, picked_n: Tensor, targets: LocalTargets) -> Tensor:
    return (sums_n.log() - picked_n) * targets.counted_n
