"""Fine-tuning by adapters on one GPU as PEFT's users write it: transformers' Llama in bf16 with 8B frozen weights,
LoRA of rank 16 on all linear layers, each layer compiled, in gpu_loop's steps."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.gpu_loop import attention_flops, ffn_of, main
from benchmarks.workload import Workload

RANK, ALPHA = 16, 32
QUERIES_OF_A_KEY = 4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build_lora(size: str, shape: Workload) -> tuple[nn.Module, int]:
    """PEFT's model, and its matmul FLOPs a token: a frozen matrix is multiplied twice in place of three times."""
    torch.manual_seed(shape.seed)
    ffn, kv_heads = ffn_of(size, shape), shape.heads // QUERIES_OF_A_KEY
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=kv_heads, max_position_embeddings=shape.sequence,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    adapters = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
    attention = 2 * shape.width**2 * (1 + 1 / QUERIES_OF_A_KEY)
    matrices = shape.layers * (attention + 3 * shape.width * ffn) + shape.width * shape.vocabulary
    return get_peft_model(base, adapters), round(4 * matrices) + attention_flops(shape)


class ByWindow(nn.Module):
    """Returns the mean loss of inputs and targets that are apart already, as gpu_loop's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        logits_btv = self.model(input_ids=inputs_bt).logits
        return nn.functional.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def compiled_layers(model: nn.Module, flags: argparse.Namespace) -> tuple[nn.Module, AbstractContextManager[object]]:
    """Each layer compiled; the adapters are float32 under autocast, as PEFT makes them."""
    if flags.compile == "model":
        for layer in model.get_submodule("base_model.model.model.layers").children():
            layer.compile()
    context = torch.autocast(flags.device, torch.bfloat16) if flags.device == "cuda" else nullcontext()
    return ByWindow(model), context


if __name__ == "__main__":
    main(compiled_layers, build_lora)
