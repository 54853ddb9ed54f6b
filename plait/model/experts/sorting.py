"""Rows of tokens sorted by the expert that they go to, and back: gathers forward and backward, never a scatter.

Legend: n tokens, k experts of a token, r = n × k rows in the order of experts, d numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
