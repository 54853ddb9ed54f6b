"""Tokens to the ranks that hold their experts, and results back: counts first, then rows.

Every rank of a group must run the same layers in the same order; a rank to which no token goes takes part with no rows.

Legend: r rows that this rank sends, in the order of experts; s rows that it receives; d numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.model.experts.mixture import RunHeld
from plait.model.experts.sorting import from_experts, order_by_expert, to_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """How one rank's rows reach all experts of a layer. Called on all ranks of the group, forward and backward."""

    group: dist.ProcessGroup
    held: tuple[int, ...]
    """Experts of each rank of the group, in the experts' order."""

    def run(self, rows_rd: Tensor, counts: tuple[int, ...], run_held: RunHeld) -> Tensor:
        """The results of all experts for this rank's rows, which come in the order of experts, `counts` of each."""
        arriving = self._counts_of_others(counts, rows_rd.device)
        own = len(arriving[0])
        splits = _Splits(sent=self._sums(counts), received=tuple(sum(some) for some in arriving), group=self.group)
        arrived_sd = _exchanged(rows_rd, splits)
        # They stand by sender, and within a sender by expert.
        lengths = torch.tensor([count for some in arriving for count in some], device=rows_rd.device)
        experts_s = torch.arange(own, device=rows_rd.device).repeat(len(arriving)).repeat_interleave(lengths)
        order = order_by_expert(experts_s.unsqueeze(1), own)
        results_sd = from_experts(run_held(to_experts(arrived_sd, order), order.counts), order).squeeze(1)
        return _exchanged(results_sd, splits.back())

    def _sums(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Of each rank of the group the rows for its experts."""
        firsts = [sum(self.held[:rank]) for rank in range(len(self.held))]
        return tuple(sum(counts[first : first + number]) for first, number in zip(firsts, self.held, strict=True))

    def _counts_of_others(self, counts: tuple[int, ...], device: torch.device) -> list[list[int]]:
        """Of each rank of the group the rows that it sends to each of this rank's experts."""
        own = self.held[dist.get_rank(self.group)]
        sent = torch.tensor(counts, dtype=torch.int64, device=device)
        received = sent.new_empty(own * len(self.held))
        dist.all_to_all_single(received, sent, [own] * len(self.held), list(self.held), group=self.group)
        return received.view(len(self.held), own).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """Rows to and from each rank of a group."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup

    def back(self) -> _Splits:
        return _Splits(sent=self.received, received=self.sent, group=self.group)


def _exchanged(rows_rd: Tensor, splits: _Splits) -> Tensor:
    arrived_sd: Tensor = _Exchange.apply(rows_rd, splits)  # type: ignore[assignment]
    return arrived_sd


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_rd: Tensor, splits: _Splits) -> Tensor:
        ctx.splits = splits
        return _sent(rows_rd, splits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sent(grads[0], ctx.splits.back()), None


def _sent(rows_rd: Tensor, splits: _Splits) -> Tensor:
    """All ranks' rows for this one. They travel as bytes: gloo moves not every dtype."""
    arrived_sd = rows_rd.new_empty(sum(splits.received), rows_rd.shape[1])
    whole = (arrived_sd.view(torch.uint8), rows_rd.contiguous().view(torch.uint8))
    dist.all_to_all_single(*whole, list(splits.received), list(splits.sent), group=splits.group)
    return arrived_sd
