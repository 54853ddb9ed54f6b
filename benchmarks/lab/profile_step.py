"""Where the plain torch loop spends its step, by kind of work, one thread: `python -m benchmarks.lab.profile_step`.

Every step is profiled alone and the least time of each kind over the steps counts, so that a busy machine adds little.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.contender import Orders
from benchmarks.machine import matmul_rate
from benchmarks.peers.ddp_loop import GPT2, Windows, build_optimizer
from benchmarks.workload import FIRST_RUN, prepare

KINDS = {
    "matmul with bias (forward)": ("aten::addmm",),
    "matmul (backward, and the head)": ("aten::mm",),
    "gelu forward": ("aten::gelu",),
    "gelu backward": ("aten::gelu_backward",),
    "attention forward": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "attention backward": ("aten::_scaled_dot_product_flash_attention_for_cpu_backward",),
    "layer norm forward": ("aten::native_layer_norm",),
    "layer norm backward": ("aten::native_layer_norm_backward",),
    "bias gradients": ("aten::sum",),
    "residual adds, accumulation": ("aten::add", "aten::add_"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone"),
    "cross entropy": (
        "aten::_log_softmax",
        "aten::_log_softmax_backward_data",
        "aten::nll_loss_forward",
        "aten::nll_loss_backward",
    ),
    "embeddings": ("aten::index_select", "aten::embedding_dense_backward"),
    "AdamW": ("aten::_fused_adamw_",),
    "clipping": ("aten::_foreach_norm", "aten::_foreach_mul_", "aten::linalg_vector_norm", "aten::stack"),
    "zeros": ("aten::fill_", "aten::zero_"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    times = [_by_kind(each) for each in _profiles(steps)]
    least_us = {kind: min(each[kind] for each in times) for kind in [*KINDS, "all else"]}
    total_us = sum(least_us.values())
    rate = matmul_rate(processes=1, threads=1)
    ideal_us = FIRST_RUN.flops_per_token * FIRST_RUN.tokens_per_rank / rate * 1e6
    print(f"step {total_us / 1e3:.0f} ms, {ideal_us / total_us:.0%} of the matmul rate ({rate / 1e9:.0f} GFLOP/s)\n")
    print("| kind | ms | share |\n| --- | --- | --- |")
    for kind, each_us in sorted(least_us.items(), key=lambda item: -item[1]):
        print(f"| {kind} | {each_us / 1e3:.1f} | {each_us / total_us:.1%} |")


def _profiles(steps: int) -> list[profile]:
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        prepare(FIRST_RUN, workdir, steps=steps + 2, world_size=1)
        orders = Orders(workdir=workdir, steps=steps, threads=1, precision="float32", rank=0, world_size=1)
        model = GPT2(FIRST_RUN)
        model.load_state_dict(load_file(workdir / "init.safetensors"))
        optimizer = build_optimizer(model, FIRST_RUN)
        windows = Windows(workdir, FIRST_RUN, orders)
        profiles: list[profile] = []
        for step in range(steps + 2):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                model(*windows(step)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), FIRST_RUN.clip, foreach=True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            profiles.append(profiled)
        return profiles[2:]


def _by_kind(profiled: profile) -> Counter[str]:
    kinds = {op: kind for kind, ops in KINDS.items() for op in ops}
    times: Counter[str] = Counter()
    for event in profiled.key_averages():
        times[kinds.get(event.key, "all else")] += event.self_cpu_time_total
    return times


if __name__ == "__main__":
    main()
