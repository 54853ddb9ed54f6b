"""Mixtures of experts in config.json, read and written: Mixtral, OLMoE and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.parts import ConfigPart, layers_of
from plait.interop.configs.values import ConfigValues, count_of, flag_of, require
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape


def experts(number: str, *, width: str, normalizes: str = "", sparse: str = "all", biased: bool = False) -> ConfigPart:
    """Softmax experts: the keys for their number, for their width, and for whether a token's weights add up to 1
    (without a key, they do). `sparse` "listed": decoder_sparse_step and mlp_only_layers name the layers with
    experts. `biased`: the router and the experts have biases."""

    def read(values: ConfigValues) -> dict[str, Any]:
        require(values, "clip_qkv", (None,))
        require(values, "router_jitter_noise", (0.0, 0, None))
        layers = layers_of(values)
        dense, every, plain = _sparse_layers(values, layers) if sparse == "listed" else (0, 1, ())
        mixture = MixtureShape(
            experts=count_of(values, number),
            experts_per_token=count_of(values, "num_experts_per_tok"),
            expert_ffn=count_of(values, width),
            router="softmax",
            bias=biased,
            normalize=flag_of(values, normalizes) if normalizes else True,
            dense_layers=dense,
            every=every,
            plain_layers=plain,
        )
        return {"mixture": mixture}

    def write(shape: ModelShape) -> dict[str, Any]:
        mixture = shape.mixture
        if mixture is None:
            return {}
        values: dict[str, Any] = {
            "num_experts_per_tok": mixture.experts_per_token,
            number: mixture.experts,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }
        if normalizes:
            values[normalizes] = mixture.normalize
        if sparse == "listed":
            dense = [layer for layer in range(mixture.dense_layers) if (layer + 1) % mixture.every == 0]
            values["decoder_sparse_step"] = mixture.every
            values["mlp_only_layers"] = sorted({*dense, *mixture.plain_layers})
        return {**values, width: mixture.expert_ffn}

    keys = (number, width, "num_experts_per_tok", "clip_qkv", "router_jitter_noise")
    return ConfigPart(keys=(*keys, *([normalizes] if normalizes else [])), read=read, write=write)


def _sparse_layers(values: ConfigValues, layers: int) -> tuple[int, int, tuple[int, ...]]:
    """(dense layers at the beginning, period of layers with experts, dense layers among these), from a step and a list
    of dense layers."""
    step, listed = count_of(values, "decoder_sparse_step"), values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise PlaitError("mlp_only_layers in config.json is not a list of layers; correct it")
    dense = set(listed)
    sparse = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense]
    if not sparse:
        raise PlaitError("config.json leaves no layer with experts; such a model is a qwen3")
    every = sparse[1] - sparse[0] if len(sparse) > 1 else max(1, layers - sparse[0])
    first = sparse[0] - every + 1
    if first < 0 or sparse != list(range(sparse[0], layers, every)):
        return 0, step, tuple(sorted(layer for layer in dense if layer in range(step - 1, layers, step)))
    return first, every, ()
