"""Layers that differ, in config.json: heads by kind of layer, shared keys and values, inputs of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.parts import ConfigPart, Fields, layers_of
from plait.interop.configs.values import ConfigValues, count_of, flag_of
from plait.interop.configs.window_values import FULL
from plait.model.parts.unlike_layers import FullAttentionShape
from plait.model.shape import ModelShape

USUAL_GLOBAL_HEAD = 512
_HEADS = ("head_dim", "num_key_value_heads")
_Heads = tuple[int, int]
"""Width and number of key/value heads."""


def _read_heads(values: ConfigValues) -> Fields:
    """Gemma 4's heads: per_layer_config for single layers, or the older global_head_dim and num_global_key_value_heads
    for layers without a window."""
    base = count_of(values, "head_dim"), count_of(values, "num_key_value_heads")
    has_shared_values = flag_of(values, "attention_k_eq_v")
    older = {"global_head_dim": "head_dim"}
    if has_shared_values:  # else transformers does not look at the number
        older["num_global_key_value_heads"] = "num_key_value_heads"
    said = {own: count_of(values, key) for key, own in older.items() if values.get(key) is not None}
    if "per_layer_config" in values:
        full = _heads_of_full_layers(base, values)
        if any(said.get(key, found) != found for key, found in zip(_HEADS, full, strict=True)):
            raise PlaitError(
                "global_head_dim or num_global_key_value_heads in config.json is another than in its per_layer_config; "
                "remove the wrong one"
            )
    else:
        full = said.get("head_dim", USUAL_GLOBAL_HEAD), said.get("num_key_value_heads", base[1])
    if full == base and not has_shared_values:
        return {"full_attention": None}
    own = FullAttentionShape(head_width=full[0], kv_heads=full[1], values="keys" if has_shared_values else "own")
    return {"full_attention": own}


def _heads_of_full_layers(base: _Heads, values: ConfigValues) -> _Heads:
    """The heads that per_layer_config gives all layers without a window, and no other."""
    table, layers = values["per_layer_config"], layers_of(values)
    if not isinstance(table, Mapping):  # what null means transformers forgets when it writes the config again
        raise PlaitError("per_layer_config in config.json is not a table of layers; correct it, or remove it")
    kinds = values.get("layer_types") or [
        FULL if (layer + 1) % 6 == 0 or layer + 1 == layers else "" for layer in range(layers)
    ]
    found: dict[bool, set[_Heads]] = {True: set(), False: set()}
    named = {str(layer): own for layer, own in table.items()}
    if unknown := sorted(named.keys() - {str(layer) for layer in range(layers)}):
        raise PlaitError(
            f"per_layer_config in config.json names a layer {unknown[0]:.40}, which there is not; remove it"
        )
    for layer, kind in enumerate(kinds):
        own = named.get(str(layer), {})
        if not isinstance(own, Mapping) or not own.keys() <= set(_HEADS):
            raise PlaitError(
                f"per_layer_config in config.json changes more of layer {layer} than head_dim and num_key_value_heads, "
                "which plait does not compute; use a model without that"
            )
        mine: dict[str, Any] = {**dict(zip(_HEADS, base, strict=True)), **own}
        found[kind == FULL].add((count_of(mine, _HEADS[0]), count_of(mine, _HEADS[1])))
    if not found[False] <= {base} or len(found[True]) > 1:
        raise PlaitError(
            "per_layer_config in config.json gives layers of one kind unlike heads, which plait does not compute; "
            "use a model whose full_attention layers are alike"
        )
    return next(iter(found[True]), base)


def _write_heads(shape: ModelShape) -> Fields:
    full = shape.full_attention
    width, kv_heads = (full.head_width, full.kv_heads) if full else (shape.head_width, shape.kv_heads)
    shared = full is not None and full.values == "keys"
    each = {"head_dim": width, "num_key_value_heads": kv_heads}
    without = [layer for layer in range(shape.layers) if not shape.window_of(layer)]
    return {
        "global_head_dim": width,
        "attention_k_eq_v": shared,
        # transformers looks at the number only where keys are values
        "num_global_key_value_heads": kv_heads if shared and kv_heads != shape.kv_heads else None,
        "per_layer_config": {str(layer): each for layer in without},
    }


HEADS_BY_KIND = ConfigPart(
    keys=("head_dim", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"),
    read=_read_heads,
    write=_write_heads,
)


def _read_shared(values: ConfigValues) -> Fields:
    number = values.get("num_kv_shared_layers")
    if type(number) is not int or not 0 <= number < layers_of(values):
        raise PlaitError(
            f"num_kv_shared_layers in config.json is {number!r:.40}; it should be a whole number below the number of "
            "layers"
        )
    wide = flag_of(values, "use_double_wide_mlp") and number > 0
    return {"shared_kv_layers": number, "shared_kv_ffn": 2 * count_of(values, "intermediate_size") if wide else 0}


def _write_shared(shape: ModelShape) -> Fields:
    return {"num_kv_shared_layers": shape.shared_kv_layers, "use_double_wide_mlp": shape.shared_kv_ffn > 0}


SHARED_KV = ConfigPart(keys=("num_kv_shared_layers", "use_double_wide_mlp"), read=_read_shared, write=_write_shared)


def _read_inputs(values: ConfigValues) -> Fields:
    width = values.get("hidden_size_per_layer_input")
    if type(width) is int and width == 0:
        return {"layer_input_width": 0}
    width = count_of(values, "hidden_size_per_layer_input")
    if values.get("vocab_size_per_layer_input") != values.get("vocab_size"):
        raise PlaitError(
            f"vocab_size_per_layer_input in config.json is {values.get('vocab_size_per_layer_input')!r:.40} and "
            f"vocab_size {values.get('vocab_size')!r:.40}; plait computes models with one vocabulary for both"
        )
    return {"layer_input_width": width}


def _write_inputs(shape: ModelShape) -> Fields:
    return {
        "hidden_size_per_layer_input": shape.layer_input_width,
        "vocab_size_per_layer_input": shape.vocabulary,
    }


LAYER_INPUTS = ConfigPart(
    keys=("hidden_size_per_layer_input", "vocab_size_per_layer_input"), read=_read_inputs, write=_write_inputs
)
