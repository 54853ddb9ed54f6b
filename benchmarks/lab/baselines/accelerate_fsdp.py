"""Accelerate with FSDP (its second version), a unit a layer."""

from __future__ import annotations

from accelerate import Accelerator, FullyShardedDataParallelPlugin

from benchmarks.lab.baselines.accelerated import train
from benchmarks.lab.baselines.work import read_work

if __name__ == "__main__":
    work = read_work()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        reshard_after_forward=True,
    )
    train(work, Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=len(work.micros)))
