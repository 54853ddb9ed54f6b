"""DeepSeek-V3 in config.json, read and written: latent attention and its experts."""

from __future__ import annotations

from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.parts import ConfigPart, layers_of
from plait.interop.configs.rope_values import RopeRules, rope_of_config
from plait.interop.configs.values import ConfigValues, count_of, flag_of, number_of, require
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape


def latent_of_config(values: ConfigValues, rope: ConfigValues) -> LatentAttentionShape:
    """The latent attention of a model, given its rotary positions in config.json; raises PlaitError for what plait does
    not compute."""
    require(values, "rope_interleave", (True,))
    require(values, "attention_bias", (False, None))
    if values.get("head_dim", values.get("qk_rope_head_dim")) != values.get("qk_rope_head_dim"):
        raise PlaitError(
            f"head_dim in config.json is {values['head_dim']!r:.40}, which transformers takes for the rotary part of a "
            f"head, and qk_rope_head_dim is {values.get('qk_rope_head_dim')!r:.40}; remove head_dim"
        )
    return LatentAttentionShape(
        key_value_rank=count_of(values, "kv_lora_rank"),
        query_rank=0 if values.get("q_lora_rank") is None else count_of(values, "q_lora_rank"),
        rope_width=count_of(values, "qk_rope_head_dim"),
        value_width=count_of(values, "v_head_dim"),
        mscale_all_dim=number_of(rope, "mscale_all_dim") if rope.get("mscale_all_dim") else 0.0,
    )


def deepseek_mixture(values: ConfigValues, layers: int) -> MixtureShape | None:
    """The experts of a model; None if all its layers are dense. Raises PlaitError for what plait does not compute."""
    require(values, "scoring_func", ("sigmoid", None))
    require(values, "topk_method", ("noaux_tc", None))
    require(values, "moe_layer_freq", (1, None))
    dense, shared = values["first_k_dense_replace"], values["n_shared_experts"]
    if type(dense) is not int or dense < 0:
        raise PlaitError(f"first_k_dense_replace in config.json is {dense!r:.40}; it should be a number of layers")
    if type(shared) is not int or shared < 0:
        raise PlaitError(f"n_shared_experts in config.json is {shared!r:.40}; it should be a number of experts")
    if dense >= layers:
        return None
    return MixtureShape(
        experts=count_of(values, "n_routed_experts"),
        experts_per_token=count_of(values, "num_experts_per_tok"),
        expert_ffn=count_of(values, "moe_intermediate_size"),
        shared_experts=shared,
        dense_layers=dense,
        groups=count_of(values, "n_group"),
        groups_chosen=count_of(values, "topk_group"),
        router="sigmoid",
        scale=number_of(values, "routed_scaling_factor"),
        normalize=flag_of(values, "norm_topk_prob"),
        balance=("bias",),
    )


def latent_values(shape: ModelShape) -> dict[str, Any]:
    """The keys of config.json for a shape's latent attention and its experts; empty if it has no latent attention."""
    latent, mixture = shape.latent, shape.mixture
    if latent is None:
        return {}
    # transformers takes head_dim, if given, to be the part with positions.
    attention = {
        "head_dim": latent.rope_width,
        "kv_lora_rank": latent.key_value_rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_nope_head_dim": shape.head_width,
        "qk_rope_head_dim": latent.rope_width,
        "v_head_dim": latent.value_width,
        "rope_interleave": True,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
    if mixture is None:
        return {**attention, "first_k_dense_replace": shape.layers}
    return {
        **attention,
        "first_k_dense_replace": mixture.dense_layers,
        "n_routed_experts": mixture.experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_ffn,
        "n_shared_experts": mixture.shared_experts,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_chosen,
        "routed_scaling_factor": mixture.scale,
        "norm_topk_prob": mixture.normalize,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }


LATENT_KINDS = ("default", "linear", "llama3", "yarn")


def _read(values: ConfigValues) -> dict[str, Any]:
    _, scaling, rope = rope_of_config(values, RopeRules(kinds=LATENT_KINDS))
    return {
        "head_width": count_of(values, "qk_nope_head_dim"),
        "latent": latent_of_config(values, rope if scaling else {}),
        "mixture": deepseek_mixture(values, layers_of(values)),
    }


LATENT_AND_EXPERTS = ConfigPart(
    keys=("attention_bias", "rope_interleave", "head_dim", "n_routed_experts", "moe_intermediate_size"),
    read=_read,
    write=latent_values,
)
"""DeepSeek-V3's attention and experts."""
