"""Random small models of every family, made and saved by transformers, with their configs' odd corners."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SEQUENCE, VOCABULARY = 24, 61
FAMILY_NAMES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
MIXTURE_NAMES = ("mixtral", "olmoe", "qwen3_moe")
LATER_NAMES = (
    "gemma3_text", "olmo2", "olmo3", "phi3", "smollm3", "granite", "ministral3", "glm4", "gemma", "glm", "gemma2",
    "gpt_oss", "gemma4_text", "qwen3_5_text",
)  # fmt: skip
EAGER_NAMES = ("gemma2", "gpt_oss")
"""Families whose classes have no fused attention."""


def random_config(seed: int) -> Any:
    """A config of one of the families, each in turn."""
    draw = random.Random(seed)
    family = FAMILY_NAMES[seed % len(FAMILY_NAMES)]
    values = gpt2_values(draw) if family == "gpt2" else llama_values(family, draw)
    return CONFIG_MAPPING[family](**values, initializer_range=0.15, attn_implementation="sdpa")


def random_later_config(seed: int) -> Any:
    """A config of one of the families with parts of their own, each in turn."""
    draw = random.Random(2000 + seed)
    family = LATER_NAMES[seed % len(LATER_NAMES)]
    values = {**base_values(draw), **LATER_VALUES[family](draw)}
    kernel = "eager" if family in EAGER_NAMES else "sdpa"
    return CONFIG_MAPPING[family](**values, initializer_range=0.15, attn_implementation=kernel)


def base_values(draw: random.Random) -> dict[str, Any]:
    """Sizes of a small decoder; its heads are as wide as the model's width over their number."""
    kv_heads, group, head_dim = draw.choice((1, 2, 3)), draw.choice((1, 2, 3)), draw.choice((4, 6, 8, 16))
    return {
        "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": draw.choice((33, 80)),
        "num_hidden_layers": draw.choice((1, 2, 3, 5)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": draw.choice((SEQUENCE, 4 * SEQUENCE)),
        "rms_norm_eps": draw.choice((1e-5, 1e-6)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": rope_values(draw),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def kinds_values(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    return {"layer_types": draw.choice((None, kinds)), "sliding_window": draw.choice((1, 5, 100))}


def nested_rope(draw: random.Random, full_theta: float, theta: float) -> dict[str, Any]:
    table = {**rope_values(draw), "rope_theta": draw.choice((full_theta, 500.0))}
    return {
        "full_attention": table,
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice((theta, 300.0))},
    }


def gemma3_values(draw: random.Random) -> dict[str, Any]:
    values = base_values(draw)
    heads = values["num_attention_heads"]
    return {
        **values,
        **kinds_values(draw, values),
        "hidden_size": heads * draw.choice((4, 8)),
        "head_dim": draw.choice((4, 8, 16)),
        "rope_parameters": draw.choice((None, nested_rope(draw, 1e6, 1e4))),
        "query_pre_attn_scalar": draw.choice((4, 8, 13, 256)),
        "attention_bias": draw.random() < 0.3,
    }


def olmo_values(draw: random.Random) -> dict[str, Any]:
    return {"attention_bias": draw.random() < 0.5}


def olmo3_values(draw: random.Random) -> dict[str, Any]:
    values = base_values(draw)
    rope = draw.choice((None, nested_rope(draw, 500_000.0, 500_000.0)))
    return {**values, **kinds_values(draw, values), **olmo_values(draw), "rope_parameters": rope}


def phi3_values(draw: random.Random) -> dict[str, Any]:
    values = base_values(draw)
    head_dim = draw.choice((4, 8, 16))
    share = draw.choice((1.0, 0.5, 0.5))
    original = draw.choice((8, 16, SEQUENCE, 2 * SEQUENCE))
    pairs = int(head_dim * share) // 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.choice((1e4, 500.0))}
    if draw.random() < 0.7:
        rope["rope_type"] = "longrope"
        rope |= {name: [draw.uniform(1, 4) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
        rope |= draw.choice(({}, {"attention_factor": 1.2}, {"factor": 4.0}))
    rope["partial_rotary_factor"] = share
    return {
        **values,
        "hidden_size": values["num_attention_heads"] * head_dim,
        "sliding_window": draw.choice((None, 1, 5, 100)),
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def smollm3_values(draw: random.Random) -> dict[str, Any]:
    values = base_values(draw)
    layers, windowed = values["num_hidden_layers"], draw.random() < 0.3
    rotated = [draw.choice((0, 1)) for _ in range(layers)]
    return {
        **values,
        "no_rope_layers": draw.choice((None, rotated)),
        "no_rope_layer_interval": draw.choice((1, 2, 4)),
        "use_sliding_window": windowed,
        "sliding_window": draw.choice((1, 5)) if windowed else None,
        "attention_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.3,
    }


def granite_values(draw: random.Random) -> dict[str, Any]:
    return {
        "embedding_multiplier": draw.choice((1.0, 12.0)),
        "logits_scaling": draw.choice((1.0, 0.3, 8.0)),
        "residual_multiplier": draw.choice((1.0, 0.22)),
        "attention_multiplier": draw.choice((1.0, 0.015625, 0.25)),
        "attention_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.3,
    }


def ministral3_values(draw: random.Random) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": draw.choice((0.1, 0.5, 0.0))}
    return {
        "head_dim": draw.choice((4, 8, 16)),
        "sliding_window": draw.choice((None, 1, 5, 100)),
        "rope_parameters": {**rope, "original_max_position_embeddings": draw.choice((5, 8, 16))},
    }


def glm4_values(draw: random.Random) -> dict[str, Any]:
    rope = {**rope_values(draw), **draw.choice(({}, {"partial_rotary_factor": 1.0}))}
    return {"head_dim": draw.choice((4, 8, 16)), "attention_bias": draw.random() < 0.5, "rope_parameters": rope}


def gemma_values(draw: random.Random) -> dict[str, Any]:
    return {"head_dim": draw.choice((4, 8, 16)), "attention_bias": draw.random() < 0.3}


def gemma2_values(draw: random.Random) -> dict[str, Any]:
    """Caps are low, so that random scores reach them."""
    values = base_values(draw)
    return {
        **values,
        **kinds_values(draw, values),
        "hidden_size": values["num_attention_heads"] * draw.choice((4, 8)),
        "head_dim": draw.choice((4, 8, 16)),
        "query_pre_attn_scalar": draw.choice((4, 8, 13, 256)),
        "attention_bias": draw.random() < 0.3,
        "attn_logit_softcapping": draw.choice((None, 0.3, 2.0, 50.0)),
        "final_logit_softcapping": draw.choice((None, 0.5, 3.0, 30.0)),
    }


def gemma4_values(draw: random.Random) -> dict[str, Any]:
    """Layers of both kinds come before those that share keys."""
    values = base_values(draw)
    heads, sharing = values["num_attention_heads"], draw.choice((0, 1, 2, 3))
    own = [draw.choice(("sliding_attention", "full_attention")) for _ in range(draw.choice((0, 1, 2)))]
    own += draw.choice((["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]))
    kinds = [*own, *(draw.choice(("sliding_attention", "full_attention")) for _ in range(sharing))]
    kinds[-1] = "full_attention"
    if draw.random() < 0.2:
        kinds = ["full_attention"] * len(kinds)
    rope = {
        "full_attention": {
            "rope_type": draw.choice(("proportional", "proportional", "default")),
            "rope_theta": draw.choice((1e6, 500.0)),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice((1e4, 300.0))},
    }
    if rope["full_attention"]["rope_type"] == "proportional":
        rope["full_attention"] |= draw.choice(({}, {"partial_rotary_factor": draw.choice((0.25, 0.5, 0.7))}))
        rope["full_attention"] |= draw.choice(({}, {"factor": 4.0}))
    return {
        **values,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": draw.choice((1, 5, 100)),
        "num_kv_shared_layers": sharing,
        "use_double_wide_mlp": draw.random() < 0.5,
        "hidden_size": heads * draw.choice((4, 8)),
        "head_dim": draw.choice((4, 8, 16)),
        "global_head_dim": draw.choice((4, 8, 16)),
        "attention_k_eq_v": draw.random() < 0.4,
        "num_global_key_value_heads": draw.choice((None, 1, heads)),
        # transformers fails where layers share keys and have no inputs of their own
        "hidden_size_per_layer_input": draw.choice((6, 8) if sharing else (0, 6)),
        "vocab_size_per_layer_input": VOCABULARY,
        "attention_bias": draw.random() < 0.3,
        "final_logit_softcapping": draw.choice((None, 3.0, 30.0)),
        "rope_parameters": draw.choice((None, rope, rope)),
    }


def qwen35_values(draw: random.Random) -> dict[str, Any]:
    values, key_heads = base_values(draw), draw.choice((1, 2, 3))
    layers = values["num_hidden_layers"]
    # A cache of transformers needs a layer with keys.
    kinds = [*(draw.choice(("linear_attention", "full_attention")) for _ in range(layers - 1)), "full_attention"]
    rope = {**rope_values(draw), **draw.choice(({}, {"partial_rotary_factor": 0.5}))}
    return {
        **values,
        "layer_types": draw.choice((None, kinds)) if layers > 3 else kinds,
        "head_dim": draw.choice((8, 16)),
        "attention_bias": draw.random() < 0.3,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice((1, 2)),
        "linear_key_head_dim": draw.choice((4, 8)),
        "linear_value_head_dim": draw.choice((4, 8, 12)),
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "rope_parameters": rope,
    }


def gpt_oss_values(draw: random.Random) -> dict[str, Any]:
    values, experts = base_values(draw), draw.choice((2, 4, 5))
    return {
        **values,
        **kinds_values(draw, values),
        "head_dim": draw.choice((4, 8, 16)),
        "attention_bias": draw.random() < 0.7,
        "num_local_experts": experts,
        "num_experts_per_tok": draw.choice((1, 2, experts)),
        "intermediate_size": draw.choice((7, 24, 32)),
        "rope_parameters": draw.choice((None, values["rope_parameters"])),
    }


LATER_VALUES = {
    "gemma3_text": gemma3_values,
    "olmo2": olmo_values,
    "olmo3": olmo3_values,
    "phi3": phi3_values,
    "smollm3": smollm3_values,
    "granite": granite_values,
    "ministral3": ministral3_values,
    "glm4": glm4_values,
    "gemma": gemma_values,
    "glm": glm4_values,
    "gemma2": gemma2_values,
    "gpt_oss": gpt_oss_values,
    "gemma4_text": gemma4_values,
    "qwen3_5_text": qwen35_values,
}


def random_mixture_config(seed: int) -> Any:
    """A config of one of the families with experts, each in turn."""
    draw = random.Random(1000 + seed)
    family = MIXTURE_NAMES[seed % len(MIXTURE_NAMES)]
    values = llama_values("mistral", draw) | mixture_values(family, draw)
    if family == "olmoe":
        values.pop("head_dim", None)  # its class computes it, and takes no other
        values.pop("sliding_window")
    if family == "mixtral":  # its class stretches no rotary positions of heads whose width is left open
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return CONFIG_MAPPING[family](**values, initializer_range=0.15, attn_implementation="sdpa")


def mixture_values(family: str, draw: random.Random) -> dict[str, Any]:
    experts = draw.choice((2, 4, 5, 8))
    values: dict[str, Any] = {"num_experts_per_tok": draw.choice((1, 2, experts))}
    values["num_local_experts" if family == "mixtral" else "num_experts"] = experts
    if family != "mixtral":
        values |= {"norm_topk_prob": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}
    if family == "olmoe":
        # Its norms of queries and keys are as wide as the model.
        heads = draw.choice((1, 2, 4))
        values |= {"num_attention_heads": heads, "num_key_value_heads": draw.choice((1, heads))}
        values["hidden_size"] = heads * draw.choice((4, 8))
    if family == "qwen3_moe":
        layers, step = draw.choice((1, 2, 3, 4)), draw.choice((1, 1, 2))
        layers = max(layers, step)
        values |= {
            "num_hidden_layers": layers,
            "decoder_sparse_step": step,
            "moe_intermediate_size": draw.choice((7, 24)),
        }
        values["mlp_only_layers"] = draw.choice(([], [0])) if step == 1 and layers > 1 else []
        values |= {"use_sliding_window": draw.random() < 0.5, "sliding_window": draw.choice((1, 5, 100))}
    return values


def gpt2_values(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((1, 3, 5, 6))
    return {
        "n_head": heads,
        "n_embd": heads * draw.choice((4, 7, 8)),
        "n_layer": draw.choice((1, 2, 3)),
        "n_inner": draw.choice((None, 33, 80)),
        "n_positions": draw.choice((SEQUENCE, SEQUENCE + 9)),
        "vocab_size": VOCABULARY,
        "activation_function": draw.choice(("gelu_new", "gelu_pytorch_tanh")),
        "tie_word_embeddings": draw.random() < 0.5,
        "scale_attn_by_inverse_layer_idx": draw.random() < 0.5,
        "layer_norm_epsilon": draw.choice((1e-5, 1e-6)),
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


def llama_values(family: str, draw: random.Random) -> dict[str, Any]:
    kv_heads, group, head_dim = draw.choice((1, 2, 3)), draw.choice((1, 2, 3)), draw.choice((4, 6, 8, 16))
    heads, layers = kv_heads * group, draw.choice((1, 2, 3, 4))
    own_width = family == "qwen3" or (family in ("llama", "mistral") and draw.random() < 0.5)
    values: dict[str, Any] = {
        "hidden_size": heads * draw.choice((4, 8)) if own_width else heads * head_dim,
        "intermediate_size": draw.choice((33, 80)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": draw.choice((SEQUENCE, 4 * SEQUENCE)),
        "rms_norm_eps": draw.choice((1e-5, 1e-6)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": rope_values(draw),
    }
    if own_width:
        values["head_dim"] = head_dim
    if family in ("llama", "qwen3"):
        values["attention_bias"] = draw.random() < 0.5
    if family == "llama":
        values["mlp_bias"] = draw.random() < 0.5
    if family == "mistral":
        values["sliding_window"] = draw.choice((None, 1, 5, 100))
    if family in ("qwen2", "qwen3"):
        values |= {"use_sliding_window": draw.random() < 0.7, "sliding_window": draw.choice((1, 5, 100))}
        values["max_window_layers"] = draw.choice((0, 1, layers))
    return values


def rope_values(draw: random.Random) -> dict[str, Any]:
    theta, kind = draw.choice((10_000.0, 500.0, 1e6)), draw.choice(("default", "linear", "llama3", "yarn", "yarn"))
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        values["factor"] = draw.choice((2.0, 4.0, 8.0))
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = draw.choice((8, 16))
    if kind == "llama3":
        values |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice((2.0, 4.0))}
    if kind == "yarn" and draw.random() < 0.5:
        values |= draw.choice(
            ({"attention_factor": 1.3}, {"beta_fast": 4.0, "beta_slow": 2.0}, {"mscale": 0.7, "mscale_all_dim": 1.2})
        )
    return values


def random_model(config: Any, seed: int = 5) -> PreTrainedModel:
    """A model of a config whose norms and biases are random, too."""
    torch.manual_seed(seed)
    if config.model_type == "gpt_oss":
        config._experts_implementation = "eager"  # torch's grouped product takes no odd sizes
    model = AutoModelForCausalLM.from_config(config)
    is_gemma4 = "Gemma4" in type(model).__name__  # whose norms multiply by their weights
    for name, scalar in model.named_buffers():
        if name.endswith("layer_scalar"):
            nn.init.uniform_(scalar, 0.5, 1.5)
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "gate_up_proj_bias", "down_proj_bias")) and "GptOss" in type(model).__name__:
            nn.init.normal_(weight, std=3.0)  # so that some are clamped
        if weight.ndim == 1:
            own = type(model).__name__
            plain = is_gemma4 or name.endswith("linear_attn.norm.weight")
            offset = own.startswith(("Gemma", "Qwen3_5")) and not plain
            centred = offset or name.endswith(("bias", "sinks"))
            nn.init.normal_(weight, mean=0.0 if centred else 1.0, std=0.1)
    return model.eval()
