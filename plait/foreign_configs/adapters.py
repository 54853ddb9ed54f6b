"""Names of linear layers with low-rank adapters, as other programs write them."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import PlaitError
from plait.model.adapter_shape import AdapterTarget

ALL_TARGETS: tuple[AdapterTarget, ...] = (
    "attention.q", "attention.k", "attention.v", "attention.o", "feedforward.gate", "feedforward.up",
    "feedforward.down",
)  # fmt: skip
PEFT_DEFAULT: tuple[AdapterTarget, ...] = ("attention.q", "attention.v")
"""PEFT's default for Llama and its relatives."""
_LAYERS: dict[str, tuple[AdapterTarget, ...]] = {
    "q_proj": ("attention.q",), "k_proj": ("attention.k",), "v_proj": ("attention.v",), "o_proj": ("attention.o",),
    "gate_proj": ("feedforward.gate",), "up_proj": ("feedforward.up",), "down_proj": ("feedforward.down",),
    "w1": ("feedforward.gate",), "w3": ("feedforward.up",), "w2": ("feedforward.down",),
    "qkv_proj": ("attention.q", "attention.k", "attention.v"),
    "query_key_value": ("attention.q", "attention.k", "attention.v"), "dense": ("attention.o",),
    "c_attn": ("attention.q", "attention.k", "attention.v"), "c_proj": ("attention.o", "feedforward.down"),
    "gate_up_proj": ("feedforward.gate", "feedforward.up"), "fc1": ("feedforward.up",), "fc2": ("feedforward.down",),
    "dense_h_to_4h": ("feedforward.up",), "dense_4h_to_h": ("feedforward.down",), "c_fc": ("feedforward.up",),
    "all-linear": ALL_TARGETS, "all_linear": ALL_TARGETS,
}  # fmt: skip
NOT_IN_LAYERS = ("lm_head", "embed_tokens", "output", "wte")


def adapter_targets(names: Sequence[str]) -> tuple[AdapterTarget, ...]:
    """The layers with these names; raises PlaitError for an unknown name."""
    meant = {target for text in names for target in _layers_named(text)}
    return tuple(one for one in ALL_TARGETS if one in meant)


def _layers_named(text: str) -> tuple[AdapterTarget, ...]:
    layer = text.rpartition(".")[2]
    if layer in NOT_IN_LAYERS:
        return ()
    if layer not in _LAYERS:
        raise PlaitError(f"{text} is not a linear layer that plait knows for adapters; write {', '.join(_LAYERS)}")
    return _LAYERS[layer]
