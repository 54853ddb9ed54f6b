"""The loss of pairs of answers on one rank: DPO (Rafailov et al. 2023, 2305.18290, equation 7).

Of a pair with log-probabilities c and r of the chosen and the rejected answer, c₀ and r₀ by the reference, the margin
of rewards is m = beta · ((c − c₀) − (r − r₀)) and the loss −log sigmoid(m). Log-probabilities are sums over an answer's
tokens, not means. See Note [loss is a sum] in trainer/loss.py: here too ranks and micro-batches only ever add, and what
the sum is divided by is the global number of pairs.

Legend: n tokens of the micro-batch on this rank, p its pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.data.loader import Micro
from plait.data.samples.micro import NO_PAIR
from plait.model.gpt import GPT
from plait.parallel.sharded_model import LossOf, ShardedModel
from plait.trainer.loss import IN_PLACE
from plait.trainer.loss_scale import DeviceLossScale
from plait.trainer.preference.token_losses import token_losses
from plait.trainer.score_passes import ScorePasses

_Micros = TypeVar("_Micros")
_Autocast = Callable[[], AbstractContextManager[object]]
CHOSEN, REJECTED = 0, 1
"""Columns of a table of pairs."""


class PairLosses:
    """A rank's loss of pairs. It needs the reference first: `set_reference`, or what `record` gives."""

    def __init__(
        self,
        sharded: ShardedModel,
        pairs: int,
        beta: float,
        autocast: _Autocast,
        passes: ScorePasses = IN_PLACE,
        scale: DeviceLossScale | None = None,
    ) -> None:
        self._sharded, self.beta, self._autocast, self._passes = sharded, beta, autocast, passes
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
        sums_p2 = self._log_probabilities(hidden_nd, chunk, micro)
        assert micro.pairs is not None
        there_p = micro.pairs.numbers != NO_PAIR
        numbers_p = micro.pairs.numbers.clamp(min=0)
        if self._recorded is not None:
            if micro.pairs.reported and self._sharded.reports:
                self._recorded.index_add_(0, numbers_p, sums_p2 * there_p[:, None])
            return sums_p2.sum() * 0.0
        assert self._reference is not None, "log-probabilities by the reference come first"
        rewards_p2 = self.beta * (sums_p2 - self._reference[numbers_p])
        margins_p = (rewards_p2[:, CHOSEN] - rewards_p2[:, REJECTED]) * there_p
        loss = -(F.logsigmoid(margins_p) * there_p).sum()
        self._add(margins_p.detach(), micro)
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

    def _log_probabilities(self, hidden_nd: Tensor, chunk: GPT, micro: Micro) -> Tensor:
        """Of both answers of each pair, [p, 2] in float64: the same on all ranks that see these pairs. Its gradient is
        that of this rank's own tokens."""
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
        own_sn = torch.where(micro.pairs.sequence.flatten() == sequences[:, None], -losses_n.double(), 0.0)
        own_s = own_sn.sum(dim=1)
        if own_s.numel():
            own_s = self._sharded.over_sequence(own_s.detach()) + (own_s - own_s.detach())
        return own_s.view(-1, 2)

    def _add(self, margins_p: Tensor, micro: Micro) -> None:
        assert micro.pairs is not None
        counts = bool(micro.pairs.reported)
        of_pairs = torch.stack([margins_p.sum(), (margins_p > 0).sum().double()]) * counts
        sums = torch.cat([of_pairs, micro.tokens.reshape(1)]) * self._sharded.reports
        self._sums = sums if self._sums is None else self._sums + sums
