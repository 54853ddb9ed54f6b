"""Hugging Face's Trainer on one GPU: its own GPT-2 or Llama, in bf16, compiled; sizes and flags of gpu_loop. "LoRA 8B"
is PEFT's model of gpu_lora.py, not compiled, as its users run it."""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from benchmarks.peers.gpu_loop import (
    Measured,
    allowed_attention,
    answer,
    attention_flops,
    ffn_of,
    figures,
    forget_peak,
    gpu_flags,
    mark,
    workload_for,
)
from benchmarks.peers.gpu_lora import build_lora
from benchmarks.workload import Workload


class RandomWindows(Dataset):
    """Windows of random tokens, always the same ones."""

    def __init__(self, shape: Workload, count: int) -> None:
        self._windows = torch.randint(shape.vocabulary, (8, shape.sequence))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._windows[index % len(self._windows)]
        return {"input_ids": window, "labels": window}


class Marks(TrainerCallback):
    """Marks the device's time at the end of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[Any]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        forget_peak(self.device)
        self.marks.append(mark(self.device))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.marks.append(mark(self.device))


def build(size: str, shape: Workload) -> tuple[torch.nn.Module, int]:
    """transformers' own model, and its matmul FLOPs a token, as gpu_loop counts them."""
    torch.manual_seed(shape.seed)
    if size == "125M":
        config = GPT2Config(
            vocab_size=shape.vocabulary, n_positions=shape.sequence, n_embd=shape.width, n_layer=shape.layers,
            n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            activation_function="gelu_pytorch_tanh",
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        return GPT2LMHeadModel(config), shape.flops_per_token
    if size == "LoRA 8B":
        return build_lora(size, shape)
    ffn = ffn_of(size, shape)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, max_position_embeddings=shape.sequence, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    matrices = shape.layers * (4 * shape.width**2 + 3 * shape.width * ffn) + shape.width * shape.vocabulary
    return LlamaForCausalLM(config), 6 * matrices + attention_flops(shape)


def train(flags: argparse.Namespace, shape: Workload, folder: str) -> Measured:
    """Its documented settings for speed, at the same mathematics as the others'."""
    with torch.device(flags.device):
        model, flops = build(flags.size, shape)
    steps = flags.warmup + flags.steps
    arguments = Arguments(
        output_dir=folder, max_steps=steps, bf16=True,
        per_device_train_batch_size=shape.sequences_per_rank // flags.micro_batches,
        gradient_accumulation_steps=flags.micro_batches,
        use_cpu=flags.device == "cpu", optim="adamw_torch_fused",
        torch_compile=flags.compile == "model" and flags.size != "LoRA 8B",
        learning_rate=shape.learning_rate, lr_scheduler_type="constant", adam_beta1=shape.beta1,
        adam_beta2=shape.beta2, weight_decay=shape.weight_decay, max_grad_norm=shape.clip, logging_steps=steps - 1,
        logging_nan_inf_filter=False, save_strategy="no", report_to="none", disable_tqdm=True, tf32=None,
        dataloader_num_workers=0 if flags.device == "cpu" else 2,
    )  # fmt: skip
    marks = Marks(torch.device(flags.device))
    data = RandomWindows(shape, steps * shape.sequences_per_rank)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[marks])
    with allowed_attention(flags):
        done = trainer.train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mean_loss = float(done.training_loss)  # it tells no step's own
    return figures(flags, shape, marks.marks, flops=flops, parameters=parameters, losses=(mean_loss, mean_loss))


def main() -> None:
    flags = gpu_flags()
    shape = workload_for(flags)
    with tempfile.TemporaryDirectory() as folder:
        answer(flags, shape, train(flags, shape, folder))
    os._exit(0)  # see contender.leave


if __name__ == "__main__":
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    main()
