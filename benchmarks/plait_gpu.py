"""plait on one GPU as users get it: its loader, documents and masks, model, loss, step and optimizer; the flags and the
answer of peers/gpu_loop.py."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.peers.gpu_loop import (
    FFN,
    Measured,
    allowed_attention,
    answer,
    figures,
    gpu_flags,
    mark,
    workload_for,
)
from benchmarks.workload import Workload
from plait.data.preparation.synthetic import write_synthetic
from plait.layout import Layout
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import training_flops_per_token
from plait.parallel.mesh import make_mesh, world_sums
from plait.planner.plan import OptimizerPlan, Plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import assemble
from plait.trainer.state import TrainState
from plait.units import Amount, Every


def model_shape(size: str, work: Workload) -> ModelShape:
    """The peer's model in plait's terms: GPT-2 at 125M, a Llama at the others."""
    gpt2 = size == "125M"
    return ModelShape(
        layers=work.layers, width=work.width, heads=work.heads, kv_heads=work.heads,
        head_width=work.width // work.heads, ffn=4 * work.width if gpt2 else FFN[work.width],
        vocabulary=work.vocabulary, sequence=work.sequence, norm="layernorm" if gpt2 else "rmsnorm",
        activation="gelu" if gpt2 else "swiglu", positions="learned" if gpt2 else "rope",
        bias="all" if gpt2 else "none", tied=gpt2,
    )  # fmt: skip


def plan_for(shape: ModelShape, work: Workload, flags: argparse.Namespace, corpus: Path) -> Plan:
    """A plan of one rank."""
    return Plan(
        layout=Layout(), threads=1, device="cuda" if flags.device == "cuda" else "cpu", precision="bf16",
        compile="off" if flags.compile == "none" else "blocks", shape=shape, sequence=work.sequence,
        batch_sequences=work.sequences_per_rank, micro_sequences=work.sequences_per_rank,
        budget=Amount(1, "steps"), steps=flags.warmup + flags.steps,
        optimizer=OptimizerPlan(lr=work.learning_rate, warmup_steps=0, weight_decay=work.weight_decay,
                                betas=(work.beta1, work.beta2), clip=work.clip, schedule="constant"),
        corpus=str(corpus), corpus_hash="", documents=flags.documents, checkpoint_every=Every(0, "steps"),
        checkpoint_keep=1, report_every_steps=10, evaluate_every_steps=0, step_s=None,
        forecast=None, peak_flops=flags.peak_flops, fingerprint={},
        recipe_hash="", reasons=(),
    )  # fmt: skip


def train(flags: argparse.Namespace, work: Workload, folder: Path) -> Measured:
    """Warm up, then time each step by events on the device, from the loader's shards to the updated weights."""
    corpus, device = folder / "corpus", torch.device(flags.device)
    corpus.mkdir()
    write_synthetic(corpus, vocabulary=work.vocabulary, sequence=work.sequence, seed=work.seed)
    (folder / "recipe.toml").write_text('[data]\nfiles = "none.txt"\n')
    plan = plan_for(model_shape(flags.size, work), work, flags, corpus)
    mesh = make_mesh(plan.layout, plan.device)
    assembly = assemble(load_recipe(folder / "recipe.toml"), plan, sums=world_sums(), mesh=mesh)
    state, totals, marks = TrainState(), [], [mark(device)]
    with allowed_attention(flags):
        for _ in range(plan.steps):
            state, scalars = assembly.step(state)
            totals.append(scalars.totals)
            marks.append(mark(device))
    assembly.loader.close()
    # Some of the synthetic documents are never learned: a tiny step may have no token that counts.
    first, last = (float(total[0] / total[1].clamp(min=1)) for total in (totals[0], totals[-1]))
    flops = training_flops_per_token(plan.shape, plan.sequence, "full")
    return figures(flags, work, marks, flops=round(flops), parameters=parameter_count(plan.shape), losses=(first, last))


def main() -> None:
    flags = gpu_flags()
    work = workload_for(flags)
    backend = "cpu:gloo,cuda:nccl" if flags.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        answer(flags, work, train(flags, work, Path(folder)))
    os._exit(0)  # see contender.leave


if __name__ == "__main__":
    main()
