"""Parts of config.json: which fields of a ModelShape some keys set, read and written together.

A family is a tuple of these (families.py): whatever two families share is one part, and no reader knows a family's
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.values import ConfigValues, count_of, flag_of, number_of, require
from plait.model.shape import MOST_LAYERS, Activation, Bias, ModelShape

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPart:
    """Some keys of config.json and the fields of a ModelShape that they set. `read` raises PlaitError for a value that
    plait does not compute; `write` may write keys that describe another shape, if the family has no such models."""

    keys: tuple[str, ...]
    """The keys that it reads."""
    read: Callable[[ConfigValues], Fields]
    write: Callable[[ModelShape], Fields]


def fixed(**fields: Any) -> ConfigPart:
    """Fields that are the same for every model of a family; no key sets them."""
    return ConfigPart(keys=(), read=lambda values: fields, write=lambda shape: {})


def only(key: str, *known: object, write: bool = True) -> ConfigPart:
    """A key and the values that plait computes; the first is the default."""

    def read(values: ConfigValues) -> Fields:
        require(values, key, known)
        return {}

    return ConfigPart(keys=(key,), read=read, write=lambda shape: {key: known[0]} if write else {})


def unused(**values: Any) -> ConfigPart:
    """Keys that are written, and ignored when read."""
    return ConfigPart(keys=(), read=lambda config: {}, write=lambda shape: values)


def size_part(key: str, field: str) -> ConfigPart:
    """A whole number."""
    return ConfigPart(
        keys=(key,),
        read=lambda values: {field: count_of(values, key)},
        write=lambda shape: {key: getattr(shape, field)},
    )


def number(key: str, field: str) -> ConfigPart:
    """A number above 0."""
    return ConfigPart(
        keys=(key,),
        read=lambda values: {field: number_of(values, key)},
        write=lambda shape: {key: getattr(shape, field)},
    )


def cap(key: str, field: str) -> ConfigPart:
    """A cap of scores: a number above 0, or null for none."""
    return ConfigPart(
        keys=(key,),
        read=lambda values: {field: 0.0 if values.get(key) is None else number_of(values, key)},
        write=lambda shape: {key: getattr(shape, field) or None},
    )


def flag_part(key: str, field: str) -> ConfigPart:
    """True or false; false by default."""
    return ConfigPart(
        keys=(key,),
        read=lambda values: {field: flag_of(values, key)},
        write=lambda shape: {key: getattr(shape, field)},
    )


def layers_of(values: ConfigValues, key: str = "num_hidden_layers") -> int:
    """Bounded, so that a bad config cannot exhaust memory."""
    if (layers := count_of(values, key)) > MOST_LAYERS:
        raise PlaitError(f"{key} in config.json is {layers}, more than any model has; take the one of these weights")
    return layers


def layers(key: str) -> ConfigPart:
    """The number of layers."""
    return ConfigPart(
        keys=(key,), read=lambda values: {"layers": layers_of(values, key)}, write=lambda shape: {key: shape.layers}
    )


def divided(width: int, heads: int) -> int:
    """The width of a head; raises PlaitError if the heads do not divide the model's width."""
    if width % heads:
        raise PlaitError(f"config.json has {heads} heads, which do not divide its width {width}; give head_dim")
    return width // heads


def head_width_of(values: ConfigValues) -> int:
    """head_dim, or by default the width divided by the number of heads."""
    if values.get("head_dim") is not None:
        return count_of(values, "head_dim")
    return divided(count_of(values, "hidden_size"), count_of(values, "num_attention_heads"))


HEAD_WIDTH = ConfigPart(
    keys=("head_dim",),
    read=lambda values: {"head_width": head_width_of(values)},
    write=lambda shape: {"head_dim": shape.head_width},
)


def _kv_heads(values: ConfigValues) -> Fields:
    key = "num_key_value_heads" if values.get("num_key_value_heads") is not None else "num_attention_heads"
    return {"kv_heads": count_of(values, key)}


KV_HEADS = ConfigPart(
    keys=("num_key_value_heads",), read=_kv_heads, write=lambda shape: {"num_key_value_heads": shape.kv_heads}
)
SIZES = (
    size_part("vocab_size", "vocabulary"),
    size_part("hidden_size", "width"),
    size_part("intermediate_size", "ffn"),
    layers("num_hidden_layers"),
    size_part("num_attention_heads", "heads"),
    KV_HEADS,
)
REST = (
    size_part("max_position_embeddings", "sequence"),
    number("rms_norm_eps", "norm_eps"),
    flag_part("tie_word_embeddings", "tied"),
    unused(attention_dropout=0.0),
)
"""The keys that all decoders since Llama share, before and after head width and activation."""


def activation(key: str, ours: Activation, *known: str) -> ConfigPart:
    """The activation of gated feed-forward parts, and the names by which it is known."""

    def read(values: ConfigValues) -> Fields:
        require(values, key, known)
        return {"activation": ours}

    return ConfigPart(keys=(key,), read=read, write=lambda shape: {key: known[0]})


SILU = activation("hidden_act", "swiglu", "silu", "swish")


def biases(*, attention: str = "", of_attention: Bias = "attention", feedforward: str = "") -> ConfigPart:
    """The keys for biases of attention's layers (`of_attention`) and of the feed-forward part; empty for no key and no
    biases."""

    def read(values: ConfigValues) -> Fields:
        has_attention = bool(attention) and flag_of(values, attention)
        has_feedforward = bool(feedforward) and flag_of(values, feedforward)
        if has_attention and has_feedforward:
            return {"bias": "all"}
        return {"bias": of_attention if has_attention else "feedforward" if has_feedforward else "none"}

    def write(shape: ModelShape) -> Fields:
        said = {attention: shape.bias in (of_attention, "all"), feedforward: shape.bias in ("feedforward", "all")}
        return {key: value for key, value in said.items() if key}

    return ConfigPart(keys=tuple(key for key in (attention, feedforward) if key), read=read, write=write)


def _heads_divide_width(values: ConfigValues) -> Fields:
    width, heads = count_of(values, "hidden_size"), count_of(values, "num_attention_heads")
    if width % heads:
        raise PlaitError(
            f"config.json has {heads} heads, which do not divide its width {width}; transformers makes no model of "
            "this family of it: take the config.json of these weights"
        )
    return {}


HEADS_DIVIDE_WIDTH = ConfigPart(keys=(), read=_heads_divide_width, write=lambda shape: {})
"""What some of transformers' classes require, whatever the width of a head is."""


def query_scalar() -> ConfigPart:
    """Gemma's query_pre_attn_scalar: scores are divided by its root."""

    def read(values: ConfigValues) -> Fields:
        scalar = count_of(values, "query_pre_attn_scalar")
        return {"attention_multiplier": 0.0 if scalar == head_width_of(values) else scalar**-0.5}

    def write(shape: ModelShape) -> Fields:
        factor = shape.attention_multiplier
        return {"query_pre_attn_scalar": round(factor**-2) if factor else shape.head_width}

    return ConfigPart(keys=("query_pre_attn_scalar",), read=read, write=write)


def score_multiplier(key: str) -> ConfigPart:
    """The factor of scores, instead of 1 / root of the head's width."""

    def read(values: ConfigValues) -> Fields:
        factor = number_of(values, key)
        return {"attention_multiplier": 0.0 if factor == head_width_of(values) ** -0.5 else factor}

    return ConfigPart(
        keys=(key,),
        read=read,
        write=lambda shape: {key: shape.attention_multiplier or shape.head_width**-0.5},
    )


ROOT_OF_WIDTH = ConfigPart(
    keys=(),
    read=lambda values: {"embedding_multiplier": count_of(values, "hidden_size") ** 0.5},
    write=lambda shape: {},
)
"""Gemma's embeddings, multiplied by the root of the width."""


def unrotated_layers() -> ConfigPart:
    """SmolLM3's no_rope_layers, whose zeros are layers without positions, or no_rope_layer_interval."""

    def read(values: ConfigValues) -> Fields:
        number_of_layers, listed = layers_of(values), values.get("no_rope_layers")
        if listed is None:
            every = count_of(values, "no_rope_layer_interval")
            return {"unrotated_layers": tuple(range(every - 1, number_of_layers, every))}
        whole = isinstance(listed, list) and len(listed) >= number_of_layers
        if not whole or any(type(one) is not int or one not in (0, 1) for one in listed):
            raise PlaitError(
                f"no_rope_layers in config.json is not a list of {number_of_layers} zeros or ones; correct it"
            )
        return {"unrotated_layers": tuple(at for at, one in enumerate(listed[:number_of_layers]) if not one)}

    def write(shape: ModelShape) -> Fields:
        return {"no_rope_layers": [int(layer not in shape.unrotated_layers) for layer in range(shape.layers)]}

    return ConfigPart(keys=("no_rope_layers", "no_rope_layer_interval"), read=read, write=write)


def _gpt2_head(values: ConfigValues) -> Fields:
    width, heads = count_of(values, "n_embd"), count_of(values, "n_head")
    ffn = 4 * width if values.get("n_inner") is None else count_of(values, "n_inner")
    positions = count_of(values, "n_positions")
    return {
        "kv_heads": heads,
        "head_width": divided(width, heads),
        "ffn": ffn,
        "sequence": positions,
        "learned_positions": positions,
    }


def _gpt2_scale(values: ConfigValues) -> Fields:
    by_layer = flag_of(values, "scale_attn_by_inverse_layer_idx")
    return {"attention_scale": "head and layer" if by_layer else "head"}


GPT2_PARTS = (
    size_part("vocab_size", "vocabulary"),
    size_part("n_embd", "width"),
    layers("n_layer"),
    size_part("n_head", "heads"),
    ConfigPart(
        keys=("n_inner", "n_positions"),
        read=_gpt2_head,
        write=lambda shape: {"n_positions": shape.size_of("positions"), "n_inner": shape.ffn},
    ),
    only("activation_function", "gelu_new", "gelu_pytorch_tanh"),
    only("scale_attn_weights", True, write=False),
    only("add_cross_attention", False, write=False),
    number("layer_norm_epsilon", "norm_eps"),
    unused(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ConfigPart(
        keys=("scale_attn_by_inverse_layer_idx",),
        read=_gpt2_scale,
        write=lambda shape: {"scale_attn_by_inverse_layer_idx": shape.attention_scale == "head and layer"},
    ),
    flag_part("tie_word_embeddings", "tied"),
    fixed(norm="layernorm", activation="gelu", positions="learned", bias="all"),
)
"""GPT-2's config.json, whole."""
