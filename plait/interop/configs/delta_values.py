"""Gated delta attention in config.json (Qwen 3.5): which layers have it, and its sizes."""

from __future__ import annotations

from plait.errors import PlaitError
from plait.interop.configs.parts import ConfigPart, Fields, layers_of
from plait.interop.configs.values import ConfigValues, count_of
from plait.interop.configs.window_values import FULL
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.shape import ModelShape

LINEAR = "linear_attention"
_SIZES = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_width",
    "linear_value_head_dim": "value_width",
    "linear_conv_kernel_dim": "taps",
}


def _read(values: ConfigValues) -> Fields:
    kinds, number = values.get("layer_types"), layers_of(values)
    if kinds is None:
        every = count_of(values, "full_attention_interval")
        kinds = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(number)]
    if not isinstance(kinds, list) or len(kinds) != number or any(str(kind) not in (LINEAR, FULL) for kind in kinds):
        raise PlaitError(
            f"layer_types in config.json is not a list of {number} entries, each full_attention or linear_attention; "
            "correct it"
        )
    sizes = {own: count_of(values, key) for key, own in _SIZES.items()}
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    return {"delta": DeltaAttentionShape(layers=layers, **sizes) if layers else None}


def _write(shape: ModelShape) -> Fields:
    sizes = {key: getattr(shape.delta, own) for key, own in _SIZES.items()} if shape.delta else {}
    return {**sizes, "layer_types": [LINEAR if shape.has_delta(layer) else FULL for layer in range(shape.layers)]}


DELTA = ConfigPart(keys=("layer_types", "full_attention_interval", *_SIZES), read=_read, write=_write)
