"""What a plan says of a mixture of experts: what a token meets, and what keeps the experts equally busy."""

from __future__ import annotations

from plait.model.parts.mixture import BalanceRule
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import active_parameter_count
from plait.units import counted, format_count

LOSSES_IN_WORDS: dict[BalanceRule, str] = {
    "sequence": "over each sequence (DeepSeek-V3)",
    "global": "over all tokens of a step (Qiu 2025)",
    "switch": "over all tokens of a step, not divided by the experts of a token (Switch, as transformers has it)",
}


def mixture_reasons(shape: ModelShape) -> list[str]:
    """The sentences on a shape's experts; empty where it has none."""
    mixture = shape.mixture
    if mixture is None:
        return []
    layers = sum(mixture.holds(layer) for layer in range(shape.layers))
    shared = f" and {mixture.shared_experts} that all pass" if mixture.shared_experts else ""
    dropped = (
        "no token is dropped"
        if mixture.capacity is None
        else f"of each sequence an expert takes at most {mixture.capacity:g} × its even share, and the rest is dropped "
        "(model.expert_capacity)"
    )
    lines = [
        f"a token meets {format_count(active_parameter_count(shape))} of {format_count(parameter_count(shape))} "
        f"parameters: {mixture.experts_per_token} of {mixture.experts} experts{shared} in {counted(layers, 'layer')}; "
        f"{dropped}"
    ]
    if mixture.has_bias:
        lines.append(
            f"experts stay equally busy by a bias of choices that moves by {mixture.balance_rate:g} a step, by the "
            "tokens of all workers (Wang 2024); no pipeline changes that"
        )
    lines += [
        f"a loss of weight {weight:g} spreads tokens {LOSSES_IN_WORDS[rule]}"
        for rule, weight in mixture.loss_weights.items()
    ]
    if mixture.counts_first:
        lines.append(
            "each step begins with a forward pass that counts its tokens by expert, so that this loss is exact in any "
            "layout: about a third more work, which the forecast leaves out"
        )
    return lines
