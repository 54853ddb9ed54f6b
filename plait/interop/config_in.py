"""config.json to a ModelShape: the keys of transformers 4 and 5, each read or refused by name.

What a key means, and its value where it is left out, follows transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.latent_values import LATENT_FAMILY, deepseek_mixture, latent_of_config
from plait.interop.configs.mixture_values import MIXTURE_FAMILIES, mixture_of_config
from plait.interop.configs.rope_values import rope_of_config
from plait.interop.configs.values import ConfigValues, count_of, flag_of, number_of, require
from plait.interop.families import MODEL_FAMILIES
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import Bias, ModelShape

_MOST_LAYERS = 10_000
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def family_of(values: ConfigValues) -> str:
    """The `model_type` of a config.json; raises PlaitError, naming the nearest, for one that plait does not read."""
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in MODEL_FAMILIES:
        return kind
    near = _nearest_family(values)
    nearest = f"the nearest in architecture is {near}" if near else "choose a model of one of these families"
    raise PlaitError(
        f"model_type {kind!r:.40} in config.json is none that plait reads: {', '.join(MODEL_FAMILIES)}; {nearest}"
    )


def _nearest_family(values: ConfigValues) -> str:
    """The family whose architecture is most like that of an unknown one, by the keys of its config.json; empty where it
    is no decoder with attention."""
    keys = {key for key, value in values.items() if value is not None and value is not False}
    classes = values.get("architectures")
    named = " ".join(map(str, classes)) if isinstance(classes, list) else ""
    decodes = not named or "CausalLM" in named or "LMHead" in named
    heads = {"num_attention_heads", "n_head", "n_heads", "num_heads"} & keys
    if "is_encoder_decoder" in keys or not decodes or not heads:
        return ""
    if "kv_lora_rank" in keys:
        return LATENT_FAMILY
    if keys & {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}:
        return "mixtral" if "num_local_experts" in keys and "moe_intermediate_size" not in keys else "qwen3_moe"
    if "rms_norm_eps" not in keys:  # a LayerNorm
        return "gpt2"
    if {"use_qk_norm", "qk_norm", "use_sliding_window", "max_window_layers"} & keys:
        return "qwen3"
    return "mistral" if "sliding_window" in keys else "llama"


def shape_of_config(config: ConfigValues) -> ModelShape:
    """The shape that a config.json describes, with its longest sequence; raises PlaitError for what plait lacks."""
    family = family_of(config)
    values = {**MODEL_FAMILIES[family].defaults, **_without_aliases(config, MODEL_FAMILIES[family].aliases)}
    require(values, "is_causal", (True,))
    require(values, "per_layer_config", (None, {}))
    if values.get("quantization_config") is not None:
        raise PlaitError("config.json is of quantized weights, which plait does not read; take the model in bf16")
    return _gpt2_shape(values) if family == "gpt2" else _llama_shape(family, values)


def _without_aliases(config: ConfigValues, aliases: Mapping[str, str]) -> dict[str, Any]:
    """The values under each key's own name; raises PlaitError where a key and its alias disagree, of which transformers
    takes the alias."""
    values = dict(config)
    for alias, key in aliases.items():
        if values.get(alias, values.get(key)) != values.get(key, values.get(alias)):
            raise PlaitError(
                f"{key} and {alias} in config.json are two names of one number, and the file has {values[key]!r:.40} "
                f"and {values[alias]!r:.40}; remove the wrong one"
            )
        if alias in values:
            values[key] = values.pop(alias)
    return values


def _gpt2_shape(values: ConfigValues) -> ModelShape:
    width, heads = count_of(values, "n_embd"), count_of(values, "n_head")
    require(values, "activation_function", _TANH_GELU)
    require(values, "scale_attn_weights", (True,))
    require(values, "add_cross_attention", (False,))
    positions = count_of(values, "n_positions")
    return ModelShape(
        layers=_layers(values, "n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=_divided(width, heads),
        ffn=4 * width if values.get("n_inner") is None else count_of(values, "n_inner"),
        vocabulary=count_of(values, "vocab_size"),
        sequence=positions,
        learned_positions=positions,
        norm="layernorm",
        norm_eps=number_of(values, "layer_norm_epsilon"),
        activation="gelu",
        positions="learned",
        bias="all",
        tied=flag_of(values, "tie_word_embeddings", default=True),
        attention_scale="head and layer" if flag_of(values, "scale_attn_by_inverse_layer_idx") else "head",
    )


def _llama_shape(family: str, values: ConfigValues) -> ModelShape:
    width, heads = count_of(values, "hidden_size"), count_of(values, "num_attention_heads")
    require(values, "hidden_act", ("silu", "swish"))
    layers = _layers(values, "num_hidden_layers")
    theta, scaling, rope = rope_of_config(values, MODEL_FAMILIES[family].default_theta)
    latent = latent_of_config(values, rope if scaling else {}) if family == LATENT_FAMILY else None
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads if values.get("num_key_value_heads") is None else count_of(values, "num_key_value_heads"),
        head_width=_head_width(family, values, width, heads),
        ffn=count_of(values, "intermediate_size"),
        vocabulary=count_of(values, "vocab_size"),
        sequence=count_of(values, "max_position_embeddings"),
        norm_eps=number_of(values, "rms_norm_eps"),
        rope_theta=theta,
        rope=scaling,
        bias=_bias(family, values),
        qk_norm=family in ("qwen3", "qwen3_moe", "olmoe"),
        qk_norm_width="all heads" if family == "olmoe" else "head",
        mixture=_mixture(family, values, layers),
        latent=latent,
        tied=flag_of(values, "tie_word_embeddings"),
        windows=_windows(family, values, layers),
    )


def _head_width(family: str, values: ConfigValues, width: int, heads: int) -> int:
    """Width of a head; for latent attention, of its part without positions."""
    if family == LATENT_FAMILY:
        return count_of(values, "qk_nope_head_dim")
    return _divided(width, heads) if values.get("head_dim") is None else count_of(values, "head_dim")


def _mixture(family: str, values: ConfigValues, layers: int) -> MixtureShape | None:
    if family == LATENT_FAMILY:
        return deepseek_mixture(values, layers)
    return mixture_of_config(family, values, layers) if family in MIXTURE_FAMILIES else None


def _bias(family: str, values: ConfigValues) -> Bias:
    if family == "qwen2":
        return "qkv"
    attention = family not in ("mistral", "mixtral", LATENT_FAMILY) and flag_of(values, "attention_bias")
    feedforward = family == "llama" and flag_of(values, "mlp_bias")
    if attention and feedforward:
        return "all"
    return "attention" if attention else "feedforward" if feedforward else "none"


def _windows(family: str, values: ConfigValues, layers: int) -> tuple[int, ...]:
    """The window of each layer; empty where no layer has one."""
    if family in ("llama", "olmoe", LATENT_FAMILY):
        return ()
    kinds = values.get("layer_types")
    is_off = family in ("qwen2", "qwen3", "qwen3_moe") and not flag_of(values, "use_sliding_window")
    if is_off or values.get("sliding_window") is None:
        if family in ("qwen2", "qwen3") and isinstance(kinds, list) and "sliding_attention" in kinds:
            raise PlaitError(
                "layer_types in config.json names sliding_attention, and use_sliding_window or sliding_window turns it "
                "off; make them agree"
            )
        return ()
    window = count_of(values, "sliding_window")
    # A mistral with layer_types is what transformers calls a ministral.
    if family in ("mixtral", "qwen3_moe") or (family == "mistral" and kinds is None):
        return (window,) * layers
    if kinds is None:
        first = values["max_window_layers"]
        if type(first) is not int:
            raise PlaitError(f"max_window_layers in config.json is {first!r:.40}; it should be a whole number")
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    known = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(kinds, list) or len(kinds) != layers or any(str(kind) not in known for kind in kinds):
        raise PlaitError(
            f"layer_types in config.json is not a list of {layers} times full_attention or "
            "sliding_attention; correct it"
        )
    windows = tuple(known[str(kind)] for kind in kinds)
    return windows if any(windows) else ()


def _layers(values: ConfigValues, key: str) -> int:
    """Bounded, so that a bad config cannot exhaust memory."""
    if (layers := count_of(values, key)) > _MOST_LAYERS:
        raise PlaitError(f"{key} in config.json is {layers}, more than any model has; take the one of these weights")
    return layers


def _divided(width: int, heads: int) -> int:
    if width % heads:
        raise PlaitError(f"config.json has {heads} heads, which do not divide its width {width}; give head_dim")
    return width // heads
