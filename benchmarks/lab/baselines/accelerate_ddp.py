"""Accelerate with DistributedDataParallel."""

from __future__ import annotations

from accelerate import Accelerator

from benchmarks.lab.baselines.accelerated import train
from benchmarks.lab.baselines.work import read_work

if __name__ == "__main__":
    work = read_work()
    train(work, Accelerator(cpu=True, gradient_accumulation_steps=len(work.micros)))
