"""Families of models whose files plait reads and writes, as data: a row for each value of `model_type`.

docs/guide-family.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.interop.configs.latent_values import LATENT_KINDS, V2_LATENT_AND_EXPERTS, V3_LATENT_AND_EXPERTS
from plait.interop.configs.mixture_values import experts
from plait.interop.configs.parts import (
    GPT2_PARTS,
    HEAD_WIDTH,
    HEADS_DIVIDE_WIDTH,
    REST,
    ROOT_OF_WIDTH,
    SILU,
    SIZES,
    ConfigPart,
    activation,
    biases,
    cap,
    fixed,
    number,
    only,
    query_scalar,
    score_multiplier,
    unrotated_layers,
)
from plait.interop.configs.rope_values import RopeRules, rotary, rotary_by_kind
from plait.interop.configs.window_values import (
    NO_WINDOWS,
    window_by_kind,
    window_by_period,
    window_if_used,
    window_of_all,
    window_of_some_or_all,
    window_where_not_rotated,
)
from plait.interop.stored_names import (
    DEEPSEEK_NAMES,
    FUSED_EXPERTS,
    GEMMA3_NAMES,
    GLM4_NAMES,
    GLM_NAMES,
    GPT2_NAMES,
    GPT_OSS_NAMES,
    LLAMA_NAMES,
    MIXTRAL_NAMES,
    OLMO2_NAMES,
    OLMOE_NAMES,
    PHI3_NAMES,
    QWEN_MOE_NAMES,
    StoredName,
)
from plait.model.shape import CLAMPED_AT, CLAMPED_SLOPE


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One value of `model_type` in config.json."""

    architecture: str
    """The class of transformers with the head."""
    prefix: str
    """Prefix of the names; files of the bare decoder lack it."""
    names: Mapping[str, StoredName]
    """Maps our pattern of a weight's name (plait.model.names) to its place in the files; a second `*` is the expert's
    number."""
    fused: Mapping[str, StoredName] = field(default_factory=dict[str, StoredName])
    """Names in files with one tensor [experts, outputs, inputs] for all experts' matrices of a layer, for the weights
    that are stored differently there; parts are those of one expert."""
    packed: tuple[str, ...] = ()
    """The quant_methods of a quantization_config whose packed experts plait reads (mxfp4.py)."""
    ignored: tuple[str, ...] = ()
    """Suffixes of names that are not weights: tables and masks in older files."""
    ahead: str = ""
    """Name of a layer that is not read if its number is beyond the last layer: a module that predicts further tokens;
    empty if there are none."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of keys that config.json lacks."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of keys, from the attribute_map of transformers' class."""
    parts: tuple[ConfigPart, ...]
    """The contents of its config.json: the fields of a ModelShape that each key sets, and those that all its models
    share."""


def _family(
    architecture: str,
    names: Mapping[str, StoredName],
    *own: ConfigPart,
    head: ConfigPart = HEAD_WIDTH,
    activation: ConfigPart = SILU,
    fused: Mapping[str, StoredName] | None = None,
    ahead: str = "",
    packed: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    **defaults: Any,
) -> Family:
    """A decoder with Llama's keys for sizes, and its own parts and defaults."""
    return Family(
        architecture=architecture,
        prefix="model.",
        names=names,
        fused=fused or {},
        packed=packed,
        ignored=(".rotary_emb.inv_freq",),
        ahead=ahead,
        defaults=defaults,
        aliases=aliases or {},
        parts=(*SIZES, head, activation, *REST, *own),
    )


_QWEN: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_EXPERTS = {"num_local_experts": "num_experts"}
_EIGHT: dict[str, Any] = {"num_experts_per_tok": 8, "norm_topk_prob": False}
_GEMMA: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256}
_GEMMA_2B: dict[str, Any] = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""The sizes of Gemma 2's 2B model, which transformers gives to Gemma 3, too."""
_GLM: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA_NORMS = fixed(norm_weight="one plus")
_HEAD_NORMS, _WIDE_NORMS = fixed(qk_norm=True), fixed(qk_norm=True, qk_norm_width="all heads")
_BIASED = biases(attention="attention_bias")
_NO_BIASES = fixed(bias="none")
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
        parts=GPT2_PARTS,
    ),
    "llama": _family(
        "LlamaForCausalLM",
        LLAMA_NAMES,
        biases(attention="attention_bias", feedforward="mlp_bias"),
        NO_WINDOWS,
        rotary(RopeRules()),
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
    ),
    "mistral": _family(
        "MistralForCausalLM",
        LLAMA_NAMES,
        _NO_BIASES,
        window_of_some_or_all(),
        rotary(RopeRules()),
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        sliding_window=4096,
        num_key_value_heads=8,
    ),
    "qwen2": _family(
        "Qwen2ForCausalLM",
        LLAMA_NAMES,
        fixed(bias="qkv"),
        window_if_used(),
        rotary(RopeRules()),
        **_QWEN,
        num_key_value_heads=32,
    ),
    "qwen3": _family(
        "Qwen3ForCausalLM",
        LLAMA_NAMES,
        _HEAD_NORMS,
        _BIASED,
        window_if_used(),
        rotary(RopeRules()),
        **_QWEN,
        num_key_value_heads=32,
        head_dim=128,
    ),
    "mixtral": _family(
        "MixtralForCausalLM",
        MIXTRAL_NAMES,
        experts("num_local_experts", width="intermediate_size"),
        _NO_BIASES,
        window_of_all(),
        rotary(RopeRules(theta=1e6)),
        fused=FUSED_EXPERTS,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        aliases={"num_experts": "num_local_experts"},
        num_local_experts=8,
        num_key_value_heads=8,
        num_experts_per_tok=2,
    ),
    "olmoe": _family(
        "OlmoeForCausalLM",
        OLMOE_NAMES,
        _WIDE_NORMS,
        experts("num_experts", width="intermediate_size", normalizes="norm_topk_prob"),
        _BIASED,
        NO_WINDOWS,
        rotary(RopeRules()),
        fused=FUSED_EXPERTS,
        aliases=_EXPERTS,
        **_EIGHT,
        num_experts=64,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "qwen3_moe": _family(
        "Qwen3MoeForCausalLM",
        QWEN_MOE_NAMES,
        _HEAD_NORMS,
        experts("num_experts", width="moe_intermediate_size", normalizes="norm_topk_prob", sparse="listed"),
        _BIASED,
        window_if_used(of_all=True),
        rotary(RopeRules()),
        fused=FUSED_EXPERTS,
        aliases=_EXPERTS,
        **_QWEN,
        **_EIGHT,
        num_experts=128,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "gpt_oss": _family(
        "GptOssForCausalLM",
        GPT_OSS_NAMES,
        experts("num_local_experts", width="intermediate_size", biased=True),
        fixed(attention_sinks=True),
        _BIASED,
        window_by_kind(lambda layer: layer % 2 == 0),
        rotary(RopeRules(theta=150_000.0, table=_GPT_OSS_ROPE)),
        only("swiglu_alpha", CLAMPED_SLOPE),
        only("swiglu_limit", CLAMPED_AT, round(CLAMPED_AT)),
        activation=activation("hidden_act", "clamped swiglu", "silu"),
        packed=("mxfp4",),
        aliases={"num_experts": "num_local_experts"},
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
        hidden_act="silu",
    ),
    "deepseek_v3": _family(
        "DeepseekV3ForCausalLM",
        DEEPSEEK_NAMES,
        _NO_BIASES,
        NO_WINDOWS,
        rotary(RopeRules(kinds=LATENT_KINDS)),
        V3_LATENT_AND_EXPERTS,
        head=fixed(),
        fused=FUSED_EXPERTS,
        ahead="model.layers.*",
        aliases={"num_local_experts": "n_routed_experts"},
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        first_k_dense_replace=3,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        q_lora_rank=1536,
    ),
    "deepseek_v2": _family(
        "DeepseekV2ForCausalLM",
        DEEPSEEK_NAMES,
        _NO_BIASES,
        NO_WINDOWS,
        rotary(RopeRules(kinds=LATENT_KINDS)),
        V2_LATENT_AND_EXPERTS,
        HEADS_DIVIDE_WIDTH,
        head=fixed(),
        fused=FUSED_EXPERTS,
        aliases={"num_experts": "n_routed_experts"},
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        first_k_dense_replace=0,
        n_routed_experts=64,
        n_shared_experts=2,
        routed_scaling_factor=1.0,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=1407,
    ),
    "gemma2": _family(
        "Gemma2ForCausalLM",
        GEMMA3_NAMES,
        _GEMMA_NORMS,
        fixed(norm_places="both"),
        ROOT_OF_WIDTH,
        query_scalar(),
        _BIASED,
        window_by_kind(lambda layer: layer % 2 == 0),
        rotary(RopeRules()),
        cap("attn_logit_softcapping", "attention_cap"),
        cap("final_logit_softcapping", "logit_cap"),
        HEADS_DIVIDE_WIDTH,
        only("use_bidirectional_attention", None, False),
        activation=activation("hidden_activation", "geglu", "gelu_pytorch_tanh"),
        **_GEMMA_2B,
        max_position_embeddings=8192,
        vocab_size=256_000,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3_text": _family(
        "Gemma3ForCausalLM",
        GEMMA3_NAMES,
        _GEMMA_NORMS,
        _HEAD_NORMS,
        fixed(norm_places="both"),
        ROOT_OF_WIDTH,
        query_scalar(),
        _BIASED,
        window_by_period(),
        rotary_by_kind(theta=1e6, window_theta=1e4, window_key="rope_local_base_freq"),
        only("attn_logit_softcapping", None),
        only("final_logit_softcapping", None),
        only("use_bidirectional_attention", False, None),
        activation=activation("hidden_activation", "geglu", "gelu_pytorch_tanh"),
        **_GEMMA_2B,
        max_position_embeddings=131072,
        vocab_size=262_208,
        sliding_window_pattern=6,
    ),
    "olmo2": _family(
        "Olmo2ForCausalLM",
        OLMO2_NAMES,
        _WIDE_NORMS,
        fixed(norm_places="after"),
        _BIASED,
        NO_WINDOWS,
        rotary(RopeRules()),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    ),
    "olmo3": _family(
        "Olmo3ForCausalLM",
        OLMO2_NAMES,
        _WIDE_NORMS,
        fixed(norm_places="after"),
        _BIASED,
        window_by_kind(lambda layer: (layer + 1) % 4 != 0),
        rotary_by_kind(theta=500_000.0, window_theta=500_000.0),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        sliding_window=4096,
    ),
    "phi3": _family(
        "Phi3ForCausalLM",
        PHI3_NAMES,
        _NO_BIASES,
        window_of_all(),
        rotary(RopeRules(kinds=("default", "longrope"), renamed={"su": "longrope", "yarn": "longrope"}, share=1.0)),
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "smollm3": _family(
        "SmolLM3ForCausalLM",
        LLAMA_NAMES,
        biases(attention="attention_bias", feedforward="mlp_bias"),
        unrotated_layers(),
        window_where_not_rotated(),
        rotary(RopeRules(theta=2e6)),
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        num_key_value_heads=4,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    "granite": _family(
        "GraniteForCausalLM",
        LLAMA_NAMES,
        number("embedding_multiplier", "embedding_multiplier"),
        number("residual_multiplier", "residual_multiplier"),
        number("logits_scaling", "logit_divisor"),
        score_multiplier("attention_multiplier"),
        biases(attention="attention_bias", feedforward="mlp_bias"),
        NO_WINDOWS,
        rotary(RopeRules()),
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        attention_multiplier=1.0,
    ),
    "ministral3": _family(
        "Ministral3ForCausalLM",
        LLAMA_NAMES,
        _NO_BIASES,
        window_of_all(),
        rotary(RopeRules(grows=True)),
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "gemma": _family(
        "GemmaForCausalLM",
        LLAMA_NAMES,
        _GEMMA_NORMS,
        ROOT_OF_WIDTH,
        _BIASED,
        NO_WINDOWS,
        rotary(RopeRules()),
        only("hidden_activation", None, "gelu_pytorch_tanh", write=False),
        only("use_bidirectional_attention", None, False),
        activation=activation("hidden_act", "geglu", "gelu_pytorch_tanh", "gelu"),
        **_GEMMA,
        max_position_embeddings=8192,
        num_key_value_heads=16,
        hidden_act="gelu_pytorch_tanh",
    ),
    "glm": _family(
        "GlmForCausalLM",
        GLM_NAMES,
        fixed(rotary_pairs="neighbors"),
        biases(attention="attention_bias", of_attention="qkv"),
        NO_WINDOWS,
        rotary(RopeRules(share=0.5)),
        **_GLM,
    ),
    "glm4": _family(
        "Glm4ForCausalLM",
        GLM4_NAMES,
        fixed(norm_places="both", rotary_pairs="neighbors"),
        biases(attention="attention_bias", of_attention="qkv"),
        NO_WINDOWS,
        rotary(RopeRules(share=0.5)),
        **_GLM,
    ),
}
MODEL_FAMILIES["kimi_k2"] = MODEL_FAMILIES["deepseek_v3"]
"""By `model_type`; SmolLM2 is a llama, Phi 4 a phi3. Defaults as in transformers 5.24."""
