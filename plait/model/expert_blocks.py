"""Experts' products in shapes that do not depend on the routing, for devices that compile operations for each shape.

Each expert's rows are padded to whole blocks of one size. How many blocks there can be is known beforehand, so every
block multiplies, the last ones rows of zeros; which expert's weights a block takes is a number in a tensor. No choice
is dropped, and the host waits for no count.

Legend: n tokens, k experts of a token, p = n × k pairs of a token and a choice, e experts, m blocks of b rows, d
numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS_OF_EXPERT = 4
"""Blocks of an expert's mean number of rows. More of them multiply fewer rows of zeros (about half a block for each
expert) and copy the weights more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlocks:
    """The pairs in each row of the blocks, and the expert whose weights each block uses."""

    choices: int
    """Experts of a token."""
    expert_m: Tensor
    pair_r: Tensor
    """The pair in each of the m × b rows; the number of pairs where there is none."""
    row_p: Tensor
    """The row of each pair; the number of rows where it goes nowhere."""

    @property
    def number(self) -> int:
        """Blocks."""
        return len(self.expert_m)


def block_rows(pairs: int, experts: int) -> int:
    """Rows of a block."""
    return max(1, pairs // (ROWS_OF_EXPERT * experts))


def blocks_by_expert(chosen_nk: Tensor, experts: int) -> ExpertBlocks:
    """The blocks of the tokens' choices, without dropped ones, numbered `experts`. Never waits for the device."""
    expert_p = chosen_nk.flatten()
    rows = block_rows(len(expert_p), experts)
    number = len(expert_p) // rows + experts
    every_e = torch.arange(experts, device=expert_p.device)
    size_e = (expert_p.unsqueeze(1) == every_e).sum(dim=0)
    first_e = sum_of_earlier(size_e, 0)  # in the order by expert
    blocks_e = (size_e + rows - 1) // rows
    before_e = sum_of_earlier(blocks_e, 0)
    end_e, begin_e = before_e + blocks_e, before_e * rows
    order_p = expert_p.argsort(stable=True)
    expert_m = (torch.arange(number, device=expert_p.device).unsqueeze(1) >= end_e).sum(dim=1).clamp(max=experts - 1)
    expert_r = expert_m.repeat_interleave(rows)
    within_r = torch.arange(number * rows, device=expert_p.device) - begin_e[expert_r]
    filled_r = within_r < size_e[expert_r]
    place_r = torch.where(filled_r, first_e[expert_r] + within_r, 0)
    nowhere = expert_p == experts
    known_p = expert_p.clamp(max=experts - 1)
    place_p = order_p.argsort()
    row_p = torch.where(nowhere, number * rows, begin_e[known_p] + place_p - first_e[known_p])
    return ExpertBlocks(
        choices=chosen_nk.shape[1],
        expert_m=expert_m,
        pair_r=torch.where(filled_r, order_p[place_r], len(expert_p)),
        row_p=row_p,
    )


def sum_of_earlier(counts: Tensor, dim: int) -> Tensor:
    """The sum of what stands before each entry along a dim. By comparison: XLA's plugin for processors has no scan."""
    place = torch.arange(counts.shape[dim], device=counts.device)
    of_earlier = counts.movedim(dim, -1).unsqueeze(-2) * (place < place.unsqueeze(1))
    return of_earlier.sum(dim=-1).movedim(-1, dim)


def to_blocks(x_nd: Tensor, blocks: ExpertBlocks) -> Tensor:
    """Each token once for each of its experts, in its place, and zeros: [m × b, d]."""
    rows_rd: Tensor = _ToBlocks.apply(x_nd, blocks)  # type: ignore[assignment]
    return rows_rd


def from_blocks(rows_rd: Tensor, blocks: ExpertBlocks) -> Tensor:
    """The results in the order of the tokens, [n, k, d]; zeros where a choice went nowhere."""
    back_pd: Tensor = _FromBlocks.apply(rows_rd, blocks)  # type: ignore[assignment]
    return back_pd.unflatten(0, (-1, blocks.choices))


def block_product(rows_ri: Tensor, weights: Sequence[Tensor], blocks: ExpertBlocks) -> Tensor:
    """Each block times its expert's weight [o, i], transposed: [m × b, o], in the dtype of the rows."""
    of_blocks_moi = torch.stack([weight.to(rows_ri.dtype) for weight in weights]).index_select(0, blocks.expert_m)
    return torch.bmm(rows_ri.unflatten(0, (blocks.number, -1)), of_blocks_moi.transpose(1, 2)).flatten(0, 1)


def _picked(rows: Tensor, numbers: Tensor) -> Tensor:
    """The rows of these numbers; zeros for the number behind the last."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).index_select(0, numbers)


class _ToBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, blocks: ExpertBlocks) -> Tensor:
        ctx.blocks = blocks
        return _picked(x_nd, blocks.pair_r // blocks.choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        of_pairs = _picked(grads[0], ctx.blocks.row_p)
        return of_pairs.unflatten(0, (-1, ctx.blocks.choices)).sum(1), None


class _FromBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_rd: Tensor, blocks: ExpertBlocks) -> Tensor:
        ctx.blocks = blocks
        return _picked(rows_rd, blocks.row_p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _picked(grads[0], ctx.blocks.pair_r), None
