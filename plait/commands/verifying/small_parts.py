"""Parts of a shrunk model, which go wrong where those of the large model do: experts, objectives, latent attention.

Pure: values in, values out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from math import lcm
from typing import Any

from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.parts.mixture import MixtureShape
from plait.model.parts.objectives import ObjectivesShape
from plait.model.rope_scaling import RopeScaling
from plait.model.shape import ModelShape

SHRUNK_EXPERTS, SHRUNK_EXPERT_GROUPS, SHRUNK_BIAS_RATE, SHRUNK_Z_WEIGHT = 5, 3, 0.05, 0.1
SHRUNK_DEPTHS = 2
"""Depths of prediction ahead: the second reads the first one's stream."""
SHRUNK_GROWTH_AFTER = 2
"""Tokens after which queries begin to grow in a small model."""
SHRUNK_TAPS = 3
"""Tokens that the convolutions of linear attention read in a small model."""
SHRUNK_INPUT, SHRUNK_SHARING = 6, 2
"""Width of each layer's own input in a small model, and its layers that use the keys of as many before them."""
SHRUNK_CAPACITY = 0.8
"""Capacity of a small model's experts if the large model's have one: some choices are dropped at each step."""


def shrunk_mixture(mixture: MixtureShape, layers: int, ffn: int, parts: int) -> MixtureShape:
    """Few narrow experts, some of whose tokens go elsewhere at each step: the bias moves far, and losses weigh much.
    `parts` hold them together."""
    groups = min(mixture.groups, SHRUNK_EXPERT_GROUPS)
    chosen = min(mixture.groups_chosen, max(1, groups - (mixture.groups_chosen < mixture.groups)))
    # A multiple of the parts, of which some get few tokens.
    experts = lcm(parts, groups * (2 if groups > 1 else min(mixture.experts, SHRUNK_EXPERTS)))
    dense = min(mixture.dense_layers + len(mixture.plain_layers), 1, layers - 1)
    every = min(mixture.every, 2, layers - dense)
    return replace(
        mixture,
        experts=experts,
        experts_per_token=min(mixture.experts_per_token, 2, chosen * experts // groups),
        expert_ffn=ffn,
        shared_experts=min(mixture.shared_experts, 2),
        dense_layers=dense,
        plain_layers=(),
        every=every,
        groups=groups,
        groups_chosen=chosen,
        balance_rate=SHRUNK_BIAS_RATE,
        balance_weights=tuple(float(weight > 0) for weight in mixture.balance_weights),
        z_weight=SHRUNK_Z_WEIGHT if mixture.z_weight else 0.0,
        capacity=SHRUNK_CAPACITY if mixture.capacity else None,
    )


def shrunk_objectives(objectives: ObjectivesShape, layers: int, small: int) -> ObjectivesShape:
    """Heads at about the same places of a model of `small` layers in place of `layers`, and at most two depths."""
    places = {min(small - 1, max(1, round(after * small / layers))): after for after in objectives.heads if small > 1}
    weights = dict(zip(objectives.heads, objectives.head_weights, strict=True))
    return replace(
        objectives,
        heads=tuple(sorted(places)),
        head_weights=tuple(weights[places[place]] for place in sorted(places)),
        ahead=min(objectives.ahead, SHRUNK_DEPTHS),
    )


def shrunk_unlike_layers(shape: ModelShape, kv_heads: int, head_width: int, ffn: int) -> dict[str, Any]:
    """The fields of layers that differ, in a small model of which the second half shares keys if some of the large one
    do."""
    full = shape.full_attention
    if full is not None:
        full = replace(full, head_width=2 * head_width, kv_heads=kv_heads if full.kv_heads == shape.kv_heads else 1)
    return {
        "full_attention": full,
        "layer_input_width": SHRUNK_INPUT if shape.layer_input_width else 0,
        "shared_kv_layers": SHRUNK_SHARING if shape.shared_kv_layers else 0,
        "shared_kv_ffn": ffn if shape.shared_kv_ffn else 0,
    }


def shrunk_delta(delta: DeltaAttentionShape, layers: int, small: int, tensor: int) -> DeltaAttentionShape:
    """Narrow states in every second of `small` layers, or in all if the large model's `layers` all have them."""
    every = len(delta.layers) == layers
    key_heads = tensor if tensor > 1 else 2
    return replace(
        delta,
        layers=tuple(at for at in range(small) if every or (small - at) % 2 == 0),
        key_heads=key_heads,
        value_heads=key_heads * min(2, delta.value_heads // delta.key_heads),
        key_width=3,
        value_width=4,
        taps=min(delta.taps, SHRUNK_TAPS),
    )


def shrunk_positions(shape: ModelShape, layers: int, head_width: int) -> dict[str, Any]:
    """The fields that say which layers and numbers rotary positions turn, in a small model that still has both kinds of
    each; queries grow within its few tokens."""
    rotary_width = head_width // 2 if shape.rotary_width else 0
    unrotated = shape.unrotated_layers
    every = len(unrotated) == shape.layers
    return {
        "rotary_width": rotary_width,
        "unrotated_layers": tuple(at for at in range(layers) if unrotated and (every or at % 2)),
        "query_growth_after": SHRUNK_GROWTH_AFTER if shape.query_growth else 0,
        **longrope_for(shape, rotary_width or head_width),
    }


def longrope_for(shape: ModelShape, rotary_width: int) -> dict[str, Any]:
    """The fields of rotary positions with one factor of longrope for each pair of another width."""
    own = shape.window_rope
    scaling = own and own.scaling
    return {
        "rope": _with_factors(shape.rope, rotary_width),
        "window_rope": own and replace(own, scaling=_with_factors(scaling or None, rotary_width)),
    }


def _with_factors(scaling: RopeScaling | None, rotary_width: int) -> RopeScaling | None:
    if scaling is None or scaling.kind != "longrope":
        return scaling
    pairs = rotary_width // 2
    each = [tuple(islice(cycle(factors), pairs)) for factors in (scaling.short_factors, scaling.long_factors)]
    return replace(scaling, short_factors=each[0], long_factors=each[1])


def shrunk_latent(latent: LatentAttentionShape, head_width: int) -> LatentAttentionShape:
    """Narrow latents, of no width like another; values are wider than a head's keys if the large model's are."""
    wider = latent.value_width > head_width + latent.rope_width
    return replace(
        latent,
        key_value_rank=5,
        query_rank=min(latent.query_rank, 7),
        rope_width=2,
        value_width=9 if wider else 3,
    )


def widened_latent(latent: LatentAttentionShape, times: int) -> LatentAttentionShape:
    """All its widths this many times as large, for the kernels that large models use."""
    return replace(
        latent,
        key_value_rank=times * latent.key_value_rank,
        query_rank=times * latent.query_rank,
        rope_width=times * latent.rope_width,
        value_width=times * latent.value_width,
    )
