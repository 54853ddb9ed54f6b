"""The shape of multi-head latent attention (MLA): keys and values of all heads are made from one narrow vector a token.

DeepSeek-V2 (2405.04434, section 2.1), V3 and Kimi K2 are points of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from plait.errors import PlaitError

MOST_WIDE = 10_000_000
"""Largest rank or width: far above every published model."""
LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever that of the other norms is: as in transformers and DeepSeek's own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionShape:
    """Widths of latent attention; a head's queries and keys are `head_width` numbers without position (a field of
    ModelShape) and `rope_width` with it, of which all heads share the keys' part. Raises PlaitError."""

    key_value_rank: int
    """Width of the vector that keys and values of all heads are made from."""
    rope_width: int
    value_width: int
    """Width of one head's values."""
    query_rank: int = 0
    """Width of the vector that queries are made from; 0: they come from the stream itself."""
    mscale_all_dim: float = 0.0
    """DeepSeek's factor of stretched rotary positions, by which scores grow, too: see `score_factor`."""

    def __post_init__(self) -> None:
        for key, field in LATENT_KEYS.items():
            least = 0 if field == "query_rank" else 1
            value = getattr(self, field)
            if type(value) is not int or not least <= value <= MOST_WIDE:
                raise PlaitError(f"model.{key} is {value!r}; choose a whole number from {least} to {MOST_WIDE:,}")
        if self.rope_width % 2:
            raise PlaitError(
                f"rotary positions turn pairs, and model.rope_head_width is {self.rope_width}; choose an even one"
            )
        if not 0 <= self.mscale_all_dim < 1e6:
            raise PlaitError(f"mscale_all_dim is {self.mscale_all_dim}; it should be a number of at least 0")


LATENT_KEYS: Mapping[str, str] = {
    "key_value_rank": "key_value_rank",
    "query_rank": "query_rank",
    "rope_head_width": "rope_width",
    "value_head_width": "value_width",
}
"""Keys of a recipe's [model], each with the field of LatentAttentionShape that it sets."""


def latent_of_keys(named: Mapping[str, Any], head_width: int) -> LatentAttentionShape | None:
    """The latent attention that the keys of a recipe name; None where they name no rank of keys and values.

    Left open, the part with positions is half as wide as the one without, values are as wide as that, and queries come
    from the stream itself (DeepSeek-V2-Lite). Raises PlaitError.
    """
    values = {LATENT_KEYS[key]: value for key, value in named.items() if key in LATENT_KEYS}
    if "key_value_rank" not in values:
        if values:
            key = next(key for key in named if key in LATENT_KEYS)
            raise PlaitError(f"model.{key} is of latent attention; name model.key_value_rank, too, or take {key} out")
        return None
    return LatentAttentionShape(**{"rope_width": max(2, head_width // 4 * 2), "value_width": head_width, **values})


def score_factor(latent: LatentAttentionShape, stretch: float) -> float:
    """By how much scores grow where rotary positions are stretched `stretch` times: (0.1 × mscale_all_dim × ln(stretch)
    + 1)², DeepSeek's square of YaRN's factor (2309.00071, equation 22)."""
    return (0.1 * latent.mscale_all_dim * log(stretch) + 1.0) ** 2 if stretch > 1 else 1.0


def latent_sizes(latent: LatentAttentionShape | None, heads: int, head_width: int) -> dict[str, int]:
    """Sizes of the dims that latent attention has or has otherwise; empty without it."""
    if latent is None:
        return {}
    return {
        "heads": heads * latent.value_width,
        "query_heads": heads * (head_width + latent.rope_width),
        "query_rank": latent.query_rank,
        "key_value_heads": heads * (head_width + latent.value_width),
        "key_value_rank": latent.key_value_rank,
        "latent": latent.key_value_rank + latent.rope_width,
    }


def latent_weights(latent: LatentAttentionShape) -> list[str]:
    """Names of a layer's weights of latent attention in the order of the forward pass, the output projection last."""
    queries = ["query_down", "query_norm", "query_up"] if latent.query_rank else ["query"]
    return [f"attention.{name}.weight" for name in (*queries, "key_value_down", "key_value_norm", "key_value_up", "o")]


def check_latent_in(shape: Any) -> None:
    """Refuse what a model cannot have beside latent attention."""
    if shape.kv_heads != shape.heads:
        raise PlaitError(
            f"with latent attention each head has keys of its own, and kv_heads is {shape.kv_heads} of {shape.heads}; "
            "leave model.kv_heads out"
        )
    refused = {
        "biases": shape.bias not in ("none", "feedforward"),
        "learned positions": shape.positions != "rope",
        "norms of queries and keys": shape.qk_norm,
        "scores divided by a layer's number": shape.attention_scale != "head",
        "adapter (LoRA)": shape.adapter is not None,
        "capped scores": shape.attention_cap > 0,
        "sinks": shape.attention_sinks,
    }
    for what, is_there in refused.items():
        if is_there:
            raise PlaitError(f"latent attention has no {what}; take out either, or model.key_value_rank")
