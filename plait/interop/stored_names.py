"""Where families' weights lie in their files, as data: a table for each way of naming them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from plait.model.names import BALANCE, LAYER_PROJECTION, LAYER_TABLE, MULTIPLIER, expert_of, layer_of, pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredName:
    """Where a weight lies in a family's files: the whole tensor `name` (`*` stands for the layer's number), or its part
    number `part` of `parts` equal ones along the dim of outputs, or one of a `stack`."""

    name: str
    order: Literal["out in", "in out"] = "out in"
    """Order of the tensor's dims; ours is [out, in]."""
    part: int = 0
    parts: int = 1
    stack: tuple[str, ...] = ()
    """Patterns of the weights that lie in the tensor one after the other along the dim of outputs, where these may have
    unlike numbers of outputs (Phi 3's queries, keys and values)."""
    every: int = 1
    """How far apart the outputs of a part lie, from number `part` on: gpt-oss's gates and what they multiply take
    turns."""
    by_expert: Literal["no", "first dim"] = "no"
    """Whether the tensor has one more dim, the first, of experts."""
    by_channel: Literal["no", "middle dim"] = "no"
    """Whether the tensor has one more dim, of one, between outputs and inputs: a convolution of single channels."""
    dtype: Literal["", "F32"] = ""
    """The dtype that this tensor always has in a file; "": the same as the others."""


def _same(name: str) -> dict[str, StoredName]:
    return {kind: StoredName(name=f"{name}.{kind}") for kind in ("weight", "bias")}


def _conv(name: str, part: int = 0, parts: int = 1) -> dict[str, StoredName]:
    """GPT-2's Conv1D, which stores a matrix as [in, out]."""
    return {
        "weight": StoredName(name=f"{name}.weight", order="in out", part=part, parts=parts),
        "bias": StoredName(name=f"{name}.bias", part=part, parts=parts),
    }


def _table(rows: Mapping[str, Mapping[str, StoredName]]) -> dict[str, StoredName]:
    return {f"{ours}.{kind}": stored for ours, kinds in rows.items() for kind, stored in kinds.items()}


_LAYER, _BLOCK = "model.layers.*", "transformer.h.*"
LLAMA_NAMES = _table(
    {
        "embed.tokens": _same("model.embed_tokens"),
        "norm": _same("model.norm"),
        "head": _same("lm_head"),
        "layers.*.attention_norm": _same(f"{_LAYER}.input_layernorm"),
        "layers.*.attention.q": _same(f"{_LAYER}.self_attn.q_proj"),
        "layers.*.attention.k": _same(f"{_LAYER}.self_attn.k_proj"),
        "layers.*.attention.v": _same(f"{_LAYER}.self_attn.v_proj"),
        "layers.*.attention.q_norm": _same(f"{_LAYER}.self_attn.q_norm"),
        "layers.*.attention.k_norm": _same(f"{_LAYER}.self_attn.k_norm"),
        "layers.*.attention.o": _same(f"{_LAYER}.self_attn.o_proj"),
        "layers.*.feedforward_norm": _same(f"{_LAYER}.post_attention_layernorm"),
        "layers.*.feedforward.gate": _same(f"{_LAYER}.mlp.gate_proj"),
        "layers.*.feedforward.up": _same(f"{_LAYER}.mlp.up_proj"),
        "layers.*.feedforward.down": _same(f"{_LAYER}.mlp.down_proj"),
    }
)
_EXPERT_ROW = "layers.*.feedforward.experts.*"


def _attention_of(names: Mapping[str, StoredName]) -> dict[str, StoredName]:
    return {ours: stored for ours, stored in names.items() if ".feedforward." not in ours}


def _expert_names(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, StoredName]:
    return _table(
        {
            "layers.*.feedforward.router": _same(f"{_LAYER}.{router}"),
            f"{_EXPERT_ROW}.gate": _same(f"{_LAYER}.{experts}.*.{gate}"),
            f"{_EXPERT_ROW}.up": _same(f"{_LAYER}.{experts}.*.{up}"),
            f"{_EXPERT_ROW}.down": _same(f"{_LAYER}.{experts}.*.{down}"),
        }
    )


FUSED_EXPERTS = {
    "layers.*.feedforward.router.weight": StoredName(name=f"{_LAYER}.mlp.gate.weight"),
    f"{_EXPERT_ROW}.gate.weight": StoredName(name=f"{_LAYER}.mlp.experts.gate_up_proj", part=0, parts=2),
    f"{_EXPERT_ROW}.up.weight": StoredName(name=f"{_LAYER}.mlp.experts.gate_up_proj", part=1, parts=2),
    f"{_EXPERT_ROW}.down.weight": StoredName(name=f"{_LAYER}.mlp.experts.down_proj"),
}
"""Names of experts' weights as transformers 5 holds them in memory."""
QWEN_MOE_NAMES = {
    **LLAMA_NAMES,
    **_expert_names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
OLMOE_NAMES = {
    **_attention_of(QWEN_MOE_NAMES),
    **_expert_names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "layers.*.attention.queries_norm.weight": StoredName(name=f"{_LAYER}.self_attn.q_norm.weight"),
    "layers.*.attention.keys_norm.weight": StoredName(name=f"{_LAYER}.self_attn.k_norm.weight"),
}
MIXTRAL_NAMES = {
    **_attention_of(LLAMA_NAMES),
    **_expert_names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
}
_LATENTS = {
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "key_value_down": "kv_a_proj_with_mqa",
    "key_value_norm": "kv_a_layernorm",
    "key_value_up": "kv_b_proj",
}
_SHARED = {one: f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")}
DEEPSEEK_NAMES = {
    **QWEN_MOE_NAMES,
    **_table({f"layers.*.attention.{own}": _same(f"{_LAYER}.self_attn.{name}") for own, name in _LATENTS.items()}),
    **_table({f"layers.*.feedforward.shared.{own}": _same(f"{_LAYER}.{name}") for own, name in _SHARED.items()}),
    f"layers.*.{BALANCE}": StoredName(name=f"{_LAYER}.mlp.gate.e_score_correction_bias", dtype="F32"),
}


def _alternating(stored: str, order: Literal["out in", "in out"]) -> dict[str, StoredName]:
    """Gates and what they multiply, by turns, of all experts."""
    return {
        one: StoredName(
            name=f"{_LAYER}.mlp.experts.{stored}", order=order, part=part, parts=2, every=2, by_expert="first dim"
        )
        for part, one in enumerate(("gate", "up"))
    }


GPT_OSS_NAMES = {
    **_attention_of(LLAMA_NAMES),
    **_table({"layers.*.feedforward.router": _same(f"{_LAYER}.mlp.router")}),
    "layers.*.attention.sinks": StoredName(name=f"{_LAYER}.self_attn.sinks"),
    **{f"{_EXPERT_ROW}.{one}.weight": row for one, row in _alternating("gate_up_proj", "in out").items()},
    **{f"{_EXPERT_ROW}.{one}.bias": row for one, row in _alternating("gate_up_proj_bias", "out in").items()},
    f"{_EXPERT_ROW}.down.weight": StoredName(
        name=f"{_LAYER}.mlp.experts.down_proj", order="in out", by_expert="first dim"
    ),
    f"{_EXPERT_ROW}.down.bias": StoredName(name=f"{_LAYER}.mlp.experts.down_proj_bias", by_expert="first dim"),
}
GPT2_NAMES = _table(
    {
        "embed.tokens": _same("transformer.wte"),
        "embed.positions": _same("transformer.wpe"),
        "norm": _same("transformer.ln_f"),
        "head": _same("lm_head"),
        "layers.*.attention_norm": _same(f"{_BLOCK}.ln_1"),
        "layers.*.attention.q": _conv(f"{_BLOCK}.attn.c_attn", 0, 3),
        "layers.*.attention.k": _conv(f"{_BLOCK}.attn.c_attn", 1, 3),
        "layers.*.attention.v": _conv(f"{_BLOCK}.attn.c_attn", 2, 3),
        "layers.*.attention.o": _conv(f"{_BLOCK}.attn.c_proj"),
        "layers.*.feedforward_norm": _same(f"{_BLOCK}.ln_2"),
        "layers.*.feedforward.up": _conv(f"{_BLOCK}.mlp.c_fc"),
        "layers.*.feedforward.down": _conv(f"{_BLOCK}.mlp.c_proj"),
    }
)


def _renamed(names: Mapping[str, StoredName], **rows: str) -> dict[str, StoredName]:
    """A table with other names for some modules of a layer; "" takes a module out. Dots in ours are written `__`."""
    found = dict(names)
    for ours, stored in rows.items():
        pattern = f"layers.*.{ours.replace('__', '.')}"
        for kind in ("weight", "bias"):
            found.pop(f"{pattern}.{kind}", None)
        if stored:
            found |= _table({pattern: _same(f"{_LAYER}.{stored}")})
    return found


def _stacked(names: Mapping[str, StoredName], stored: str, *ours: str) -> dict[str, StoredName]:
    """A table in which some linear layers lie in one tensor."""
    found = dict(names)
    for kind in ("weight", "bias"):
        stack = tuple(f"layers.*.{own}.{kind}" for own in ours)
        found |= {own: StoredName(name=f"{_LAYER}.{stored}.{kind}", stack=stack) for own in stack}
    return found


GEMMA3_NAMES = _renamed(
    LLAMA_NAMES,
    attention_post_norm="post_attention_layernorm",
    feedforward_norm="pre_feedforward_layernorm",
    feedforward_post_norm="post_feedforward_layernorm",
)
GEMMA4_NAMES = {
    **_renamed(
        GEMMA3_NAMES,
        inputs__gate="per_layer_input_gate",
        inputs__projection="per_layer_projection",
        inputs__norm="post_per_layer_input_norm",
    ),
    LAYER_TABLE: StoredName(name="model.embed_tokens_per_layer.weight"),
    LAYER_PROJECTION: StoredName(name="model.per_layer_model_projection.weight"),
    "embed.layer_norm.weight": StoredName(name="model.per_layer_projection_norm.weight"),
    f"layers.*.{MULTIPLIER}": StoredName(name=f"{_LAYER}.layer_scalar"),
}
_DELTA = {
    "gate": "in_proj_z",
    "write": "in_proj_b",
    "decay": "in_proj_a",
    "norm": "norm",
    "o": "out_proj",
}
_DELTA_INPUTS, _DELTA_TAPS = (
    tuple(f"layers.*.attention.delta_{one}{kind}" for one in "qkv") for kind in (".weight", "_taps")
)
QWEN35_NAMES = {
    **LLAMA_NAMES,
    **{own: StoredName(name=f"{_LAYER}.linear_attn.in_proj_qkv.weight", stack=_DELTA_INPUTS) for own in _DELTA_INPUTS},
    **{
        own: StoredName(name=f"{_LAYER}.linear_attn.conv1d.weight", stack=_DELTA_TAPS, by_channel="middle dim")
        for own in _DELTA_TAPS
    },
    **{
        f"layers.*.attention.delta_{own}.weight": StoredName(name=f"{_LAYER}.linear_attn.{name}.weight")
        for own, name in _DELTA.items()
    },
    "layers.*.attention.delta_decay_bias": StoredName(name=f"{_LAYER}.linear_attn.dt_bias"),
    "layers.*.attention.delta_decay_log": StoredName(name=f"{_LAYER}.linear_attn.A_log"),
}
OLMO2_NAMES = _renamed(
    LLAMA_NAMES,
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    feedforward_norm="",
    feedforward_post_norm="post_feedforward_layernorm",
    attention__q_norm="",
    attention__k_norm="",
    attention__queries_norm="self_attn.q_norm",
    attention__keys_norm="self_attn.k_norm",
)
GLM_NAMES = _stacked(LLAMA_NAMES, "mlp.gate_up_proj", "feedforward.gate", "feedforward.up")
GLM4_NAMES = _renamed(
    GLM_NAMES, attention_post_norm="post_self_attn_layernorm", feedforward_post_norm="post_mlp_layernorm"
)
PHI3_NAMES = _stacked(GLM_NAMES, "self_attn.qkv_proj", "attention.q", "attention.k", "attention.v")


def stored_name(names: Mapping[str, StoredName], name: str) -> StoredName:
    """Where our weight `name` lies by a table; raises KeyError for one that the table does not have."""
    return _numbered(names[pattern_of(name)], name)


def fused_name(names: Mapping[str, StoredName], name: str, experts: int) -> StoredName:
    """The stored name of a weight in files that hold all experts' matrices as one tensor."""
    pattern, expert = pattern_of(name), expert_of(name)
    row = _numbered(names[pattern], name)
    if expert is None:
        return row
    return StoredName(name=row.name, part=expert * row.parts + row.part, parts=experts * row.parts)


def _numbered(row: StoredName, name: str) -> StoredName:
    """A row of a table with the numbers of layer and expert in place of its stars."""
    layer, expert = layer_of(name), expert_of(name)
    written = row.name if layer is None else row.name.replace("*", str(layer), 1)
    written = written if expert is None else written.replace("*", str(expert), 1)
    return replace(row, name=written, stack=tuple(one.replace("*", str(layer), 1) for one in row.stack))


def outputs_in(row: StoredName, name: str, sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """(first output of a weight in its tensor, outputs of the whole tensor), given the sizes of all weights."""
    if not row.stack:
        first = row.part if row.every > 1 else row.part * sizes[name][0]
        return first, row.parts * sizes[name][0]
    before = row.stack[: row.stack.index(name)]
    return sum(sizes[one][0] for one in before), sum(sizes[one][0] for one in row.stack)
