"""Programs that run into mistakes which released packages had, each with the packages of that time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.checking.findings import ProgramFindingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoricalCase:
    """A published mistake, rebuilt with the release that had it."""

    name: str
    packages: Sequence[str]
    """Installed without their dependencies, before the packages of this environment."""
    text: str
    kind: ProgramFindingKind
    link: str


_TEXTS = """
import sys
import torch

sys.modules["datasets"] = None  # a newer one than that release can import; the Trainer does without
from transformers import Trainer, TrainingArguments, {model}Config, {model}{head}


class Texts(torch.utils.data.Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        lengths = torch.randint({shortest}, 20, (n,), generator=g).tolist()
        self.rows = [torch.randint(1, 60, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        labels[i, : len(row)] = row
    return {{"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}}


config = {config}
torch.manual_seed(0)
args = TrainingArguments(
    output_dir="unused", per_device_train_batch_size=2, gradient_accumulation_steps={accumulation}, max_steps=6,
    learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
)
trainer = Trainer(model={model}{head}(config), args=args, train_dataset=Texts(64), data_collator=collate)
trainer.train()
"""
_LLAMA = (
    "LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, "
    "num_key_value_heads=2, max_position_embeddings=32)"
)
_GPT2 = (
    "GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, "
    "attn_pdrop=0.0)"
)


def _trainer(model: str, config: str, accumulation: int, shortest: int = 5) -> str:
    head = "ForCausalLM" if model == "Llama" else "LMHeadModel"
    return _TEXTS.format(model=model, head=head, config=config, accumulation=accumulation, shortest=shortest)


_TORCHTITAN = """
import sys
import types
import torch

# Compiles kernels for GPUs, which are imported with torchtitan and not called.
triton = types.ModuleType("triton")
triton.jit, triton.language = lambda function: function, types.ModuleType("triton.language")
triton.language.constexpr = int
sys.modules |= {"triton": triton, "triton.language": triton.language}
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.loss import build_cross_entropy_loss, rescale_accumulated_loss
from torchtitan.config import JobConfig

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
# torchtitan's own models import triton's kernels; the mistake is in the loss.
block = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(64, 32), block, nn.Linear(32, 64))
fully_shard(model[1])
fully_shard(model)
loss_fn = rescale_accumulated_loss(build_cross_entropy_loss(JobConfig()), 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
g = torch.Generator().manual_seed(1 + rank)
for step in range(6):
    tokens = torch.randint(0, 64, (2, 25), generator=g)
    labels = tokens[:, 1:].clone()
    for row, length in enumerate(torch.randint(4, 24, (2,), generator=g).tolist()):
        labels[row, length:] = -100  # a shorter answer, padded
    loss = loss_fn(model(tokens[:, :-1]), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

_ACCELERATE = """
import os
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(24, 8, generator=g), torch.randn(24, 1, generator=g))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
if os.path.exists("saved/done"):
    accelerator.load_state("saved")
    done = int(open("saved/done").read())
for epoch in range(done // len(loader), 5):
    loader.set_epoch(epoch)
    skipped = done % len(loader)
    batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
    for x, y in batches:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        accelerator.save_state("saved")
        if accelerator.is_main_process:
            with open("saved/done", "w") as file:
                file.write(str(done))
        accelerator.wait_for_everyone()
"""
_RESUMED_TRAINER = f"""
import glob
import sys
import torch

sys.modules["datasets"] = None  # a newer one than that release can import; the Trainer does without
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    rows = torch.randint(1, 60, (12, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {{"input_ids": self.rows[i], "labels": self.rows[i]}}


torch.manual_seed(0)
args = TrainingArguments(
    output_dir="saved", per_device_train_batch_size=2, num_train_epochs=5, learning_rate=1e-3, logging_steps=1,
    save_steps=1, report_to=[], use_cpu=True,
)
trainer = Trainer(model=LlamaForCausalLM({_LLAMA}), args=args, train_dataset=Texts())
trainer.train(resume_from_checkpoint=bool(glob.glob("saved/checkpoint-*")))
"""

_TRANSFORMERS = "https://github.com/huggingface/transformers"
CASES: Sequence[HistoricalCase] = (
    HistoricalCase(
        name="transformers 4.45.2: means of micro-batches",
        packages=["transformers==4.45.2", "tokenizers==0.20.3", "huggingface_hub==0.26.5", "accelerate==0.34.2",
                  "peft==0.13.2"],
        text=_trainer("Llama", _LLAMA, 2), kind="mean_of_means", link=f"{_TRANSFORMERS}/pull/34191",
    ),
    HistoricalCase(
        name="transformers 4.47.1: means of devices",
        packages=["transformers==4.47.1", "tokenizers==0.21.0", "huggingface_hub==0.26.5", "accelerate==1.2.1",
                  "peft==0.13.2"],
        text=_trainer("Llama", _LLAMA, 2), kind="mean_of_means", link=f"{_TRANSFORMERS}/issues/34242",
    ),
    HistoricalCase(
        name="transformers 4.47.0: a loss that is not divided",
        packages=["transformers==4.47.0", "tokenizers==0.21.0", "huggingface_hub==0.26.5", "accelerate==1.2.1",
                  "peft==0.13.2"],
        text=_trainer("GPT2", _GPT2, 4, 19), kind="accumulation", link=f"{_TRANSFORMERS}/pull/35207",
    ),
    HistoricalCase(
        name="torchtitan 0.2.1: means of ranks",
        packages=["torchtitan==0.2.1", "tyro==1.0.17", "docstring-parser==0.18.0", "typeguard==4.6.1",
                  "torchdata==0.11.0"],
        text=_TORCHTITAN, kind="mean_of_means", link="https://github.com/pytorch/torchtitan/issues/1842",
    ),
)  # fmt: skip

RESUMING_CASES: Sequence[HistoricalCase] = (
    HistoricalCase(
        name="accelerate 1.14.0: a later epoch goes on in the first one's order", packages=["accelerate==1.14.0"],
        text=_ACCELERATE, kind="resumed_data", link="https://github.com/huggingface/accelerate/pull/4071",
    ),
    HistoricalCase(
        name="transformers 4.56.2: a later epoch goes on in the first one's order",
        packages=["transformers==4.56.2", "tokenizers==0.22.0", "huggingface_hub==0.35.0", "accelerate==1.10.1"],
        text=_RESUMED_TRAINER, kind="resumed_data", link=f"{_TRANSFORMERS}/issues/40690",
    ),
)  # fmt: skip
"""Mistakes that show when a program was stopped and started again: each stops within its second epoch."""
