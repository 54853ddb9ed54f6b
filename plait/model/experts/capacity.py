"""Which choices find their expert full, where a mixture has a capacity: those of the later tokens of a sequence.

An expert takes capacity × T × K / E of the choices of each sequence of T tokens, rounded up, in the order of the
tokens, and the rest are dropped: their results are zero, and nothing is computed. Unlike a limit on what a rank has at
once (GShard, Switch, Megatron), it drops the same choices in any layout, with any accumulation.

Legend: n tokens, k experts of a token, b rows of the batch, s spans of a row on this rank, e experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from plait.model.parts.mixture import MixtureShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpans:
    """Where a rank's tokens lie in the rows: the numbers of its spans, of so many equal ones of each row, in the order
    in which it holds them."""

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
    counts = torch.bincount(group_r, minlength=groups)
    order_r = group_r.argsort(stable=True)
    place_r = torch.empty_like(order_r)
    place_r[order_r] = torch.arange(len(order_r), device=order_r.device)
    place_r -= (counts.cumsum(0) - counts)[group_r]
    before_bse = _in_earlier_spans(counts.view(rows, own, experts), spans, over_sequence)
    return (place_r + before_bse.flatten()[group_r] < limit).view_as(chosen_nk)


def _in_earlier_spans(counts_bse: Tensor, spans: RowSpans, over_sequence: Callable[[Tensor], Tensor]) -> Tensor:
    """How many choices of the same row and expert come before each span of this rank."""
    rows, _, experts = counts_bse.shape
    every = torch.zeros(rows, spans.of, experts, dtype=torch.float64, device=counts_bse.device)
    every[:, list(spans.own)] = counts_bse.double()
    every = over_sequence(every)
    return (every.cumsum(1) - every)[:, list(spans.own)].to(counts_bse.dtype)
