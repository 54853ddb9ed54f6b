"""The model's weights by name: what each dim means, which dim may be cut, which weights decay.

weights.py makes of it the description of each weight of a model, which parallelism, the optimizer and checkpoints read;
nobody parses weight names elsewhere.
"""

from __future__ import annotations

import re
from typing import Literal

Dim = Literal[
    "width", "heads", "kv_heads", "head_width", "head_count", "ffn", "vocabulary", "positions", "rank",
    "experts", "expert_ffn", "shared_ffn", "joined",
    "query_heads", "query_rank", "key_value_heads", "key_value_rank", "latent",
    "layer_input", "layer_inputs", "one",
    "queries", "delta_keys", "delta_values", "delta_heads", "delta_value_width", "taps",
]  # fmt: skip
EMBEDDING, HEAD = "embed.tokens.weight", "head.weight"
"""The vocabulary's tables."""
BALANCE = "feedforward.router.balance"
"""A router's bias: no weight, for no gradient changes it; see ModelShape.mixture."""
MULTIPLIER = "multiplier"
"""The factor of a layer's result, which no gradient changes either; see ModelShape.layer_multipliers."""
LAYER_TABLE, LAYER_PROJECTION = "embed.layer_tokens.weight", "embed.layer_projection.weight"
"""What the inputs of all layers are made from: of each token, and of its embedding."""

_BASE_DIMS: dict[str, tuple[Dim, ...]] = {
    "embed.tokens.weight": ("vocabulary", "width"),
    "embed.positions.weight": ("positions", "width"),
    LAYER_TABLE: ("vocabulary", "layer_inputs"),
    LAYER_PROJECTION: ("layer_inputs", "width"),
    "embed.layer_norm.weight": ("layer_input",),
    "layers.*.attention_norm.weight": ("width",),
    "layers.*.attention_norm.bias": ("width",),
    "layers.*.attention.q.weight": ("queries", "width"),
    "layers.*.attention.q.bias": ("queries",),
    "layers.*.attention.k.weight": ("kv_heads", "width"),
    "layers.*.attention.k.bias": ("kv_heads",),
    "layers.*.attention.v.weight": ("kv_heads", "width"),
    "layers.*.attention.v.bias": ("kv_heads",),
    "layers.*.attention.q_norm.weight": ("head_width",),
    "layers.*.attention.k_norm.weight": ("head_width",),
    "layers.*.attention.queries_norm.weight": ("heads",),
    "layers.*.attention.keys_norm.weight": ("kv_heads",),
    "layers.*.attention.sinks": ("head_count",),
    "layers.*.attention.query.weight": ("query_heads", "width"),
    "layers.*.attention.query_down.weight": ("query_rank", "width"),
    "layers.*.attention.query_norm.weight": ("query_rank",),
    "layers.*.attention.query_up.weight": ("query_heads", "query_rank"),
    "layers.*.attention.key_value_down.weight": ("latent", "width"),
    "layers.*.attention.key_value_norm.weight": ("key_value_rank",),
    "layers.*.attention.key_value_up.weight": ("key_value_heads", "key_value_rank"),
    "layers.*.attention.delta_q.weight": ("delta_keys", "width"),
    "layers.*.attention.delta_k.weight": ("delta_keys", "width"),
    "layers.*.attention.delta_v.weight": ("delta_values", "width"),
    "layers.*.attention.delta_q_taps": ("delta_keys", "taps"),
    "layers.*.attention.delta_k_taps": ("delta_keys", "taps"),
    "layers.*.attention.delta_v_taps": ("delta_values", "taps"),
    "layers.*.attention.delta_gate.weight": ("delta_values", "width"),
    "layers.*.attention.delta_write.weight": ("delta_heads", "width"),
    "layers.*.attention.delta_decay.weight": ("delta_heads", "width"),
    "layers.*.attention.delta_decay_bias": ("delta_heads",),
    "layers.*.attention.delta_decay_log": ("delta_heads",),
    "layers.*.attention.delta_norm.weight": ("delta_value_width",),
    "layers.*.attention.delta_o.weight": ("width", "delta_values"),
    "layers.*.attention.o.weight": ("width", "heads"),
    "layers.*.attention.o.bias": ("width",),
    "layers.*.attention_post_norm.weight": ("width",),
    "layers.*.attention_post_norm.bias": ("width",),
    "layers.*.feedforward_norm.weight": ("width",),
    "layers.*.feedforward_norm.bias": ("width",),
    "layers.*.feedforward_post_norm.weight": ("width",),
    "layers.*.feedforward_post_norm.bias": ("width",),
    "layers.*.feedforward.gate.weight": ("ffn", "width"),
    "layers.*.feedforward.gate.bias": ("ffn",),
    "layers.*.feedforward.up.weight": ("ffn", "width"),
    "layers.*.feedforward.up.bias": ("ffn",),
    "layers.*.feedforward.down.weight": ("width", "ffn"),
    "layers.*.feedforward.down.bias": ("width",),
    "layers.*.feedforward.router.weight": ("experts", "width"),
    "layers.*.feedforward.router.bias": ("experts",),
    f"layers.*.{BALANCE}": ("experts",),
    "layers.*.feedforward.experts.*.gate.weight": ("expert_ffn", "width"),
    "layers.*.feedforward.experts.*.gate.bias": ("expert_ffn",),
    "layers.*.feedforward.experts.*.up.weight": ("expert_ffn", "width"),
    "layers.*.feedforward.experts.*.up.bias": ("expert_ffn",),
    "layers.*.feedforward.experts.*.down.weight": ("width", "expert_ffn"),
    "layers.*.feedforward.experts.*.down.bias": ("width",),
    "layers.*.feedforward.shared.gate.weight": ("shared_ffn", "width"),
    "layers.*.feedforward.shared.up.weight": ("shared_ffn", "width"),
    "layers.*.feedforward.shared.down.weight": ("width", "shared_ffn"),
    "layers.*.inputs.gate.weight": ("layer_input", "width"),
    "layers.*.inputs.projection.weight": ("width", "layer_input"),
    "layers.*.inputs.norm.weight": ("width",),
    f"layers.*.{MULTIPLIER}": ("one",),
    "norm.weight": ("width",),
    "norm.bias": ("width",),
    "head.weight": ("vocabulary", "width"),
    **{
        f"{norm}.{kind}": ("width",)
        for norm in ("auxiliary.*.norm", "ahead.*.hidden_norm", "ahead.*.embedding_norm", "ahead.*.norm")
        for kind in ("weight", "bias")
    },
    "ahead.*.projection.weight": ("width", "joined"),
}
ADAPTER_A, ADAPTER_B = "lora_a", "lora_b"
"""Last names of an adapter's two weights: A [rank, in] reads what the layer reads, B [out, rank] adds to its result."""
_LINEAR_LAYERS = {
    name.removesuffix(".weight"): dims
    for name, dims in _BASE_DIMS.items()
    if name.startswith("layers.")
    and name.endswith(".weight")
    and len(dims) == 2
    and not any(
        part in name for part in (".router.", ".experts.", ".shared.", ".query", ".key_value", ".inputs.", ".delta_")
    )
}
DIMS: dict[str, tuple[Dim, ...]] = {
    **_BASE_DIMS,
    **{f"{layer}.{ADAPTER_A}": ("rank", dims[1]) for layer, dims in _LINEAR_LAYERS.items()},
    **{f"{layer}.{ADAPTER_B}": (dims[0], "rank") for layer, dims in _LINEAR_LAYERS.items()},
}
"""Meaning of each dim, `*` standing for the number of a layer, of an expert in it, or of an objective. `heads` and
`kv_heads` run over heads × head_width rows; of latent attention see parts/latent_attention.py."""

CUTTABLE: frozenset[Dim] = frozenset({
    "heads", "kv_heads", "head_count", "ffn", "expert_ffn", "shared_ffn", "vocabulary", "query_heads",
    "key_value_heads", "queries", "delta_keys", "delta_values", "delta_heads",
})  # fmt: skip
"""Dims that tensor parallelism may split; heads are split between heads, never inside one."""

_LAYER = re.compile(r"^layers\.(\d+)\.")
_OBJECTIVE = re.compile(r"^(auxiliary|ahead)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def pattern_of(name: str) -> str:
    """The row of `DIMS` for a weight: "layers.3.attention.q.weight" -> "layers.*.attention.q.weight"."""
    numbered = _OBJECTIVE.sub(r"\1.*.", _LAYER.sub("layers.*.", name))
    return _EXPERT.sub(".experts.*.", numbered)


def within_layer(name: str) -> str:
    """The name of a weight without its layer: "layers.3.attention.q.weight" -> "attention.q.weight"."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def layer_of(name: str) -> int | None:
    """The global number of the layer that holds a weight; None for embeddings, final norm and head."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    """The number, within its layer, of the expert that holds a weight; None for all other weights."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def auxiliary_head_of(name: str) -> int | None:
    """After how many layers the head in the middle stands that has a weight to itself; None for all other weights."""
    match = _OBJECTIVE.match(name)
    return int(match[2]) if match and match[1] == "auxiliary" else None


def depth_of(name: str) -> int | None:
    """The depth of prediction ahead that has a weight to itself, its layer's aside; None for all other weights."""
    match = _OBJECTIVE.match(name)
    return int(match[2]) if match and match[1] == "ahead" else None


def dims_of(name: str) -> tuple[Dim, ...]:
    """What each dim of a weight means; raises KeyError for a name that the model does not have."""
    return DIMS[pattern_of(name)]


def cut_dim(name: str) -> int | None:
    """The one dim of a weight that may be cut, as an index; None when every rank needs all of it."""
    places = [place for place, dim in enumerate(dims_of(name)) if dim in CUTTABLE]
    return places[0] if places else None


def decays(name: str) -> bool:
    """Whether weight decay applies: to the matrices of linear layers, not to norms, biases and embeddings."""
    return len(dims_of(name)) == 2 and not name.startswith("embed.") and "taps" not in dims_of(name)


def is_hidden_matrix(name: str) -> bool:
    """Whether a weight is a matrix from one hidden layer to the next, which Muon updates as a whole.

    Those are the matrices of attention, feed-forward parts and experts, and the projections of prediction ahead. Not
    the vocabulary's tables, whose rows are tokens, nor a router, whose rows are experts, nor a convolution's taps, nor
    an adapter's two factors, which stand for their product.
    """
    in_between = layer_of(name) is not None or depth_of(name) is not None
    others = ".router." in name or "taps" in dims_of(name) or is_adapter(name)
    return in_between and len(dims_of(name)) == 2 and not others


def is_adapter(name: str) -> bool:
    """Whether a weight is one of an adapter's two."""
    return name.endswith((f".{ADAPTER_A}", f".{ADAPTER_B}"))
