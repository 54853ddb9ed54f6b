"""Hugging Face Trainer with GPT2LMHeadModel on the benchmark's work; `--settings tuned` or `defaults`.

tuned: what its documentation offers for speed on CPUs at the same mathematics and precision. defaults: what one gets by
filling in only the training recipe. Both take the same tokens in the same order and the same constant learning rate.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks.contender import Journal, Orders, read_orders
from benchmarks.workload import Workload, load_workload

# GPT-2's linear layers are stored there as [in, out]: those names are transposed.
BLOCK_NAMES = {
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
TOP_NAMES = {"tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f"}


class OrderedWindows(Dataset):
    """Window `order[i]` of the token file as sample i, so that a sequential sampler gives the prescribed order."""

    def __init__(self, folder: Path, workload: Workload, samples: int) -> None:
        self._tokens = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
        self._order = np.load(folder / "order.npy", mmap_mode="r")[:samples]
        self._sequence = workload.sequence

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self._order[index]) * self._sequence
        window = torch.from_numpy(self._tokens[start : start + self._sequence + 1].astype(np.int64))
        # `shift_labels` are targets as they are; plain `labels` would lose the last target of every window.
        return {"input_ids": window[:-1], "labels": window[1:], "shift_labels": window[1:]}


class JournalTrainer(Trainer):
    """Trainer that notes each step's loss as its own training_step returns it."""

    journal: Journal
    last_loss: torch.Tensor

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*arguments, **named)
        return self.last_loss


class JournalCallback(TrainerCallback):
    """Stamps the time of each optimizer step, the loading of its batch included."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.trainer: JournalTrainer | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.journal.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.journal.step(self.trainer.last_loss.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", choices=("tuned", "defaults"), required=True)
    orders, flags = read_orders(parser)
    torch.set_num_threads(orders.threads)
    workload = load_workload(orders.workdir)
    journal = Journal(flags)
    callback = JournalCallback(journal)
    samples = orders.steps * orders.world_size * workload.sequences_per_rank
    trainer = JournalTrainer(
        model=build_model(workload, orders.workdir, flags.settings),
        args=training_arguments(orders, workload, flags.settings),
        train_dataset=OrderedWindows(orders.workdir, workload, samples),
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()


def build_model(workload: Workload, folder: Path, settings: str) -> GPT2LMHeadModel:
    """The model with the common initial weights; no dropout in either setting: the mathematics are to be the same."""
    config = GPT2Config(
        vocab_size=workload.vocabulary,
        n_positions=workload.sequence,
        n_embd=workload.width,
        n_layer=workload.layers,
        n_head=workload.heads,
        layer_norm_epsilon=workload.norm_epsilon,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    if settings == "tuned":
        config.activation_function = "gelu_pytorch_tanh"  # one kernel for what the default "gelu_new" spells out
        config._attn_implementation = "sdpa"
    model = GPT2LMHeadModel(config)
    missing, unexpected = model.load_state_dict(_renamed(load_file(folder / "init.safetensors")), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, f"weights do not fit: {missing} {unexpected}"
    return model


def training_arguments(orders: Orders, workload: Workload, settings: str) -> TrainingArguments:
    """The recipe, and for `tuned` also what the documentation offers for speed."""
    recipe: dict[str, Any] = {
        "output_dir": str(orders.workdir / "trainer"),
        "use_cpu": True,
        "bf16": orders.precision == "bf16",
        "max_steps": orders.steps,
        "per_device_train_batch_size": workload.sequences_per_rank,
        "train_sampling_strategy": "sequential",
        "learning_rate": workload.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": workload.beta1,
        "adam_beta2": workload.beta2,
        "adam_epsilon": workload.epsilon,
        "weight_decay": workload.weight_decay,
        "max_grad_norm": workload.clip,
        "remove_unused_columns": False,  # else `shift_labels` is dropped on the way
    }
    if orders.world_size > 1:
        recipe["ddp_backend"] = "gloo"
    if settings == "tuned":
        recipe |= {
            "optim": "adamw_torch_fused",
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_nan_inf_filter": False,
            "average_tokens_across_devices": False,  # all ranks have equally many tokens
            "ddp_find_unused_parameters": False,
            "ddp_broadcast_buffers": False,
            "dataloader_num_workers": 0,
        }
    return TrainingArguments(**recipe)


def _renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    answer: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            _, layer, module, kind = parts
            transposed = weight.dim() == 2
            answer[f"transformer.h.{layer}.{BLOCK_NAMES[module]}.{kind}"] = weight.T if transposed else weight
        else:
            answer[f"{TOP_NAMES[parts[0]]}.{parts[1]}"] = weight
    return answer


if __name__ == "__main__":
    # A single process is no distributed job; the variables of one would make accelerate set up a process group.
    if os.environ["WORLD_SIZE"] == "1":
        for variable in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(variable, None)
    main()
