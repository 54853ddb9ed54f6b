"""Which experts a token goes to, and with which weights: the mathematics of routing, in float32 at least.

Legend: n tokens, d numbers of the model's width, e experts, k of them for a token, g groups.
"""

from __future__ import annotations

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


class Router(nn.Module):
    """Scores each expert for each token, by one product; its bias, if the mixture has one, moves choices alone."""

    balance: Tensor

    def __init__(self, width: int, mixture: MixtureShape) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, width))
        self.register_buffer("balance", torch.zeros(mixture.experts), persistent=False)

    def forward(self, x_nd: Tensor) -> Routing:
        exact = torch.promote_types(x_nd.dtype, torch.float32)
        with torch.autocast(x_nd.device.type, enabled=False):
            logits_ne = F.linear(x_nd.to(exact), self.weight.to(exact))
            return route(logits_ne, self.balance.to(exact), self.mixture)


def route(logits_ne: Tensor, balance_e: Tensor, mixture: MixtureShape) -> Routing:
    """The experts and weights of tokens with these logits: DeepSeek-V3's routing (2412.19437, section 2.1.2), of which
    those of Mixtral, Qwen3-MoE and OLMoE are points. Differentiable in the logits, through the weights."""
    scores_ne = logits_ne.sigmoid() if mixture.router == "sigmoid" else logits_ne.softmax(dim=1)
    open_ne = _without_closed_groups(scores_ne.detach() + balance_e, mixture)
    chosen_nk = open_ne.topk(mixture.experts_per_token, dim=1).indices
    gates_nk = scores_ne.gather(1, chosen_nk)
    if mixture.normalize:
        gates_nk = gates_nk / (gates_nk.sum(dim=1, keepdim=True) + GATE_EPS)
    return Routing(logits_ne=logits_ne, scores_ne=scores_ne, chosen_nk=chosen_nk, gates_nk=gates_nk * mixture.scale)


def _without_closed_groups(choice_ne: Tensor, mixture: MixtureShape) -> Tensor:
    """The scores with those of experts in closed groups at minus infinity."""
    if mixture.groups_chosen == mixture.groups:
        return choice_ne
    grouped = choice_ne.unflatten(1, (mixture.groups, -1))
    best_ng = grouped.topk(2, dim=2).values.sum(dim=2)
    open_n = best_ng.topk(mixture.groups_chosen, dim=1).indices
    closed_ng = torch.ones_like(best_ng, dtype=torch.bool).scatter_(1, open_n, value=False)
    return grouped.masked_fill(closed_ng.unsqueeze(2), float("-inf")).flatten(1)
