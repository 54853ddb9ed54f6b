"""A ModelShape to config.json, with the keys that transformers 4 and transformers 5 read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.errors import PlaitError
from plait.interop.config_in import shape_of_config
from plait.interop.configs.latent_values import LATENT_FAMILY, latent_values
from plait.interop.configs.mixture_values import mixture_values
from plait.interop.families import MODEL_FAMILIES
from plait.model.parts.mixture import USUAL_BIAS_RATE, MixtureShape
from plait.model.shape import ModelShape


def config_of_shape(shape: ModelShape, dtype: str, preferred: str = "") -> dict[str, Any]:
    """The keys of config.json for a model of this shape, stored in `dtype` ("bfloat16", …): of the family `preferred`
    where it has such models, else of the first that has. Raises PlaitError where none has."""
    for family in sorted(MODEL_FAMILIES, key=lambda name: name != preferred):
        values = _gpt2_values(shape) if family == "gpt2" else _llama_values(family, shape)
        kind = {"architectures": [MODEL_FAMILIES[family].architecture], "model_type": family}
        values = {**kind, **values, "dtype": dtype, "torch_dtype": dtype, "use_cache": True}
        if _says(values, shape):
            return values
    if shape.mixture is not None:
        raise PlaitError(
            f"no family that plait writes has experts of this kind (router {shape.mixture.router}, balance "
            f"{' and '.join(shape.mixture.balance) or 'none'}); train with model.router softmax, no shared experts and "
            "model.expert_balance global or none, or as DeepSeek-V3 with model.key_value_rank, shared experts, router "
            "sigmoid and expert_balance bias"
        )
    raise PlaitError(
        f"no family of transformers has models of this kind (norm {shape.norm}, activation {shape.activation}, "
        f"positions {shape.positions}, bias {shape.bias}); the nearest is llama: train with norm rmsnorm, activation "
        "swiglu, positions rope and bias none"
    )


def _says(values: Mapping[str, Any], shape: ModelShape) -> bool:
    """Whether a config.json, read again, means this very shape."""
    try:
        found = shape_of_config(values)
    except PlaitError:
        return False
    return _comparable(found) == _comparable(shape)


def _comparable(shape: ModelShape) -> dict[str, Any]:
    # A model whose position table has as many rows as its sequence need not say so.
    shape = replace(shape, mixture=_routed(shape.mixture)) if shape.mixture else shape
    plain = any(shape.mixture_of(layer) is None for layer in range(shape.layers))
    unread = {"rope_theta": 0.0} if shape.positions == "learned" else {"learned_positions": 0}
    unread |= {} if plain else {"ffn": 0}
    return {**shape.to_dict(), "learned_positions": shape.size_of("positions"), "sequence": 0, **unread}


def _routed(mixture: MixtureShape) -> MixtureShape:
    """A mixture without what only training reads."""
    kept = tuple(rule for rule in mixture.balance if rule == "bias")
    return replace(mixture, balance=kept, balance_rate=USUAL_BIAS_RATE, balance_weights=(), z_weight=0.0, capacity=None)


def _gpt2_values(shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "n_positions": shape.size_of("positions"),
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": shape.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": shape.attention_scale == "head and layer",
        "tie_word_embeddings": shape.tied,
    }


def _llama_values(family: str, shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": shape.sequence,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "attention_dropout": 0.0,
        **mixture_values(family, shape),
        **_bias_values(family, shape),
        **_window_values(family, shape),
        **_rope_values(shape),
        **(latent_values(shape) if family == LATENT_FAMILY else {}),
    }


def _bias_values(family: str, shape: ModelShape) -> dict[str, Any]:
    values = {"attention_bias": shape.bias in ("attention", "all"), "mlp_bias": shape.bias in ("feedforward", "all")}
    known = {"llama": ("attention_bias", "mlp_bias")}.get(family, ())
    known = ("attention_bias",) if family in ("qwen3", "qwen3_moe", "olmoe") else known
    return {key: values[key] for key in known}


def _window_values(family: str, shape: ModelShape) -> dict[str, Any]:
    window = max(shape.windows, default=0)
    full = [layer for layer in range(shape.layers) if not shape.window_of(layer)]
    kinds = ["sliding_attention" if shape.window_of(layer) else "full_attention" for layer in range(shape.layers)]
    if family in ("mistral", "mixtral"):
        mixed = {"layer_types": kinds} if family == "mistral" and window and full else {}
        return {"sliding_window": window or None, **mixed}
    if family == "qwen3_moe":
        return {"use_sliding_window": bool(window), "sliding_window": window or None}
    if family not in ("qwen2", "qwen3"):
        return {}
    return {
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "max_window_layers": max(full, default=-1) + 1,
        "layer_types": kinds,
    }


def _rope_values(shape: ModelShape) -> dict[str, Any]:
    """Both forms: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling` of 4."""
    scaling = shape.rope
    if scaling is None:
        table = {"rope_type": "default", "rope_theta": shape.rope_theta}
        return {"rope_parameters": table, "rope_theta": shape.rope_theta, "rope_scaling": None}
    table: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        table["original_max_position_embeddings"] = scaling.original_sequence
    if scaling.kind == "llama3":
        table |= {"low_freq_factor": scaling.low_frequency, "high_freq_factor": scaling.high_frequency}
    if scaling.kind == "yarn":
        table |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        table |= {"attention_factor": scaling.table_scale, "truncate": scaling.whole_pairs == "yes"}
    if shape.latent and shape.latent.mscale_all_dim:
        table["mscale_all_dim"] = shape.latent.mscale_all_dim
    theta = {"rope_theta": shape.rope_theta}
    return {"rope_parameters": {**table, **theta}, **theta, "rope_scaling": table}
