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
    """Rows of each expert."""


def order_by_expert(chosen_nk: Tensor, experts: int) -> ExpertOrder:
    """The order of the tokens' choices; waits for the device, for whoever multiplies must know the counts."""
    flat_r = chosen_nk.flatten()
    order_r = flat_r.argsort(stable=True)
    places_r = torch.empty_like(order_r)
    places_r[order_r] = torch.arange(len(order_r), device=order_r.device)
    counts = torch.bincount(flat_r, minlength=experts).tolist()
    return ExpertOrder(choices=chosen_nk.shape[1], order_r=order_r, places_r=places_r, counts=tuple(counts))


def to_experts(x_nd: Tensor, order: ExpertOrder) -> Tensor:
    """Each token once for each of its experts, in their order, [r, d]."""
    rows_rd: Tensor = _ToExperts.apply(x_nd, order)  # type: ignore[assignment]
    return rows_rd


def from_experts(rows_rd: Tensor, order: ExpertOrder) -> Tensor:
    """The experts' results in the order of the tokens, [n, k, d]."""
    back_rd: Tensor = _FromExperts.apply(rows_rd, order)  # type: ignore[assignment]
    return back_rd.unflatten(0, (-1, order.choices))


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return x_nd.index_select(0, order.order_r // order.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        order = ctx.order
        return grads[0].index_select(0, order.places_r).unflatten(0, (-1, order.choices)).sum(1), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_rd: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return rows_rd.index_select(0, order.places_r)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0].index_select(0, ctx.order.order_r), None
