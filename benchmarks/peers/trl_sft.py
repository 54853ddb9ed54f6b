"""TRL's SFTTrainer with an adapter of PEFT's: `python -m benchmarks.peers.trl_sft JOB.json`, a process a rank.

The job says what to train on: "rows" of packed examples that a run of plait's read in this order, or "chats", whose
messages TRL prepares by itself. The answer goes to the job's folder: answer-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.peers.first_adapters import begin_as_plait
from plait.interop.base_model import read_base_model
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import linear_layers


class NotingTrainer(SFTTrainer):
    """SFTTrainer that notes each step's loss, summed over its micro-batches, and the tokens that are no padding."""

    noted_loss = 0.0
    noted_tokens = 0

    def training_step(self, model: Any, inputs: dict[str, Any], *more: Any, **named: Any) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        self.noted_tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        loss = super().training_step(model, inputs, *more, **named)
        self.noted_loss += float(loss)
        return loss


class Steps(TrainerCallback):
    """Stamps each optimizer step, the loading of its batch included."""

    def __init__(self) -> None:
        self.trainer: NotingTrainer | None = None
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self.step_s: list[float] = []
        self._at = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        now = time.perf_counter()
        self.step_s.append(now - self._at)
        self.losses.append(self.trainer.noted_loss)
        self.tokens.append(self.trainer.noted_tokens)
        self.trainer.noted_loss, self.trainer.noted_tokens, self._at = 0.0, 0, now


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, rank = Path(job["folder"]), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(job["threads"])
    targets = linear_layers(read_base_model(Path(job["model"])).shape)
    adapter = AdapterShape(rank=job["rank"], alpha=job["alpha"], targets=targets)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    noted = Steps()
    trainer = NotingTrainer(
        model=model,
        args=arguments(job),
        train_dataset=Dataset.from_list(json.loads(Path(job["data"]).read_text())),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=0.0, target_modules="all-linear"),
        callbacks=[noted],
    )
    noted.trainer = trainer
    if job["kind"] == "rows":
        begin_as_plait(trainer.model, Path(job["model"]), adapter, job["seed"])
    trainer.train()
    answer = {"losses": noted.losses, "tokens": noted.tokens, "step_s": noted.step_s}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))


def arguments(job: dict[str, Any]) -> SFTConfig:
    """Of "chats" what a user gets without settings; of "rows" all that TRL offers for speed on a processor."""
    common: dict[str, Any] = {"output_dir": str(Path(job["folder"]) / "trainer"), "max_steps": job["steps"]}
    common |= {"use_cpu": True, "seed": job["seed"]}
    if job["kind"] == "chats":
        return SFTConfig(**common)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        common |= {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    return SFTConfig(
        **common,
        per_device_train_batch_size=job["rows_at_once"],
        gradient_accumulation_steps=job["accumulation"],
        train_sampling_strategy="sequential",
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=job["precision"] == "bf16",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


if __name__ == "__main__":
    main()
