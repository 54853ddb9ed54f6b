"""The shape of gated delta attention (Yang et al. 2024, 2412.06464), a linear attention with a state for each head:
what Qwen 3.5 and Qwen3-Next have in three of four layers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.model.parts import checks

DELTA_CHUNK = 64
"""Tokens of a sequence that the rule reads at a time."""
_MOST_WIDE, _MOST_TAPS = 10_000_000, 1024
"""Far above every published model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaAttentionShape:
    """Gated delta attention of some layers. Each key head serves as many consecutive value heads; a value head's state
    is a matrix [key_width, value_width]. Raises PlaitError."""

    layers: tuple[int, ...]
    """The layers that have it; all others have plain attention."""
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    """Tokens, itself included, that the convolution in front of each query, key and value reads."""

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_width", "value_width"):
            checks.check_count(f"delta.{name}", getattr(self, name), _MOST_WIDE)
        checks.check_count("delta.taps", self.taps, _MOST_TAPS)
        if self.value_heads % self.key_heads:
            raise PlaitError(
                f"delta attention has {self.key_heads} key heads and {self.value_heads} value heads; choose a multiple"
            )

    def forward_products(self, chunk: int) -> int:
        """Products of one token's forward pass that no weight stands for, where this many tokens are read at a time:
        with keys and values of the chunk, and with the state."""
        in_chunk = chunk * (2 * self.key_width + self.value_width)
        return self.value_heads * (in_chunk + 3 * self.key_width * self.value_width)

    def kept_numbers(self, chunk: int) -> int:
        """Numbers in float32 that the rule keeps of a token for its backward pass (model/delta_rule.py): of each value
        head five matrices of a chunk, eleven vectors, and a state a chunk."""
        vectors = 6 * self.key_width + 5 * self.value_width
        return self.value_heads * (5 * chunk + vectors + self.key_width * self.value_width // chunk)


def delta_from(values: Any) -> DeltaAttentionShape:
    """The shape from what JSON made of it."""
    return DeltaAttentionShape(**{**values, "layers": tuple(values["layers"])})


def delta_sizes(delta: DeltaAttentionShape | None) -> dict[str, int]:
    """Sizes of the dims that delta attention has; empty without it."""
    if delta is None:
        return {}
    return {
        "delta_keys": delta.key_heads * delta.key_width,
        "delta_values": delta.value_heads * delta.value_width,
        "delta_heads": delta.value_heads,
        "delta_value_width": delta.value_width,
        "taps": delta.taps,
    }


DELTA_WEIGHTS = (
    "delta_q.weight", "delta_k.weight", "delta_v.weight", "delta_q_taps", "delta_k_taps", "delta_v_taps",
    "delta_gate.weight", "delta_write.weight", "delta_decay.weight", "delta_decay_bias", "delta_decay_log",
    "delta_norm.weight", "delta_o.weight",
)  # fmt: skip
"""A layer's weights of delta attention, in the order of the forward pass."""


def check_delta_in(shape: Any) -> None:
    """Refuse what a model cannot have beside delta attention."""
    checks.check_layer_numbers("delta.layers", shape.delta.layers, shape.layers)
    refused = {
        "latent attention": shape.latent is not None,
        "shared keys": shape.shared_kv_layers > 0,
        "windows": any(shape.windows),
        "heads in the middle or prediction ahead": bool(shape.objectives.weights),
    }
    for what, is_there in refused.items():
        if is_there:
            raise PlaitError(f"delta attention goes with no {what}; take out either")
