"""QLoRA by PEFT's adapters beside bitsandbytes' NF4, in a plain loop: `python -m benchmarks.peers.peft_qlora JOB.json`.

The job says which rows of packed examples are trained on in which step. The answer goes to the job's folder:
answer-0.json. A row's examples do not see each other: transformers masks them by their positions.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.peers.first_adapters import begin_as_plait
from plait.interop.base_model import read_base_model
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import linear_layers

IGNORED = -100
Row = dict[str, list[int]]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    model = quantized_model(job)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=job["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    answer: dict[str, list[float]] = {"losses": [], "tokens": [], "step_s": []}
    for rows in json.loads(Path(job["data"]).read_text())[: job["steps"]]:
        began = time.perf_counter()
        answer["losses"].append(train_step(model, optimizer, rows, job["rows_at_once"]))
        answer["step_s"].append(time.perf_counter() - began)
        answer["tokens"].append(sum(len(row["input_ids"]) for row in rows))
    (Path(job["folder"]) / "answer-0.json").write_text(json.dumps(answer))


def quantized_model(job: dict[str, Any]) -> Any:
    """The model in NF4, computing in float32, with adapters at all linear layers."""
    base = Path(job["model"])
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    quantized = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=settings, device_map="cpu", attn_implementation="sdpa"
    )
    for weight in quantized.parameters():
        weight.requires_grad_(False)
    adapter = AdapterShape(rank=job["rank"], alpha=job["alpha"], targets=linear_layers(read_base_model(base).shape))
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=0.0, target_modules="all-linear")
    model = get_peft_model(quantized, config)
    begin_as_plait(model, base, adapter, job["seed"])
    return model.train()


def train_step(model: Any, optimizer: torch.optim.Optimizer, rows: list[Row], rows_at_once: int) -> float:
    """One update; returns the mean loss of all that is learned in the step."""
    targets = sum(label != IGNORED for row in rows for label in row["labels"])
    loss = 0.0
    for first in range(0, len(rows), rows_at_once):
        ids, labels, positions = packed(rows[first : first + rows_at_once])
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
        part = cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED, reduction="sum") / targets
        part.backward()
        loss += float(part.detach())
    torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def packed(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows one after the other, as one: ids, labels and positions that begin anew with each example, [1, tokens]."""
    ids, labels = (list(chain.from_iterable(row[key] for row in rows)) for key in ("input_ids", "labels"))
    positions = [at for row in rows for length in row["seq_lengths"] for at in range(length)]
    first, second, third = (torch.tensor([values]) for values in (ids, labels, positions))
    return first, second, third


if __name__ == "__main__":
    main()
