"""Hugging Face Trainer with its own Llama of the same shape, at the settings that its documentation names for speed."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.lab.baselines.work import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Steps, Work, leave, read_work


class RandomWindows(Dataset):
    """Windows of random tokens."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __len__(self) -> int:
        return self._work.steps * self._work.rows * self._work.world_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens_t = torch.randint(self._work.shape.vocabulary, (self._work.sequence,))
        return {"input_ids": tokens_t, "labels": tokens_t}


class Timer(TrainerCallback):
    """Stamps the steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._steps.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._steps.end_step()


def main() -> None:
    work = read_work()
    trainer = Trainer(
        model=LlamaForCausalLM(_config(work)),
        args=_arguments(work),
        train_dataset=RandomWindows(work),
        callbacks=[Timer(Steps(work))],
    )
    trainer.train()
    leave()


def _config(work: Work) -> LlamaConfig:
    shape = work.shape
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.sequence,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )


def _arguments(work: Work) -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=work.steps_file.parent if work.rank == 0 else None),
        use_cpu=True,
        max_steps=work.steps,
        per_device_train_batch_size=-(-work.rows // len(work.micros)),
        gradient_accumulation_steps=len(work.micros),
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        average_tokens_across_devices=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


if __name__ == "__main__":
    main()
