"""A plan's words about a model: its experts, how they are balanced, and its objectives in addition to the next
token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.model.parts.mixture import BalanceRule
from plait.model.parts.objectives import NO_OBJECTIVES
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


def objective_reasons(shape: ModelShape) -> list[str]:
    """The choices about auxiliary objectives, each with its reason; empty where there are none."""
    objectives, reasons = shape.objectives, list[str]()
    if objectives.heads:
        weights = " and ".join(f"{weight:g}" for weight in dict.fromkeys(objectives.head_weights))
        reasons.append(
            f"heads after {_listed(objectives.heads)} layers, their losses × {weights}: each has a norm of its own and "
            "the model's output matrix (LayerSkip, Elhoushi 2024), so that the middle learns what the end will say"
        )
    if objectives.ahead:
        more = parameter_count(shape) - parameter_count(replace(shape, objectives=replace(objectives, ahead=0)))
        reasons.append(
            f"{counted(objectives.ahead, 'token')} predicted beyond the next, the mean of their losses × "
            f"{objectives.ahead_weight:g}: DeepSeek-V3's modules, {format_count(more)} parameters that sampling and "
            "exports leave out"
        )
    return reasons


def objectives_text(shape: ModelShape) -> str:
    """The auxiliary objectives in a line about the model, empty where there are none."""
    heads, ahead = shape.objectives.heads, shape.objectives.ahead
    parts = [f"heads after {_listed(heads)} layers"] if heads else []
    parts += [f"predicts {counted(ahead, 'token')} further"] if ahead else []
    return "".join(f"; {part}" for part in parts)


def without_objectives(shape: ModelShape) -> ModelShape:
    """The model itself, as it is sampled and exported."""
    return replace(shape, objectives=NO_OBJECTIVES)


def objectives_left_out(shape: ModelShape) -> str:
    """The parts that an export of the model leaves out, as the end of a line; empty if none."""
    heads, ahead = shape.objectives.heads, shape.objectives.ahead
    parts = [f"the norms of the heads after {_listed(heads)} layers"] if heads else []
    parts += [f"the {counted(ahead, 'module')} for prediction ahead"] if ahead else []
    return f" (left out, for no family has them: {' and '.join(parts)})" if parts else ""


def _listed(heads: Sequence[int]) -> str:
    return " and ".join(map(str, heads))
