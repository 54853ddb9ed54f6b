"""Families of models whose files plait reads and writes, as data: names of weights, and what a config leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from plait.model.names import BALANCE, expert_of, layer_of, pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredName:
    """Where a weight lies in a family's files: the whole tensor `name` (`*` stands for the layer's number), or its part
    number `part` of `parts` equal ones along the dim of outputs."""

    name: str
    order: Literal["out in", "in out"] = "out in"
    """Order of the tensor's dims; ours is [out, in]."""
    part: int = 0
    parts: int = 1
    dtype: Literal["", "F32"] = ""
    """In what it is written whatever the others are written in; "": as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One value of `model_type` in config.json."""

    architecture: str
    """The class of transformers that has the head."""
    prefix: str
    """How names begin; files of the bare decoder lack it."""
    names: Mapping[str, StoredName]
    """Our pattern of a weight's name (plait.model.names) to where it lies; a second `*` is the expert's number."""
    fused: Mapping[str, StoredName] = field(default_factory=dict[str, StoredName])
    """Names in files that hold all experts' matrices of a layer as one tensor [experts, outputs, inputs], for the
    weights that lie elsewhere there; parts are those of one expert."""
    ignored: tuple[str, ...] = ()
    """Ends of names that are no weights: tables and masks that older files hold."""
    ahead: str = ""
    """Name of a layer whose numbers from the last layer's on are modules that predict further tokens, which are not
    read; "": there are none."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of keys that config.json leaves out."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of keys, as transformers' class has them in its attribute_map."""
    default_theta: float = 10_000.0
    """rope_theta where config.json has none."""


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


def _like_llama(
    architecture: str,
    names: Mapping[str, StoredName],
    fused: Mapping[str, StoredName] | None = None,
    *,
    ahead: str = "",
    aliases: Mapping[str, str] | None = None,
    default_theta: float = 10_000.0,
    **defaults: Any,
) -> Family:
    return Family(
        architecture=architecture,
        prefix="model.",
        names=names,
        fused=fused or {},
        ignored=(".rotary_emb.inv_freq",),
        ahead=ahead,
        defaults=defaults,
        aliases=aliases or {},
        default_theta=default_theta,
    )


_QWEN_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_EXPERTS = {"num_local_experts": "num_experts"}
_EIGHT: dict[str, Any] = {"num_experts_per_tok": 8, "norm_topk_prob": False}
_DEEPSEEK_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "first_k_dense_replace": 3, "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
}  # fmt: skip
MODEL_FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        names=GPT2_NAMES,
        ignored=(".attn.bias", ".attn.masked_bias"),
        defaults={
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "llama": _like_llama("LlamaForCausalLM", LLAMA_NAMES, max_position_embeddings=2048, rms_norm_eps=1e-6),
    "mistral": _like_llama(
        "MistralForCausalLM",
        LLAMA_NAMES,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        sliding_window=4096,
        num_key_value_heads=8,
    ),
    "qwen2": _like_llama("Qwen2ForCausalLM", LLAMA_NAMES, **_QWEN_DEFAULTS, num_key_value_heads=32),
    "qwen3": _like_llama("Qwen3ForCausalLM", LLAMA_NAMES, **_QWEN_DEFAULTS, num_key_value_heads=32, head_dim=128),
    "mixtral": _like_llama(
        "MixtralForCausalLM",
        MIXTRAL_NAMES,
        FUSED_EXPERTS,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        default_theta=1e6,
        aliases={"num_experts": "num_local_experts"},
        num_local_experts=8,
        num_key_value_heads=8,
        num_experts_per_tok=2,
    ),
    "olmoe": _like_llama(
        "OlmoeForCausalLM",
        OLMOE_NAMES,
        FUSED_EXPERTS,
        aliases=_EXPERTS,
        **_EIGHT,
        num_experts=64,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "qwen3_moe": _like_llama(
        "Qwen3MoeForCausalLM",
        QWEN_MOE_NAMES,
        FUSED_EXPERTS,
        aliases=_EXPERTS,
        **_QWEN_DEFAULTS,
        **_EIGHT,
        num_experts=128,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "deepseek_v3": _like_llama(
        "DeepseekV3ForCausalLM",
        DEEPSEEK_NAMES,
        FUSED_EXPERTS,
        ahead=_LAYER,
        aliases={"num_local_experts": "n_routed_experts"},
        **_DEEPSEEK_DEFAULTS,
    ),
}
"""By `model_type`; SmolLM2 is a llama. The defaults are those of transformers 5.24."""


def stored_name(family: Family, name: str) -> StoredName:
    """Where our weight `name` lies in a family's files; raises KeyError for one that the family does not have."""
    return _numbered(family.names[pattern_of(name)], name)


def fused_name(family: Family, name: str, experts: int) -> StoredName:
    """The stored name of a weight in files that hold all experts' matrices as one tensor."""
    pattern, expert = pattern_of(name), expert_of(name)
    row = _numbered({**family.names, **family.fused}[pattern], name)
    if expert is None:
        return row
    return StoredName(name=row.name, part=expert * row.parts + row.part, parts=experts * row.parts)


def _numbered(row: StoredName, name: str) -> StoredName:
    """A row of the table with the numbers of layer and expert in place of its stars."""
    layer, expert = layer_of(name), expert_of(name)
    written = row.name if layer is None else row.name.replace("*", str(layer), 1)
    written = written if expert is None else written.replace("*", str(expert), 1)
    return replace(row, name=written)
