"""The loss of pairs of answers on one rank, by one of the formulas in formulas.py.

See Note [loss is a sum] in trainer/loss.py: here too ranks and micro-batches only ever add, and what the sum is divided
by is the global number of pairs. The log-probabilities and the tokens of an answer are summed over the ranks of a
context before they enter the formula.

Legend: n tokens of the micro-batch on this rank, p its pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from plait.data.loader import Micro
from plait.data.samples.micro import NO_PAIR
from plait.model.gpt import GPT
from plait.parallel.sharded_model import LossOf, ShardedModel
from plait.trainer.loss import IN_PLACE
from plait.trainer.loss_scale import DeviceLossScale
from plait.trainer.preference.formulas import PreferenceLoss
from plait.trainer.preference.token_losses import token_losses
from plait.trainer.score_passes import IGNORED, ScorePasses

_Micros = TypeVar("_Micros")
_Autocast = Callable[[], AbstractContextManager[object]]


class PairLosses:
    """A rank's loss of pairs. Where it compares with the base it needs that first: `set_reference`, or what `record`
    gives."""

    def __init__(
        self,
        sharded: ShardedModel,
        pairs: int,
        loss: PreferenceLoss,
        autocast: _Autocast,
        passes: ScorePasses = IN_PLACE,
        scale: DeviceLossScale | None = None,
    ) -> None:
        self._sharded, self.loss, self._autocast, self._passes = sharded, loss, autocast, passes
        self._scale = scale
        self.pairs = pairs
        """Of the whole corpus, held-out ones included."""
        self._reference: Tensor | None = None
        self._recorded: Tensor | None = None
        self._sums: Tensor | None = None

    def set_reference(self, table_p2: Tensor) -> None:
        """Compare with these log-probabilities from now on: of all pairs of the corpus, [pairs, 2], float64."""
        assert table_p2.shape == (self.pairs, 2) and table_p2.dtype == torch.float64
        self._reference = table_p2

    def begin(self) -> None:
        """Forget what was summed up for `take`."""
        self._sums = None

    def take(self, like: Tensor) -> Tensor:
        """[sum of margins, pairs of which the chosen answer has the larger reward, tokens of answers] on this rank
        since `begin`; dtype and device of `like`."""
        return like.new_zeros(3) if self._sums is None else self._sums.to(like)

    def loss_of(self, hidden_nd: Tensor, chunk: GPT, micro: Micro) -> Tensor:
        """A LossOf: the sum of a micro-batch's losses, zero on the ranks of a context that do not report it, and its
        gradient."""
        sums_p2, tokens_p2 = self._log_probabilities(hidden_nd, chunk, micro)
        assert micro.pairs is not None
        there_p = micro.pairs.numbers != NO_PAIR
        numbers_p = micro.pairs.numbers.clamp(min=0)
        if self._recorded is not None:
            if micro.pairs.reported and self._sharded.reports:
                self._recorded.index_add_(0, numbers_p, sums_p2 * there_p[:, None])
            return sums_p2.sum() * 0.0
        if self.loss.compared_with == "base":
            assert self._reference is not None, "log-probabilities by the reference come first"
            sums_p2 = sums_p2 - self._reference[numbers_p]
        losses_p, margins_p = self.loss.of(sums_p2, tokens_p2)
        loss = (losses_p * there_p).sum()
        self._add(margins_p.detach() * there_p, micro)
        return loss if micro.pairs.reported else loss - loss.detach()

    def beside(self, plain: LossOf) -> LossOf:
        """This loss, or the plain one in a micro-batch without pairs, such as that of a multiple-choice question."""
        return lambda hidden_nd, chunk, micro: (plain if micro.pairs is None else self.loss_of)(hidden_nd, chunk, micro)

    def with_sums(self, run: Callable[[_Micros], Tensor]) -> Callable[[_Micros], Tensor]:
        """A function that runs micro-batches, with what `take` gives of them behind its own result."""

        def run_and_take(micros: _Micros) -> Tensor:
            self.begin()
            totals = run(micros)
            return torch.cat([totals, self.take(like=totals)])

        return run_and_take

    @contextmanager
    def record(self) -> Iterator[Tensor]:
        """In this block `loss_of` only fills the table that it gives, [pairs, 2] float64, with the log-probabilities
        that this rank reports; those of other ranks stay zero."""
        assert not torch.is_grad_enabled()
        (first, *_) = (tensor for chunk in self._sharded.chunks for tensor in chunk.parameters())
        self._recorded = torch.zeros(self.pairs, 2, dtype=torch.float64, device=first.device)
        yield self._recorded
        self._recorded = None

    def _log_probabilities(self, hidden_nd: Tensor, chunk: GPT, micro: Micro) -> tuple[Tensor, Tensor]:
        """The log-probabilities of both answers of each pair and their numbers of tokens, [p, 2] each in float64: the
        same on all ranks that see these pairs. The gradient is that of this rank's own tokens."""
        assert micro.pairs is not None
        vocabulary = self._sharded.vocabulary
        with self._autocast():
            every_nd = vocabulary.enter(hidden_nd, micro.targets.numel())
            losses_n = token_losses(
                every_nd,
                chunk.head_weight(),
                micro.targets.flatten(),
                vocabulary,
                self._passes,
                self._scale.factor if self._scale else None,
            )
        sequences = torch.arange(2 * len(micro.pairs.numbers), device=losses_n.device)
        # Added up in a fixed order, unlike index_add on a GPU.
        holds_sn = micro.pairs.sequence.flatten() == sequences[:, None]
        own_sn = torch.where(holds_sn, -losses_n.double(), 0.0)
        own_s = own_sn.sum(dim=1)
        tokens_s = (holds_sn & (micro.targets.flatten() != IGNORED)).sum(dim=1).double()
        if own_s.numel():
            sums_s, tokens_s = self._sharded.over_sequence(torch.cat([own_s.detach(), tokens_s])).chunk(2)
            own_s = sums_s + (own_s - own_s.detach())
        return own_s.view(-1, 2), tokens_s.view(-1, 2)

    def _add(self, margins_p: Tensor, micro: Micro) -> None:
        assert micro.pairs is not None
        counts = bool(micro.pairs.reported)
        of_pairs = torch.stack([margins_p.sum(), (margins_p > 0).sum().double()]) * counts
        sums = torch.cat([of_pairs, micro.tokens.reshape(1)]) * self._sharded.reports
        self._sums = sums if self._sums is None else self._sums + sums
