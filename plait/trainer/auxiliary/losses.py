"""The losses beside that of the next token, on one rank: their sums, what divides them, and the step's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from plait.data.loader import Micro
from plait.model.prediction_heads import HeadLoss, MicroObjectives
from plait.model.shape import ModelShape
from plait.parallel.sharded_model import ShardedModel
from plait.trainer.loss import IN_PLACE, sum_of_losses
from plait.trainer.loss_scale import DeviceLossScale
from plait.trainer.score_passes import IGNORED, ScorePasses

_Autocast = Callable[[], AbstractContextManager[object]]


class AuxiliaryLosses:
    """A rank's auxiliary losses; of a model without any it does nothing.

    In a step `begin` comes first, then every micro-batch's forward with `of`, and `take` and `table` at the end.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        shape: ModelShape,
        autocast: _Autocast,
        passes: ScorePasses = IN_PLACE,
        scale: DeviceLossScale | None = None,
    ) -> None:
        self.weights, self._ahead = shape.objectives.weights, shape.objectives.ahead
        self._counts_experts = shape.mixture is not None
        self._vocabulary, self._autocast, self._passes = sharded.vocabulary, autocast, passes
        self._scale = scale
        self._reports, self._counts_tokens = sharded.reports_objectives, sharded.reports
        self._factors: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None
        self._always = False

    @property
    def names(self) -> tuple[str, ...]:
        """For each objective, in order."""
        return tuple(self.weights)

    def begin(self, micros: Sequence[Micro], sums: Callable[[Tensor], Tensor]) -> None:
        """Begin a step with this rank's micro-batches: count what each loss is divided by. Every rank must call it."""
        self._sums.clear()
        if not self.weights:
            return
        targets = [[micro.targets, *(one.targets for one in micro.ahead)] for micro in micros]
        counts = [torch.stack([(one != IGNORED).sum() for one in some]).double() for some in targets]
        main, *further = sums(torch.stack(counts).sum(dim=0) * self._counts_tokens).unbind()
        # Of heads in the middle it is the main loss's own number.
        tokens = [main] * (len(self.weights) - self._ahead) + further
        self._tokens = torch.stack(tokens)
        self._factors = {
            name: weight * main / own.clamp(min=1)
            for (name, weight), own in zip(self.weights.items(), tokens, strict=True)
        }

    def of(self, micro: Micro) -> MicroObjectives | None:
        """The inputs of a forward pass of this micro-batch; None if there are none, or if nothing is trained."""
        if not self.weights or not (torch.is_grad_enabled() or self._always):
            return None
        of_heads = dict.fromkeys(self.names[: len(self.names) - self._ahead], micro.targets)
        of_depths = dict(zip(self.names[len(of_heads) :], (one.targets for one in micro.ahead), strict=True))
        return MicroObjectives(
            losses={name: self._loss(name, targets.flatten()) for name, targets in (of_heads | of_depths).items()},
            following_bt=tuple(one.tokens for one in micro.ahead),
            counted_n=tuple((one.targets != IGNORED).flatten() for one in micro.ahead) if self._counts_experts else (),
        )

    @contextmanager
    def also_without_gradients(self) -> Iterator[None]:
        """In this block `of` answers also where nothing learns: experts of layers for prediction ahead are counted."""
        self._always = True
        yield
        self._always = False

    def take(self, like: Tensor) -> Tensor:
        """The step's sums of losses on this rank, one for each objective: zeros where another rank reports them. Dtype
        and device of `like`."""
        found = like.new_zeros(len(self.names))
        for place, name in enumerate(self.names):
            if name in self._sums and self._reports:
                found[place] = self._sums[name]
        return found

    def table(self, sums: Tensor) -> Tensor:
        """Sums over all ranks as [objectives, 2]: each with the number of its tokens."""
        if self._tokens is None:
            return sums.new_zeros(0, 2)
        return torch.stack([sums, self._tokens.to(sums)], dim=1)

    def _loss(self, name: str, targets_n: Tensor) -> HeadLoss:
        return HeadLoss(
            sum_of=partial(self._sum_of, targets_n), factor=self._factors[name], report=partial(self._add, name)
        )

    def _sum_of(self, targets_n: Tensor, norm: nn.Module, stream_nd: Tensor, output_vd: Tensor) -> Tensor:
        with self._autocast():
            every_nd = self._vocabulary.enter(norm(stream_nd), targets_n.numel())
            scale = self._scale.factor if self._scale else None
            return sum_of_losses(every_nd, output_vd, targets_n, self._vocabulary, self._passes, scale)

    def _add(self, name: str, total: Tensor) -> None:
        before = self._sums.get(name)
        self._sums[name] = total.double() if before is None else before + total.double()
