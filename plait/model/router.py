"""Which experts a token goes to, and with which weights: the mathematics of routing, in float32 at least.

Legend: n tokens, d numbers of the model's width, e experts, k of them for a token, g groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.model.parts.mixture import MixtureShape

GATE_EPS = 1e-20
"""Added to the sum that weights are divided by: DeepSeek-V3's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where some tokens go."""

    logits_ne: Tensor
    scores_ne: Tensor
    chosen_nk: Tensor
    gates_nk: Tensor
    """The weight of each chosen expert's result."""


Choose = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(what experts are chosen by [n, e], the best ones by it [n, k], the tokens' numbers in the run [n]) to the experts
that the tokens go to, [n, k]."""


class Router(nn.Module):
    """Scores each expert for each token, by one product; its bias, if the mixture has one, moves choices alone.

    `choose` may be set to one that lets tokens go where they went in another run.
    """

    balance: Tensor

    def __init__(self, width: int, mixture: MixtureShape) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, width))
        self.bias = nn.Parameter(torch.empty(mixture.experts)) if mixture.bias else None
        self.register_buffer("balance", torch.zeros(mixture.experts), persistent=False)
        self.choose: Choose | None = None

    def forward(self, x_nd: Tensor, numbers_n: Tensor | None = None) -> Routing:
        """Where tokens go; `numbers_n` are needed where `choose` is set."""
        exact = torch.promote_types(x_nd.dtype, torch.float32)
        with torch.autocast(x_nd.device.type, enabled=False):
            bias_e = None if self.bias is None else self.bias.to(exact)
            logits_ne = F.linear(x_nd.to(exact), self.weight.to(exact), bias_e)
            return route(logits_ne, self.balance.to(exact), self.mixture, self._taken(numbers_n))

    def _taken(self, numbers_n: Tensor | None) -> Taken | None:
        choose = self.choose
        if choose is None:
            return None
        assert numbers_n is not None, "a token's number says where it went in another run"
        return lambda choice_ne, best_nk: choose(choice_ne, best_nk, numbers_n)


Taken = Callable[[Tensor, Tensor], Tensor]
"""A Choose of certain tokens."""


def route(logits_ne: Tensor, balance_e: Tensor, mixture: MixtureShape, taken: Taken | None = None) -> Routing:
    """The experts and weights of tokens with these logits: DeepSeek-V3's routing (2412.19437, section 2.1.2), of which
    those of Mixtral, Qwen3-MoE and OLMoE are points. Differentiable in the logits, through the weights."""
    scores_ne = logits_ne.sigmoid() if mixture.router == "sigmoid" else logits_ne.softmax(dim=1)
    choice_ne = scores_ne.detach() + balance_e
    chosen_nk = best_experts(choice_ne, mixture)
    if taken is not None:
        chosen_nk = taken(choice_ne, chosen_nk)
    gates_nk = scores_ne.gather(1, chosen_nk)
    if mixture.normalize:
        gates_nk = gates_nk / (gates_nk.sum(dim=1, keepdim=True) + GATE_EPS)
    return Routing(logits_ne=logits_ne, scores_ne=scores_ne, chosen_nk=chosen_nk, gates_nk=gates_nk * mixture.scale)


def best_experts(choice_ne: Tensor, mixture: MixtureShape) -> Tensor:
    """The experts of each token by these scores, [n, k], the best first."""
    if mixture.groups_chosen < mixture.groups:
        best_ng = group_scores(choice_ne, mixture)
        open_n = best_ng.topk(mixture.groups_chosen, dim=1).indices
        closed_ng = torch.ones_like(best_ng, dtype=torch.bool).scatter_(1, open_n, value=False)
        grouped = choice_ne.unflatten(1, (mixture.groups, -1))
        choice_ne = grouped.masked_fill(closed_ng.unsqueeze(2), float("-inf")).flatten(1)
    return choice_ne.topk(mixture.experts_per_token, dim=1).indices


def group_scores(choice_ne: Tensor, mixture: MixtureShape) -> Tensor:
    """What groups of experts are chosen by, [n, groups]."""
    counted = 2 if mixture.group_score == "two best" else 1
    return choice_ne.unflatten(1, (mixture.groups, -1)).topk(counted, dim=2).values.sum(dim=2)


# What keeps experts equally busy: losses whose gradients enter where the router is, and the counts of a step.
#
# Note [balance losses]: with f_i = E / (K T) × the number of the T tokens that chose expert i, and P_i the mean of its
# scores, each token's scores divided by their sum, a loss is weight × Σ f_i P_i.
#
# - "sequence" (DeepSeek-V3): over each row of a batch by itself; the loss of a row of T counted tokens counts T times.
# - "global" (Qiu et al. 2025, 2501.11873): over all tokens of a step, on all ranks and in all micro-batches.
# - "switch" (Fedus et al. 2021): the same, with f_i not divided by K, as transformers has it for Mixtral.
#
# Like the cross-entropy they are sums over tokens, divided once by the step's number of counted tokens; the loss that
# is reported is the cross-entropy alone. f has no gradient. Only tokens that enter the loss count.
#
# Note [counted in backward]: a micro-batch passes backward once, also where its forward is computed again, or runs for
# an evaluation, or where a pipeline takes its parts in turn. So losses and counts are handed over there, by a function
# that is the identity forward: nothing has to cross the stages of a pipeline.
#
# Legend: n tokens, b rows of a batch, e experts, k of them for a token.


SumOverSequence = Callable[[Tensor], Tensor]
"""Adds up a tensor over the ranks that have parts of the same rows; no gradient passes."""


class LoadMeter:
    """Counts one layer's tokens by expert, in float64, over the micro-batches of a step; where the mixture has a
    capacity, one more count is that of the choices that found no room."""

    def __init__(self) -> None:
        self.when: Literal["backward", "forward"] = "backward"
        """"forward" while a pass without gradients counts, for losses that need the whole step's counts."""
        self.loss_scale: Callable[[], Tensor] | None = None
        """The loss scale that the gradients of this layer's losses are multiplied by; None in runs without one."""
        self._total: Tensor | None = None

    def add(self, counts: Tensor) -> None:
        """Add a micro-batch's counts."""
        self._total = counts.clone() if self._total is None else self._total + counts

    def take(self) -> Tensor | None:
        """The counts since the last call, None where nothing was counted."""
        total, self._total = self._total, None
        return total


def counts_by_row(routing: Routing, rows: int, counted_n: Tensor | None) -> Tensor:
    """How many of each row's counted tokens chose each expert, [b, e] in float64."""
    experts = routing.scores_ne.shape[1]
    chosen_bk = routing.chosen_nk.reshape(rows, -1)
    ones = torch.ones(chosen_bk.shape, dtype=torch.float64, device=chosen_bk.device)
    if counted_n is not None:
        ones = counted_n.double().view(rows, -1, 1).expand(-1, -1, routing.chosen_nk.shape[1]).reshape(rows, -1)
    return torch.zeros(rows, experts, dtype=torch.float64, device=chosen_bk.device).scatter_add_(1, chosen_bk, ones)


def balance_sum(
    routing: Routing,
    mixture: MixtureShape,
    counts_be: Tensor,
    counted_n: Tensor | None,
    step_counts_e: Tensor | None,
    over_sequence: SumOverSequence,
) -> Tensor | None:
    """The sum of a micro-batch's balance losses and z-losses, a scalar with gradients; None where there are none.

    See Note [balance losses]. `step_counts_e` are the counts of the whole step, where `mixture.counts_first`.
    """
    total: Tensor | None = None
    weights = mixture.loss_weights
    if weights:
        shares_be = _summed_shares(routing, len(counts_be), counted_n)
        for rule, weight in weights.items():
            busy = _busy(rule, counts_be, step_counts_e, over_sequence).to(shares_be.dtype)
            factor = weight * mixture.experts * (mixture.experts_per_token if rule == "switch" else 1)
            one = factor * (busy * shares_be).sum()
            total = one if total is None else total + one
    if mixture.z_weight:
        squares_n = routing.logits_ne.logsumexp(dim=1).square()
        z = mixture.z_weight * (squares_n if counted_n is None else squares_n * counted_n).sum()
        total = z if total is None else total + z
    return total


def _summed_shares(routing: Routing, rows: int, counted_n: Tensor | None) -> Tensor:
    """Each row's sum over its counted tokens of their scores, divided by their sum, [b, e]."""
    shares_ne = routing.scores_ne / routing.scores_ne.sum(dim=1, keepdim=True)
    if counted_n is not None:
        shares_ne = shares_ne * counted_n.unsqueeze(1)
    return shares_ne.unflatten(0, (rows, -1)).sum(dim=1)


def _busy(rule: str, counts_be: Tensor, step_counts_e: Tensor | None, over_sequence: SumOverSequence) -> Tensor:
    """Share of each row's choices that went to each expert: f / E, [b or 1, e]."""
    if rule == "sequence":
        whole_be = over_sequence(counts_be)
        return whole_be / whole_be.sum(dim=1, keepdim=True).clamp(min=1)
    assert step_counts_e is not None, "this loss needs the counts of the whole step"
    return (step_counts_e / step_counts_e.sum().clamp(min=1)).unsqueeze(0)


def handed_over(result_nd: Tensor, loss_sum: Tensor | None, counts: Tensor, meter: LoadMeter) -> Tensor:
    """The result itself, whose backward adds the loss to what is differentiated, and the counts to the meter: Note
    [counted in backward]."""
    same_nd: Tensor = _HandedOver.apply(result_nd, loss_sum, counts, meter)  # type: ignore[assignment]
    return same_nd


class _HandedOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result_nd: Tensor, loss_sum: Tensor | None, counts: Tensor, meter: LoadMeter) -> Tensor:
        ctx.like = None if loss_sum is None else loss_sum.detach()
        ctx.counts, ctx.meter = counts, meter
        return result_nd.view_as(result_nd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.meter.add(ctx.counts)
        like, scale = None if ctx.like is None else torch.ones_like(ctx.like), ctx.meter.loss_scale
        if like is not None and scale is not None:
            like = like * scale().to(like.dtype)
        return grads[0], like, None, None
