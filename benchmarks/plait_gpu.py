"""plait's own model, loss, step and optimizer on one GPU, with the flags and the answer of peers/gpu_loop.py."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.machine import describe
from benchmarks.peers.gpu_loop import FFN, GPT2_125M, LLAMA_1B, TINY, Measured, gpu_flags, mark, seconds_between
from benchmarks.workload import Workload
from plait.data.loader import Micro
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape, parameter_count, training_flops_per_token
from plait.parallel.apply import parallelize
from plait.parallel.mesh import make_mesh, world_sums
from plait.planner.plan import OptimizerPlan, Plan
from plait.trainer.assemble import make_autocast, make_runners
from plait.trainer.optim import make_optimizer
from plait.trainer.step import take_step
from plait.units import Amount, Every


def model_shape(size: str, work: Workload) -> ModelShape:
    """The peer's model in plait's terms: GPT-2 at 125M, a Llama at 1B."""
    gpt2 = size == "125M"
    return ModelShape(
        layers=work.layers, width=work.width, heads=work.heads, kv_heads=work.heads,
        head_width=work.width // work.heads, ffn=4 * work.width if gpt2 else FFN[work.width],
        vocabulary=work.vocabulary, sequence=work.sequence, norm="layernorm" if gpt2 else "rmsnorm",
        activation="gelu" if gpt2 else "swiglu", positions="learned" if gpt2 else "rope",
        bias="all" if gpt2 else "none", tied=gpt2,
    )  # fmt: skip


def plan_for(shape: ModelShape, work: Workload, flags: argparse.Namespace) -> Plan:
    """A plan of one rank."""
    return Plan(
        layout=Layout(), threads=1, device="cuda" if flags.device == "cuda" else "cpu", precision="bf16",
        compile="off" if flags.compile == "none" else "blocks", shape=shape, sequence=work.sequence,
        batch_sequences=work.sequences_per_rank, micro_sequences=work.sequences_per_rank,
        budget=Amount(1, "steps"), steps=flags.warmup + flags.steps,
        optimizer=OptimizerPlan(lr=work.learning_rate, warmup_steps=0, weight_decay=work.weight_decay,
                                betas=(work.beta1, work.beta2), clip=work.clip, schedule="constant"),
        corpus="", corpus_hash="", documents="join", checkpoint_every=Every(0, "steps"), checkpoint_keep=1,
        report_every_steps=10, evaluate_every_steps=0, step_s=None,
        forecast=None, peak_flops=flags.peak_flops, fingerprint={},
        recipe_hash="", reasons=(),
    )  # fmt: skip


def train(flags: argparse.Namespace, work: Workload, device: torch.device) -> Measured:
    """Warm up, then time each step by events on the device; tokens are random and lie on the device already."""
    plan = plan_for(model_shape(flags.size, work), work, flags)
    model = GPT(plan.shape).to(device)
    initialize(model, work.seed)
    mesh = make_mesh(plan.layout, plan.device)
    sharded = parallelize(model, mesh, plan.execution)
    optimizer = make_optimizer(sharded.units, plan.optimizer)
    run_micros, _ = make_runners(sharded, make_autocast(plan.precision, device))
    window = torch.randint(work.vocabulary, (work.sequences_per_rank, work.sequence + 1), device=device)
    micro = Micro(inputs=window[:, :-1].contiguous(), targets=window[:, 1:].contiguous(), positions=None, lengths=None)
    totals, marks = [], [mark(device)]
    for _ in range(plan.steps):
        scalars = take_step(
            [micro],
            sharded=sharded,
            run_micros=run_micros,
            sums=world_sums(),
            optimizer=optimizer,
            clip=plan.optimizer.clip,
        )
        totals.append(scalars.totals)
        marks.append(mark(device))
    step_s = median(seconds_between(marks)[flags.warmup :])
    tokens_per_s = work.tokens_per_rank / step_s
    losses = [float(total[0] / total[1]) for total in (totals[0], totals[-1])]
    full, causal = (training_flops_per_token(plan.shape, plan.sequence, kind) for kind in ("full", "causal"))
    return Measured(
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * full / flags.peak_flops,
        mfu_causal=tokens_per_s * causal / flags.peak_flops,
        step_s=step_s,
        parameters=parameter_count(plan.shape),
        peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        first_loss=losses[0],
        last_loss=losses[1],
    )


def main() -> None:
    flags = gpu_flags()
    work = TINY if flags.tiny else GPT2_125M if flags.size == "125M" else LLAMA_1B
    if flags.sequences:
        work = replace(work, sequences_per_rank=flags.sequences)
    backend = "cpu:gloo,cuda:nccl" if flags.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        measured = asdict(train(flags, work, torch.device(flags.device)))
        print(json.dumps({"size": flags.size, **measured}), flush=True)
    if flags.out:
        report = {"size": flags.size, "shape": asdict(work), "machine": describe(), **measured}
        Path(flags.out).write_text(json.dumps(report, indent=2) + "\n")
    os._exit(0)  # see contender.leave


if __name__ == "__main__":
    main()
