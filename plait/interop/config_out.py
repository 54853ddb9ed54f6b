"""A ModelShape to config.json, with the keys that transformers 4 and transformers 5 read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.errors import PlaitError
from plait.interop.config_in import shape_of_config
from plait.interop.families import MODEL_FAMILIES
from plait.model.parts.mixture import USUAL_BIAS_RATE, MixtureShape
from plait.model.shape import ModelShape


def config_of_shape(shape: ModelShape, dtype: str, preferred: str = "") -> dict[str, Any]:
    """The keys of config.json for a model of this shape, stored in `dtype` ("bfloat16", …): of the family `preferred`
    where it has such models, else of the first that has. Raises PlaitError where none has."""
    for name in sorted(MODEL_FAMILIES, key=lambda name: name != preferred):
        family = MODEL_FAMILIES[name]
        known = next(one for one, row in MODEL_FAMILIES.items() if row is family)  # transformers knows no kimi_k2
        values: dict[str, Any] = {"architectures": [family.architecture], "model_type": known}
        for part in family.parts:
            values |= part.write(shape)
        values |= {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
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
