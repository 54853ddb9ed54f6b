"""A mixture of experts in place of a layer's feed-forward part; no token is dropped, unless a capacity asks for it.

Legend: n tokens, d numbers of the model's width, k experts of a token, r = n × k rows in the order of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.attention import Rows
from plait.model.experts.balance import LoadMeter, SumOverSequence, balance_sum, counts_by_row, handed_over
from plait.model.experts.capacity import RowSpans, kept_choices
from plait.model.experts.grouped import grouped_product
from plait.model.experts.router import Router, Routing
from plait.model.experts.sorting import from_experts, order_by_expert, to_experts
from plait.model.feedforward import FeedForward, activated
from plait.model.linear import to_compute_precision
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape


class Experts(nn.ModuleDict):
    """The routed experts of a layer that this rank holds, by their numbers; called as one, so that a strand may gather
    what they share out."""

    def forward(self, rows_rd: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The experts' results for their rows, which come in their order, `counts` of each."""
        experts = [one for one in self.values() if isinstance(one, FeedForward)]
        if not _multiply_plainly(experts, rows_rd):
            parts = rows_rd.split(list(counts))
            return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
        activation = experts[0].activation
        ups, downs = [one.up.weight for one in experts], [one.down.weight for one in experts]
        gates = [one.gate.weight for one in experts] if activation == "swiglu" else None
        gate_rf = None if gates is None else grouped_product(rows_rd, gates, counts)
        inner_rf = activated(activation, gate_rf, grouped_product(rows_rd, ups, counts))
        return grouped_product(inner_rf, downs, counts)


def _multiply_plainly(experts: Sequence[FeedForward], rows_rd: Tensor) -> bool:
    """Whether all their products may be one operation: a zero-bubble pipeline takes each by itself; and on processors
    autocast keeps the weights' casts of a step, which it makes itself."""
    cast = experts[0].up.weight.dtype != rows_rd.dtype and rows_rd.device.type == "cpu"
    return not cast and all(one.up.product is F.linear for one in experts)


class Mixture(nn.Module):
    """Routed experts, and shared ones that every token passes.

    Widths are read off the weights, so that a module that holds a part of each expert works as it stands. Strands
    replace `run_all`, which reaches the experts of other ranks; `finish`, what is done with the sum of all results
    (tensor parallelism adds up the ranks' parts); and `over_sequence`, which adds up counts over the ranks that have
    parts of the same rows, those at `spans`. `reports` is true on one of the ranks that see the same tokens: it answers
    for their counts and balance losses.
    """

    def __init__(self, shape: ModelShape, mixture: MixtureShape) -> None:
        super().__init__()
        self.shape_of_mixture = mixture
        self.router = Router(shape.width, mixture)
        numbers = range(mixture.experts)
        self.experts = Experts({str(number): FeedForward(shape, mixture.expert_ffn) for number in numbers})
        shared = shape.size_of("shared_ffn")
        self.shared = FeedForward(shape, shared) if shared else None
        self.meter = LoadMeter()
        self.step_counts_e: Tensor | None = None
        """The counts of the whole step, where a loss needs them before the first backward pass."""
        self.run_all: RunAll = run_here
        self.finish: Callable[[Tensor], Tensor] = unchanged
        self.over_sequence: SumOverSequence = unchanged
        self.spans = RowSpans()
        self.reports = True

    def forward(self, x_nd: Tensor, rows: Rows) -> Tensor:
        routing = self.router(x_nd, rows.numbers_n)
        kept_nk = self._kept(routing, rows)
        mixed_nd = self._mix(to_compute_precision(x_nd), routing, kept_nk)
        return self.finish(self._counted(mixed_nd, routing, kept_nk, rows))

    def _kept(self, routing: Routing, rows: Rows) -> Tensor | None:
        """Which choices find room; None: all, as where a text is written on, whose tokens come one by one."""
        if rows.cache is not None:
            return None
        return kept_choices(routing.chosen_nk, self.shape_of_mixture, rows.rows, self.spans, self.over_sequence)

    def _mix(self, x_nd: Tensor, routing: Routing, kept_nk: Tensor | None) -> Tensor:
        """Each token's chosen experts' results, weighted and added up, and those of the shared experts. An expert
        without tokens multiplies no rows, and so has a gradient, of zeros."""
        number, chosen_nk = self.shape_of_mixture.experts, routing.chosen_nk
        order = order_by_expert(chosen_nk if kept_nk is None else chosen_nk.masked_fill(~kept_nk, number), number)
        of_shared: list[Tensor] = []

        def meanwhile() -> None:
            of_shared.extend([self.shared(x_nd)] if self.shared is not None else [])

        results_rd = self.run_all(to_experts(x_nd, order), order.counts, self.experts, meanwhile)
        weighted_nkd = from_experts(results_rd, order) * routing.gates_nk.to(results_rd.dtype).unsqueeze(2)
        return sum(of_shared, weighted_nkd.sum(dim=1))

    def _counted(self, mixed_nd: Tensor, routing: Routing, kept_nk: Tensor | None, rows: Rows) -> Tensor:
        """The result, whose backward hands over counts and balance losses."""
        if not (torch.is_grad_enabled() or self.meter.when == "forward"):
            return mixed_nd
        counts_be = counts_by_row(routing, rows.rows, rows.counted_n)
        counts_e = counts_be.sum(dim=0) * self.reports
        if kept_nk is not None:
            lost_n = (~kept_nk).sum(dim=1) if rows.counted_n is None else (~kept_nk).sum(dim=1) * rows.counted_n
            counts_e = torch.cat([counts_e, lost_n.sum().to(counts_e).reshape(1) * self.reports])
        if not torch.is_grad_enabled():
            self.meter.add(counts_e)
            return mixed_nd
        losses = balance_sum(
            routing, self.shape_of_mixture, counts_be, rows.counted_n, self.step_counts_e, self.over_sequence
        )
        return handed_over(mixed_nd, losses if self.reports else None, counts_e, self.meter)


RunHeld = Callable[[Tensor, tuple[int, ...]], Tensor]
"""(rows in the order of experts, rows of each) to their results."""
RunAll = Callable[[Tensor, tuple[int, ...], RunHeld, Callable[[], None]], Tensor]
"""The same for all experts of a layer, given how those of this rank run, and what is to be done while rows travel: it
is called once."""


def run_here(rows_rd: Tensor, counts: tuple[int, ...], run_held: RunHeld, meanwhile: Callable[[], None]) -> Tensor:
    """All experts are on this rank."""
    meanwhile()
    return run_held(rows_rd, counts)


def unchanged(values: Tensor) -> Tensor:
    """What one rank does where several would add up."""
    return values
