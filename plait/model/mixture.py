"""A mixture of experts in place of a layer's feed-forward part; no token is dropped, unless a capacity asks for it.

Legend: n tokens, d numbers of the model's width, k experts of a token, r = n × k rows in the order of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.accelerator import is_compiled, suits_flash_kernels
from plait.model.attention import Rows
from plait.model.expert_blocks import (
    ExpertBlocks,
    block_product,
    blocks_by_expert,
    from_blocks,
    sum_of_earlier,
    to_blocks,
)
from plait.model.feedforward import FeedForward, activated
from plait.model.linear import Linear, to_compute_precision
from plait.model.parts.mixture import MixtureShape
from plait.model.router import LoadMeter, Router, Routing, SumOverSequence, balance_sum, counts_by_row, handed_over
from plait.model.shape import GATED, ModelShape


class Experts(nn.ModuleDict):
    """The routed experts of a layer that this rank holds, by their numbers; called as one, so that sharding may gather
    what they share out. `down_bias_share` is the part of the last biases that this rank adds: where ranks' results are
    added up, one adds them and the others none."""

    down_bias_share: float = 1.0

    def forward(self, rows_rd: Tensor, counts: tuple[int, ...] | ExpertBlocks) -> Tensor:
        """The experts' results for their rows, which come in their order, `counts` of each, or in blocks."""
        experts = [one for one in self.values() if isinstance(one, FeedForward)]
        share = self.down_bias_share
        if isinstance(counts, ExpertBlocks):
            return _results(experts, rows_rd, partial(block_product, blocks=counts), counts, share)
        if not _multiply_plainly(experts, rows_rd):
            parts = rows_rd.split(list(counts))
            return torch.cat([_result(expert, part, share) for expert, part in zip(experts, parts, strict=True)])
        return _results(experts, rows_rd, partial(grouped_product, counts=counts), counts, share)


def _result(expert: FeedForward, rows_rd: Tensor, down_bias_share: float) -> Tensor:
    """What one expert makes of its rows."""
    down = expert.down
    if down_bias_share == 1.0 or down.bias is None:
        return expert(rows_rd)
    return down.multiply(expert.inner(rows_rd), down.weight, down.bias * down_bias_share)


def _results(
    experts: Sequence[FeedForward],
    rows_rd: Tensor,
    product: Callable[..., Tensor],
    counts: tuple[int, ...] | ExpertBlocks,
    down_bias_share: float,
) -> Tensor:
    """What experts make of their rows, by a product of all their weights."""

    def layer(x_ri: Tensor, layers: Sequence[Linear], share: float = 1.0) -> Tensor:
        result_ro = product(x_ri, [one.weight for one in layers])
        biases = [one.bias for one in layers if one.bias is not None]
        return result_ro + _of_rows(biases, counts, result_ro) * share if biases else result_ro

    activation = experts[0].activation
    gate_rf = layer(rows_rd, [one.gate for one in experts]) if activation in GATED else None
    inner_rf = activated(activation, gate_rf, layer(rows_rd, [one.up for one in experts]))
    return layer(inner_rf, [one.down for one in experts], down_bias_share)


def _of_rows(biases: Sequence[Tensor], counts: tuple[int, ...] | ExpertBlocks, like_ro: Tensor) -> Tensor:
    """Each row's expert's bias, [r, o]."""
    cast = [bias.to(like_ro.dtype) for bias in biases]
    if isinstance(counts, ExpertBlocks):
        of_blocks_mo = torch.stack(cast).index_select(0, counts.expert_m)
        return of_blocks_mo.repeat_interleave(len(like_ro) // counts.number, dim=0)
    return torch.cat([bias.expand(rows, -1) for bias, rows in zip(cast, counts, strict=True)])


def _multiply_plainly(experts: Sequence[FeedForward], rows_rd: Tensor) -> bool:
    """Whether all their products may be one operation: a zero-bubble pipeline takes each by itself; and on processors
    autocast keeps the weights' casts of a step, which it makes itself."""
    cast = experts[0].up.weight.dtype != rows_rd.dtype and rows_rd.device.type == "cpu"
    return not cast and all(one.up.product is F.linear for one in experts)


class Mixture(nn.Module):
    """Routed experts, and shared ones that every token passes.

    Widths are read off the weights, so that a module that holds a part of each expert works as it stands. Parallelisms
    replace `run_all`, which reaches the experts of other ranks; `finish`, what is done with the sum of all results
    (tensor parallelism adds up the ranks' parts); and `over_sequence`, which adds up counts over the ranks that have
    parts of the same rows, those at `spans`. `reports` is true on one of the ranks that see the same tokens: it answers
    for their counts and balance losses.
    """

    def __init__(self, shape: ModelShape, mixture: MixtureShape) -> None:
        super().__init__()
        self.shape_of_mixture = mixture
        self.router = Router(shape.width, mixture)
        numbers, width = range(mixture.experts), mixture.expert_ffn
        self.experts = Experts({str(number): FeedForward(shape, width, biased=mixture.bias) for number in numbers})
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
        chosen_nk = chosen_nk if kept_nk is None else chosen_nk.masked_fill(~kept_nk, number)
        if is_compiled(x_nd.device):
            return self._mix_blocks(x_nd, routing, blocks_by_expert(chosen_nk, number))
        order = order_by_expert(chosen_nk, number)
        of_shared: list[Tensor] = []

        def meanwhile() -> None:
            of_shared.extend([self.shared(x_nd)] if self.shared is not None else [])

        results_rd = self.run_all(to_experts(x_nd, order), order.counts, self.experts, meanwhile)
        weighted_nkd = from_experts(results_rd, order) * routing.gates_nk.to(results_rd.dtype).unsqueeze(2)
        return sum(of_shared, weighted_nkd.sum(dim=1))

    def _mix_blocks(self, x_nd: Tensor, routing: Routing, blocks: ExpertBlocks) -> Tensor:
        """The same in shapes that stay. All experts are on this rank."""
        results_nkd = from_blocks(self.experts(to_blocks(x_nd, blocks), blocks), blocks)
        mixed_nd = (results_nkd * routing.gates_nk.to(results_nkd.dtype).unsqueeze(2)).sum(dim=1)
        return mixed_nd if self.shared is None else self.shared(x_nd) + mixed_nd

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
"""Runs all experts of a layer, given how this rank runs its own, and what is to be done while rows travel: it
is called once."""


def run_here(rows_rd: Tensor, counts: tuple[int, ...], run_held: RunHeld, meanwhile: Callable[[], None]) -> Tensor:
    """All experts are on this rank."""
    meanwhile()
    return run_held(rows_rd, counts)


def unchanged(values: Tensor) -> Tensor:
    """What one rank does where several would add up."""
    return values


# Products of several experts' weights with the rows of each, as one operation: one result, one gradient of the rows.
#
# Expert by expert through autograd, the results would be joined by a copy, the rows' gradients by another, and every
# product would be a node of the graph. A loop writes each product to its place; on GPUs in 16 bits torch's grouped
# kernel (`F.grouped_mm`) takes all of them in one launch.
#
# Legend: r rows in the order of experts, i numbers of an expert's input, o of its output, e experts.


KERNEL_ROW_BYTES = 16
"""Rows that the grouped kernel takes begin at multiples of this many bytes."""


def grouped_product(rows_ri: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Each expert's rows times its weight [o, i], transposed: [r, o], in the dtype of the rows. `counts` are the rows
    of each; an expert without rows gets a gradient of zeros."""
    cast = [weight.to(rows_ri.dtype) for weight in weights]
    if suits_kernel(rows_ri, cast[0]):
        ends_e = torch.tensor(counts, device=rows_ri.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(rows_ri, torch.stack(cast).transpose(1, 2), offs=ends_e)
    product_ro: Tensor = _product(rows_ri, cast, list(counts))
    return product_ro


def suits_kernel(rows_ri: Tensor, weight: Tensor) -> bool:
    """Whether the grouped kernel takes these rows, and is the faster way: on GPUs, in 16 bits."""
    aligned = all(size * rows_ri.element_size() % KERNEL_ROW_BYTES == 0 for size in weight.shape)
    return suits_flash_kernels(rows_ri) and aligned and len(rows_ri) > 0


@torch.library.custom_op("plait::grouped_product", mutates_args=())
def _product(rows_ri: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
    product_ro = rows_ri.new_empty(len(rows_ri), len(weights[0]))
    for weight, rows, place in zip(weights, rows_ri.split(counts), product_ro.split(counts), strict=True):
        torch.mm(rows, weight.T, out=place)
    return product_ro


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[int]], output: Tensor) -> None:
    rows_ri, weights, ctx.counts = inputs
    ctx.save_for_backward(rows_ri, *weights)


def _gradients(ctx: Any, grad_ro: Tensor) -> tuple[Tensor, list[Tensor], None]:
    rows_ri, *weights = ctx.saved_tensors
    grad_ro = grad_ro.contiguous()
    grad_ri = torch.empty_like(rows_ri)
    of_weights: list[Tensor] = []
    parts = (rows_ri.split(ctx.counts), grad_ro.split(ctx.counts), grad_ri.split(ctx.counts))
    for weight, rows, grad, place in zip(weights, *parts, strict=True):
        torch.mm(grad, weight, out=place)
        of_weights.append(grad.T @ rows)
    return grad_ri, of_weights, None


_product.register_autograd(_gradients, setup_context=_keep)


# Rows of tokens sorted by the expert that they go to, and back: gathers forward and backward, never a scatter.
#
# Legend: n tokens, k experts of a token, r = n × k rows in the order of experts, d numbers of a row.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOrder:
    """The order of (token, choice) pairs by expert, and within an expert by token."""

    choices: int
    """Experts of a token."""
    order_r: Tensor
    """The pair, token × choices + choice, that stands at each row."""
    places_r: Tensor
    """The row at which each pair stands: the inverse."""
    counts: tuple[int, ...]
    """Rows of each expert. Pairs of no expert stand behind them all, and have no rows."""

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return sum(self.counts)


def order_by_expert(chosen_nk: Tensor, experts: int) -> ExpertOrder:
    """The order of the tokens' choices, of which those of the number `experts` go nowhere; waits for the device, for
    whoever multiplies must know the counts."""
    flat_r = chosen_nk.flatten()
    order_r = flat_r.argsort(stable=True)
    places_r = torch.empty_like(order_r)
    places_r[order_r] = torch.arange(len(order_r), device=order_r.device)
    counts = torch.bincount(flat_r, minlength=experts)[:experts].tolist()
    return ExpertOrder(choices=chosen_nk.shape[1], order_r=order_r, places_r=places_r, counts=tuple(counts))


def to_experts(x_nd: Tensor, order: ExpertOrder) -> Tensor:
    """Each token once for each of its experts, in their order, [r, d]."""
    rows_rd: Tensor = _ToExperts.apply(x_nd, order)  # type: ignore[assignment]
    return rows_rd


def from_experts(rows_rd: Tensor, order: ExpertOrder) -> Tensor:
    """The experts' results in the order of the tokens, [n, k, d]; zeros where a pair went nowhere."""
    back_rd: Tensor = _FromExperts.apply(rows_rd, order)  # type: ignore[assignment]
    return back_rd.unflatten(0, (-1, order.choices))


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return x_nd.index_select(0, order.order_r[: order.rows] // order.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        order = ctx.order
        return _placed(grads[0], order).unflatten(0, (-1, order.choices)).sum(1), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_rd: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return _placed(rows_rd, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0].index_select(0, ctx.order.order_r[: ctx.order.rows]), None


def _placed(rows_rd: Tensor, order: ExpertOrder) -> Tensor:
    """Each pair's row, in the order of the pairs; zeros for those without."""
    if order.rows == len(order.places_r):
        return rows_rd.index_select(0, order.places_r)
    padded = torch.cat([rows_rd, rows_rd.new_zeros(1, rows_rd.shape[1])])
    return padded.index_select(0, order.places_r.clamp(max=order.rows))


# Which choices find their expert full, where a mixture has a capacity: those of the later tokens of a sequence.
#
# An expert takes capacity × T × K / E of the choices of each sequence of T tokens, rounded up, in the order of the
# tokens, and the rest are dropped: their results are zero, and nothing is computed. Unlike a limit on what a rank has
# at once (GShard, Switch, Megatron), it drops the same choices in any layout, with any accumulation.
#
# Legend: n tokens, k experts of a token, b rows of the batch, s spans of a row on this rank, e experts.


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpans:
    """Where a rank's tokens lie in the rows: the numbers of its spans, of this many equal ones of each row, in the
    order in which it holds them."""

    of: int = 1
    own: tuple[int, ...] = (0,)


def kept_choices(
    chosen_nk: Tensor, mixture: MixtureShape, rows: int, spans: RowSpans, over_sequence: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Which choices find room, [n, k]; None where the mixture has no capacity. `over_sequence` adds up a tensor over
    the ranks that have parts of the same rows, all of which must call."""
    if mixture.capacity is None:
        return None
    own, experts = len(spans.own), mixture.experts
    tokens = len(chosen_nk) // rows * spans.of // own
    limit = ceil(mixture.capacity * tokens * mixture.experts_per_token / experts)
    groups = rows * own * experts
    first_n = torch.arange(rows * own, device=chosen_nk.device).repeat_interleave(len(chosen_nk) // (rows * own))
    group_r = (first_n.unsqueeze(1) * experts + chosen_nk).flatten()
    counts = _counts(group_r, groups)
    order_r = group_r.argsort(stable=True)
    place_r = torch.empty_like(order_r)
    place_r[order_r] = torch.arange(len(order_r), device=order_r.device)
    place_r -= _earlier(counts, 0)[group_r]
    before_bse = _in_earlier_spans(counts.view(rows, own, experts), spans, over_sequence)
    return (place_r + before_bse.flatten()[group_r] < limit).view_as(chosen_nk)


def _counts(group_r: Tensor, groups: int) -> Tensor:
    """How often each number below `groups` occurs."""
    if is_compiled(group_r.device):  # bincount's result has no shape that is known beforehand
        return torch.zeros(groups, dtype=torch.int64, device=group_r.device).scatter_add_(
            0, group_r, torch.ones_like(group_r)
        )
    return torch.bincount(group_r, minlength=groups)


def _in_earlier_spans(counts_bse: Tensor, spans: RowSpans, over_sequence: Callable[[Tensor], Tensor]) -> Tensor:
    """How many choices of the same row and expert come before each span of this rank."""
    rows, _, experts = counts_bse.shape
    every = torch.zeros(rows, spans.of, experts, dtype=torch.float64, device=counts_bse.device)
    every[:, list(spans.own)] = counts_bse.double()
    every = over_sequence(every)
    return _earlier(every, 1)[:, list(spans.own)].to(counts_bse.dtype)


def _earlier(counts: Tensor, dim: int) -> Tensor:
    return sum_of_earlier(counts, dim) if is_compiled(counts.device) else counts.cumsum(dim) - counts
