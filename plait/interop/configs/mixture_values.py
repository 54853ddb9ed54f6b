"""Mixtures of experts in config.json, read and written: Mixtral, OLMoE and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.values import ConfigValues, count_of, flag_of, require
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape

MIXTURE_FAMILIES = {"mixtral": "num_local_experts", "olmoe": "num_experts", "qwen3_moe": "num_experts"}
"""Each with the key of its number of experts."""


def mixture_of_config(family: str, values: ConfigValues, layers: int) -> MixtureShape:
    """The experts of a family's model; raises PlaitError for what plait does not compute."""
    require(values, "clip_qkv", (None,))
    require(values, "router_jitter_noise", (0.0, 0, None))
    dense, every, plain = _sparse_layers(values, layers) if family == "qwen3_moe" else (0, 1, ())
    return MixtureShape(
        experts=count_of(values, MIXTURE_FAMILIES[family]),
        experts_per_token=count_of(values, "num_experts_per_tok"),
        expert_ffn=count_of(values, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        router="softmax",
        normalize=True if family == "mixtral" else flag_of(values, "norm_topk_prob"),
        dense_layers=dense,
        every=every,
        plain_layers=plain,
    )


def _sparse_layers(values: ConfigValues, layers: int) -> tuple[int, int, tuple[int, ...]]:
    """(dense first layers, every how many layers one has experts, dense layers among these), from a step and a list of
    dense layers."""
    step, listed = count_of(values, "decoder_sparse_step"), values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise PlaitError("mlp_only_layers in config.json is not a list of layers; correct it")
    dense = set(listed)
    sparse = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense]
    if not sparse:
        raise PlaitError("config.json leaves no layer with experts; take the model as one of qwen3")
    every = sparse[1] - sparse[0] if len(sparse) > 1 else max(1, layers - sparse[0])
    first = sparse[0] - every + 1
    if first < 0 or sparse != list(range(sparse[0], layers, every)):
        return 0, step, tuple(sorted(layer for layer in dense if layer in range(step - 1, layers, step)))
    return first, every, ()


def mixture_values(family: str, shape: ModelShape) -> dict[str, Any]:
    """The keys of config.json for a shape's experts in one of these families; empty where it has none."""
    mixture = shape.mixture
    if mixture is None or family not in MIXTURE_FAMILIES:
        return {}
    values: dict[str, Any] = {
        "num_experts_per_tok": mixture.experts_per_token,
        MIXTURE_FAMILIES[family]: mixture.experts,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }
    if family != "mixtral":
        values["norm_topk_prob"] = mixture.normalize
    if family == "qwen3_moe":
        dense = [layer for layer in range(mixture.dense_layers) if (layer + 1) % mixture.every == 0]
        dense = sorted({*dense, *mixture.plain_layers})
        values |= {"moe_intermediate_size": mixture.expert_ffn, "decoder_sparse_step": mixture.every}
        values |= {"mlp_only_layers": dense}
    else:
        values["intermediate_size"] = mixture.expert_ffn
    return values
