"""Hugging Face Accelerate around plait's model: its usual loop, whatever it wraps the model in."""

from __future__ import annotations

import torch.distributed as dist
from accelerate import Accelerator

from benchmarks.lab.baselines.work import CLIP, Model, Steps, Work, adamw, leave, micro_batches


def train(work: Work, accelerator: Accelerator) -> None:
    """All steps, then the end of the process."""
    model = accelerator.prepare(Model(work.shape))
    optimizer = accelerator.prepare(adamw(model))
    steps = Steps(work)
    steps.begin()
    for _ in range(work.steps):
        for inputs_bt, targets_bt in micro_batches(work):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs_bt, targets_bt))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        steps.end_step()
    dist.barrier()
    leave()
