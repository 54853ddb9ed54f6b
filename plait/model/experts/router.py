"""Which experts a token goes to, and with which weights: the mathematics of routing, in float32 at least.

Legend: n tokens, d numbers of the model's width, e experts, k of them for a token, g groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        self.register_buffer("balance", torch.zeros(mixture.experts), persistent=False)
        self.choose: Choose | None = None

    def forward(self, x_nd: Tensor, numbers_n: Tensor | None = None) -> Routing:
        """Where tokens go; `numbers_n` are needed where `choose` is set."""
        exact = torch.promote_types(x_nd.dtype, torch.float32)
        with torch.autocast(x_nd.device.type, enabled=False):
            logits_ne = F.linear(x_nd.to(exact), self.weight.to(exact))
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
    """What groups of experts are chosen by, [n, groups]: the sum of a group's two best scores."""
    return choice_ne.unflatten(1, (mixture.groups, -1)).topk(2, dim=2).values.sum(dim=2)
