"""config.json to a ModelShape: the keys of transformers 4 and 5, each read or refused by name.

What a key means, and its value where it is left out, follows transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.values import ConfigValues, require
from plait.interop.families import MODEL_FAMILIES, Family
from plait.model.shape import ModelShape

AROUND_TEXT = ("gemma3", "gemma4", "mistral3", "qwen3_5")
"""Values of `model_type` of models that read pictures, too, around one of the families' models of text."""


def is_around_text(config: ConfigValues) -> bool:
    """Whether a config.json is of a model of text and pictures, of which plait reads the model of text."""
    return config.get("model_type") in AROUND_TEXT


def text_of_config(config: ConfigValues) -> ConfigValues:
    """The config of the model of text: the whole, or what lies in it."""
    if not is_around_text(config):
        return config
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise PlaitError("text_config in config.json is not a table of keys and values; take the one of these weights")
    values = dict(inner)
    for key in ("tie_word_embeddings", "quantization_config"):
        said = [one[key] for one in (config, inner) if one.get(key) is not None]
        if len(said) == 2 and said[0] != said[1]:
            raise PlaitError(f"{key} in config.json is another in its text_config; remove the wrong one")
        if said:
            values[key] = said[0]
    return values


def family_of(config: ConfigValues) -> str:
    """The `model_type` of a config.json, or of the model of text in it; raises PlaitError, naming the nearest, for one
    that plait does not read."""
    values = text_of_config(config)
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in MODEL_FAMILIES:
        return kind
    inner = values.get("text_config")
    if isinstance(inner, Mapping) and inner.get("model_type") in tuple(MODEL_FAMILIES):
        raise PlaitError(
            f"model_type {kind!r:.40} in config.json is a model of text and more, around a {inner['model_type']}; "
            "plait reads that alone: take the model of its text"
        )
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
        return "deepseek_v2" if values.get("scoring_func") == "softmax" else "deepseek_v3"
    if "swiglu_limit" in keys and "num_local_experts" in keys:
        return "gpt_oss"
    if "linear_num_value_heads" in keys:
        return "qwen3_5_text"
    if keys & {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}:
        return "mixtral" if "num_local_experts" in keys and "moe_intermediate_size" not in keys else "qwen3_moe"
    if "rms_norm_eps" not in keys:  # a LayerNorm
        return "gpt2"
    if {"num_kv_shared_layers", "hidden_size_per_layer_input", "global_head_dim"} & keys:
        return "gemma4_text"
    if {"query_pre_attn_scalar", "final_logit_softcapping"} & keys:
        return "gemma3_text"
    if {"use_qk_norm", "qk_norm", "use_sliding_window", "max_window_layers"} & keys:
        return "qwen3"
    return "mistral" if "sliding_window" in keys else "llama"


def shape_of_config(config: ConfigValues) -> ModelShape:
    """The shape that a config.json describes, with its longest sequence; raises PlaitError for what plait lacks."""
    config = text_of_config(config)
    family = MODEL_FAMILIES[family_of(config)]
    values = {**family.defaults, **_without_aliases(config, family.aliases)}
    require(values, "is_causal", (True,))
    if not any("per_layer_config" in part.keys for part in family.parts):
        require(values, "per_layer_config", (None, {}))
    if (settings := values.get("quantization_config")) is not None:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        if method not in family.packed:
            raise _of_quantized_weights(settings)
    _refuse_unread(config, family)
    fields: dict[str, Any] = {}
    for part in family.parts:
        fields |= part.read(values)
    return ModelShape(**fields)


_NONE, _ONE, _OFF = (None,), (None, 1.0), (None, False)
ARITHMETIC_KEYS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping"), _NONE),
    **dict.fromkeys(("final_logit_softcapping", "rope_local_base_freq", "clip_qkv", "no_rope_layers"), _NONE),
    **dict.fromkeys(("attention_chunk_size", "swiglu_limit", "swiglu_alpha", "attn_scale"), _NONE),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "rotary_pct"), _ONE
    ),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn"), _OFF),
    **dict.fromkeys(("alibi", "use_bidirectional_attention", "attn_temperature_tuning", "attention_out_bias"), _OFF),
    **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input", "full_attention_interval"), (None, 0)),
    **dict.fromkeys(("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block"), _OFF),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), _NONE),
}
"""Keys that change the arithmetic of the families that have them, each with the values that change nothing. A family
that does not read one refuses all others: its weights were trained with arithmetic that plait would leave out."""


def _refuse_unread(config: ConfigValues, family: Family) -> None:
    """Raise PlaitError for a key that changes arithmetic, and not in this family."""
    read = {key for part in family.parts for key in part.keys}
    for key in sorted(ARITHMETIC_KEYS.keys() & config.keys() - read):
        value = config[key]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in ARITHMETIC_KEYS[key]):
            raise PlaitError(
                f"{key} in config.json is {value!r:.40}, and models of the family {config['model_type']} have no such "
                "part; bring the config.json of these weights, or remove the key"
            )


def _of_quantized_weights(settings: object) -> PlaitError:
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    by = f" ({method[:20]})" if isinstance(method, str) else ""
    return PlaitError(
        f"config.json is of quantized weights{by}, which plait does not read; take the model in bf16 or float32, and "
        'write finetune.method = "qlora" to keep it in 4 bits while it is tuned'
    )


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
