"""DeepSeek-V2 and V3 in config.json, read and written: latent attention and its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.parts import ConfigPart, Fields, layers_of
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


def _mixture(values: ConfigValues, own: Fields) -> MixtureShape | None:
    """The experts of a model, with the fields in `own` set by its family; None if all its layers are dense. Raises
    PlaitError for what plait does not compute."""
    require(values, "moe_layer_freq", (1, None))
    layers = layers_of(values)
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
        scale=number_of(values, "routed_scaling_factor"),
        **own,
    )


def _v3_mixture(values: ConfigValues) -> MixtureShape | None:
    require(values, "scoring_func", ("sigmoid", None))
    require(values, "topk_method", ("noaux_tc", None))
    own = {
        "groups": count_of(values, "n_group"),
        "groups_chosen": count_of(values, "topk_group"),
        "router": "sigmoid",
        "normalize": flag_of(values, "norm_topk_prob"),
        "balance": ("bias",),
    }
    return _mixture(values, own)


_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"


def _v2_mixture(values: ConfigValues) -> MixtureShape | None:
    require(values, "scoring_func", ("softmax", None))
    require(values, "topk_method", (_GREEDY, _IN_GROUPS))
    require(values, "norm_topk_prob", (False, None))  # transformers divides by no sum, whatever it says
    require(values, "mlp_bias", (False,))
    own: dict[str, Any] = {"router": "softmax", "normalize": False}
    if values.get("topk_method") == _IN_GROUPS and count_of(values, "n_group") > 1:
        own |= {"groups": count_of(values, "n_group"), "groups_chosen": count_of(values, "topk_group")}
        own["group_score"] = "best"
    return _mixture(values, own)


def _latent_values(shape: ModelShape, own: Callable[[MixtureShape], dict[str, Any]]) -> dict[str, Any]:
    """The keys of config.json for a shape's latent attention and its experts; empty if it has no latent
    attention. `own` are the family's keys for experts."""
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
        "routed_scaling_factor": mixture.scale,
        "moe_layer_freq": 1,
        **own(mixture),
    }


def _v3_values(mixture: MixtureShape) -> dict[str, Any]:
    return {
        "n_group": mixture.groups,
        "topk_group": mixture.groups_chosen,
        "norm_topk_prob": mixture.normalize,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _v2_values(mixture: MixtureShape) -> dict[str, Any]:
    return {
        "n_group": mixture.groups,
        "topk_group": mixture.groups_chosen,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": _IN_GROUPS if mixture.groups > 1 else _GREEDY,
    }


LATENT_KINDS = ("default", "linear", "llama3", "yarn")


def _latent_and_experts(
    mixture_of: Callable[[ConfigValues], MixtureShape | None], own: Callable[[MixtureShape], dict[str, Any]]
) -> ConfigPart:
    def read(values: ConfigValues) -> dict[str, Any]:
        _, scaling, rope = rope_of_config(values, RopeRules(kinds=LATENT_KINDS))
        return {
            "head_width": count_of(values, "qk_nope_head_dim"),
            "latent": latent_of_config(values, rope if scaling else {}),
            "mixture": mixture_of(values),
        }

    return ConfigPart(
        keys=("attention_bias", "rope_interleave", "head_dim", "n_routed_experts", "moe_intermediate_size"),
        read=read,
        write=lambda shape: _latent_values(shape, own),
    )


V3_LATENT_AND_EXPERTS = _latent_and_experts(_v3_mixture, _v3_values)
"""DeepSeek-V3's attention and experts."""
V2_LATENT_AND_EXPERTS = _latent_and_experts(_v2_mixture, _v2_values)
"""DeepSeek-V2's, chosen by the largest probabilities, whose groups are chosen by their best expert alone."""
