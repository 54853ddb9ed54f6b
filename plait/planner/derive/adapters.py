"""Which adapters a run trains beside frozen weights: targets, rank and alpha, each with its reason."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from plait.errors import PlaitError
from plait.model.adapter_shape import (
    BLOCK,
    QUANTIZED_BLOCK_BYTES,
    AdapterShape,
    AdapterTarget,
    Quantization,
    SavedModule,
)
from plait.model.names import within_layer
from plait.model.shape import ModelShape, linear_layers, linear_layers_in, parameter_count
from plait.model.weights import describe_weights, is_quantized, trained_parameter_count
from plait.planner.derive.derived import Derived
from plait.planner.derive.published_rules import (
    BITS_PER_WEIGHT,
    LARGEST_RANK,
    LEAST_RANK,
    USUAL_ALPHA,
    rank_for_tokens,
)
from plait.recipe.finetune import FinetuneSection
from plait.recipe.schema import RunConfig
from plait.units import format_bytes, format_count

PEFT_NAMES: dict[str, tuple[AdapterTarget, ...]] = {
    "q_proj": ("attention.q",),
    "k_proj": ("attention.k",),
    "v_proj": ("attention.v",),
    "o_proj": ("attention.o",),
    "gate_proj": ("feedforward.gate",),
    "up_proj": ("feedforward.up",),
    "down_proj": ("feedforward.down",),
    "c_attn": ("attention.q", "attention.k", "attention.v"),
    "c_fc": ("feedforward.up",),
    "c_proj": ("attention.o", "feedforward.down"),
}
"""What PEFT's users call the linear layers of Llama's and GPT-2's kind."""
_TABLE_NAMES: dict[str, SavedModule] = {
    "embed_tokens": "embedding",
    "wte": "embedding",
    "embedding": "embedding",
    "lm_head": "head",
    "head": "head",
}


def refuse_pairs(config: RunConfig, shape: ModelShape) -> None:
    """Raise PlaitError where a model cannot learn from pairs of answers."""
    if config.finetune.learns_pairs and shape.mixture is not None:
        raise PlaitError(
            "pairs of answers are not learned from by a mixture of experts: the losses that balance its experts are "
            "means over tokens, and that of pairs is one over pairs; choose a model without experts, or take "
            "finetune.objective out"
        )


def adapter_for(requested: FinetuneSection, shape: ModelShape, bits: int) -> Derived[AdapterShape]:
    """The adapters of a LoRA run for a model that has none yet, to learn from this many tokens, or pairs of answers,
    which tell about a bit each; raises PlaitError for models that cannot have adapters, for targets that match nothing
    and for a rank above a weight's size."""
    targets = linear_layers(shape) if requested.targets == "auto" else named_targets(requested.targets, shape)
    replace(shape, adapter=AdapterShape(rank=1, alpha=1.0, targets=targets))  # its checks come before the rank's
    rank = _rank(requested, shape, targets, bits)
    kept: Quantization = requested.quantization if requested.method == "qlora" else "none"
    alpha = USUAL_ALPHA[requested.variant] if requested.alpha == "auto" else requested.alpha
    saved = saved_modules(requested.modules_to_save, shape)
    adapter = AdapterShape(
        rank=rank,
        alpha=alpha,
        targets=targets,
        variant=requested.variant,
        quantization=kept,
        modules_to_save=saved,
        dropout=requested.dropout,
    )
    whole = replace(shape, adapter=adapter)
    some = "all linear layers" if requested.targets == "auto" else ", ".join(targets)
    learning, all_weights = (format_count(count(whole)) for count in (trained_parameter_count, parameter_count))
    why = [
        f"{requested.variant} of rank {rank} on {some}: {learning} of {all_weights} weights learn; the others have no "
        "gradient, sums or moments, and their products are two thirds of a step's in place of all"
    ]
    if shape.delta is not None and any(one.startswith("attention.") for one in targets):
        why.append(f"the {len(shape.delta.layers)} layers with linear attention have no adapters in their attention")
    if saved:
        why.append(_saved_reason(saved, whole))
    if kept != "none":
        why.append(_quantized_reason(whole, kept))
    if requested.rank == "auto":
        why.append(
            f"rank {rank}: adapters hold {BITS_PER_WEIGHT} bits a weight, and there are about "
            f"{format_count(bits)} {'tokens' if requested.objective == 'sft' else 'pairs'} of a bit each "
            f"({LEAST_RANK} to {LARGEST_RANK}; Schulman 2025, Biderman 2024)"
        )
    if requested.alpha == "auto":
        source = "Schulman 2025" if requested.variant == "lora" else "Kalajdzievski 2023, as LoRA's at rank 16"
        why.append(f"alpha {alpha:g}: adapters count {adapter.scale:.3g} times ({source})")
    return Derived(value=adapter, reasons=tuple(why))


def _saved_reason(saved: Sequence[SavedModule], shape: ModelShape) -> str:
    numbers = format_count(len(saved) * shape.vocabulary * shape.width)
    tied = ", which is the head as well" if shape.tied else ""
    return f"{' and '.join(saved)}{tied}: trained whole, {numbers} weights with gradient and moments (modules_to_save)"


def saved_modules(names: Sequence[str], shape: ModelShape) -> tuple[SavedModule, ...]:
    """The tables that these names mean (PEFT's, or ours), each once; a tied head is the embedding. Raises PlaitError
    for a name of anything else."""
    for name in names:
        if name not in _TABLE_NAMES:
            raise PlaitError(
                f'finetune.modules_to_save: "{name}" is not a table of the vocabulary; choose among '
                "embed_tokens and lm_head, as all other weights stay frozen or have adapters"
            )
    named = {_TABLE_NAMES[name] for name in names}
    if shape.tied and named:
        return ("embedding",)
    return tuple(one for one in get_args(SavedModule) if one in named)


def _quantized_reason(shape: ModelShape, kept: Quantization) -> str:
    numbers = sum(one.numbers for name, one in describe_weights(shape).items() if is_quantized(name, shape))
    each = QUANTIZED_BLOCK_BYTES[kept] / BLOCK
    return (
        f"frozen matrices in {kept}: {each * 8:.2f} bits a number, {format_bytes(each * numbers)} in place of "
        f"{format_bytes(2 * numbers)} in 16 bits; each product reads its matrix from them (Dettmers 2023)"
    )


def named_targets(names: Sequence[str], shape: ModelShape) -> tuple[AdapterTarget, ...]:
    """The linear layers that these names mean, in the model's order: our names ("attention.q", "q"), a whole part
    ("attention"), or PEFT's ("q_proj", "all-linear").

    Raises PlaitError, naming the nearest, for a name that means none.
    """
    meanings = _meanings(shape)
    found: set[AdapterTarget] = set()
    for name in names:
        if name not in meanings:
            near = difflib.get_close_matches(name, meanings, n=1, cutoff=0.0)
            raise PlaitError(
                f'finetune.targets: "{name}" matches no linear layer of this model; did you mean "{near[0]}"? '
                f"There are {', '.join(linear_layers(shape))}"
            )
        found |= set(meanings[name])
    return tuple(target for target in linear_layers(shape) if target in found)


def _meanings(shape: ModelShape) -> dict[str, tuple[AdapterTarget, ...]]:
    """What each known name means in this model; names that mean nothing here are left out."""
    layers = linear_layers(shape)
    known: dict[str, tuple[AdapterTarget, ...]] = {**PEFT_NAMES, "all-linear": layers}
    for target in layers:
        part, _, short = target.partition(".")
        known |= {target: (target,), short: (target,), part: (*known.get(part, ()), target)}
    present: dict[str, tuple[AdapterTarget, ...]] = {
        name: tuple(one for one in layers if one in targets) for name, targets in known.items()
    }
    return {name: targets for name, targets in present.items() if targets}


def _rank(requested: FinetuneSection, shape: ModelShape, targets: Sequence[AdapterTarget], bits: int) -> int:
    narrowest = min(targets, key=shape.smaller_side)
    largest = shape.smaller_side(narrowest)
    if requested.rank == "auto":
        sizes = describe_weights(shape)
        names = (f"layers.{n}.{one}.weight" for n in range(shape.layers) for one in linear_layers_in(shape, n))
        per_rank = sum(
            sum(sizes[name].sizes) for name in names if within_layer(name).removesuffix(".weight") in targets
        )
        return rank_for_tokens(bits, per_rank, largest)
    if requested.rank > largest:
        raise PlaitError(
            f"finetune.rank = {requested.rank} is above the {largest} of {narrowest}'s smaller side; choose at most "
            f"{largest}"
        )
    return requested.rank
