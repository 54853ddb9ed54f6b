"""GPT-2 of the transformers library, with the loss that the model itself computes, on speeches of unequal length:
python transformers_gpt2.py [--steps 30]."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import plait

TEXT = Path(__file__).parents[2] / "recipes" / "shakespeare.txt"
LENGTH, IGNORED = 96, -100


def speeches(count: int = 1600) -> tuple[Tensor, Tensor]:
    """Speeches as bytes [n, LENGTH], padded with 0, and their labels, in which padding is ignored."""
    parts = TEXT.read_bytes()[:1_000_000].split(b"\n\n")
    rows = [list(part.strip()[:LENGTH]) for part in parts if len(part.strip()) > 8][:count]
    inputs = torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])
    labels = torch.tensor([row + [IGNORED] * (LENGTH - len(row)) for row in rows])
    return inputs, labels


def loss_of(model: nn.Module, batch: list[Tensor]):
    inputs, labels = batch
    return model(input_ids=inputs, labels=labels, num_items_in_batch=1).loss, (labels[:, 1:] != IGNORED).sum()


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
steps = parser.parse_args().steps

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(*speeches())
config = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = plait.spread(model, optimizer, loss_sum=loss_of)

for step, batch in enumerate(run.batches(data, batch=32)):
    if step == steps:
        break
    loss = run.step(batch)
    print(f"step {step + 1}  loss {loss:.5f}")
