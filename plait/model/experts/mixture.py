"""A mixture of experts in place of a layer's feed-forward part; no token is dropped.

Legend: n tokens, d numbers of the model's width, k experts of a token, r = n × k rows in the order of experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from plait.model.attention import Rows
from plait.model.experts.balance import LoadMeter, SumOverSequence, balance_sum, counts_by_row, handed_over
from plait.model.experts.router import Router, Routing
from plait.model.experts.sorting import from_experts, order_by_expert, to_experts
from plait.model.feedforward import FeedForward
from plait.model.linear import to_compute_precision
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape


class Mixture(nn.Module):
    """Routed experts, and shared ones that every token passes.

    Widths are read off the weights, so that a module that holds a part of each expert works as it stands. Strands
    replace `run_all`, which reaches the experts of other ranks; `finish`, what is done with the sum of all results
    (tensor parallelism adds up the ranks' parts); and `over_sequence`, which adds up counts over the ranks that have
    parts of the same rows. `reports` is true on one of the ranks that see the same tokens: it answers for their counts
    and balance losses.
    """

    def __init__(self, shape: ModelShape, mixture: MixtureShape) -> None:
        super().__init__()
        self.shape_of_mixture = mixture
        self.router = Router(shape.width, mixture)
        numbers = range(mixture.experts)
        self.experts = nn.ModuleDict({str(number): FeedForward(shape, mixture.expert_ffn) for number in numbers})
        shared = shape.size_of("shared_ffn")
        self.shared = FeedForward(shape, shared) if shared else None
        self.meter = LoadMeter()
        self.step_counts_e: Tensor | None = None
        """The counts of the whole step, where a loss needs them before the first backward pass."""
        self.run_all: RunAll = run_here
        self.finish: Callable[[Tensor], Tensor] = unchanged
        self.over_sequence: SumOverSequence = unchanged
        self.reports = True

    def forward(self, x_nd: Tensor, rows: Rows) -> Tensor:
        routing = self.router(x_nd)
        x_nd = to_compute_precision(x_nd)  # once: autocast would keep a copy for each product
        mixed_nd = self._mix(x_nd, routing)
        if self.shared is not None:
            mixed_nd = mixed_nd + self.shared(x_nd)
        return self.finish(self._counted(mixed_nd, routing, rows))

    def _mix(self, x_nd: Tensor, routing: Routing) -> Tensor:
        """Each token's chosen experts' results, weighted and added up. An expert without tokens multiplies no rows, and
        so has a gradient, of zeros."""
        order = order_by_expert(routing.chosen_nk, self.shape_of_mixture.experts)
        results_rd = self.run_all(to_experts(x_nd, order), order.counts, self._run_held)
        weighted_nkd = from_experts(results_rd, order) * routing.gates_nk.to(results_rd.dtype).unsqueeze(2)
        return weighted_nkd.sum(dim=1)

    def _run_held(self, rows_rd: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The results of this rank's experts for their rows, which come in their order."""
        parts = rows_rd.split(list(counts))
        return torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])

    def _counted(self, mixed_nd: Tensor, routing: Routing, rows: Rows) -> Tensor:
        """The result, whose backward hands over counts and balance losses."""
        if not (torch.is_grad_enabled() or self.meter.when == "forward"):
            return mixed_nd
        counts_be = counts_by_row(routing, rows.rows, rows.counted_n)
        counts_e = counts_be.sum(dim=0) * self.reports
        if not torch.is_grad_enabled():
            self.meter.add(counts_e)
            return mixed_nd
        losses = balance_sum(
            routing, self.shape_of_mixture, counts_be, rows.counted_n, self.step_counts_e, self.over_sequence
        )
        return handed_over(mixed_nd, losses if self.reports else None, counts_e, self.meter)


RunHeld = Callable[[Tensor, tuple[int, ...]], Tensor]
"""(rows in the order of experts, rows of each) to their results."""
RunAll = Callable[[Tensor, tuple[int, ...], RunHeld], Tensor]
"""The same for all experts of a layer, given how those of this rank run."""


def run_here(rows_rd: Tensor, counts: tuple[int, ...], run_held: RunHeld) -> Tensor:
    """All experts are on this rank."""
    return run_held(rows_rd, counts)


def unchanged(values: Tensor) -> Tensor:
    """What one rank does where several would add up."""
    return values
