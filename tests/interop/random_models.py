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


def random_config(seed: int) -> Any:
    """A config of one of the families, each in turn."""
    draw = random.Random(seed)
    family = FAMILY_NAMES[seed % len(FAMILY_NAMES)]
    values = gpt2_values(draw) if family == "gpt2" else llama_values(family, draw)
    return CONFIG_MAPPING[family](**values, initializer_range=0.15, attn_implementation="sdpa")


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
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
    return model.eval()
