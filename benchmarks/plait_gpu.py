"""plait on one GPU as users get it: its loader, documents and masks, model, loss, step and optimizer; the flags and the
answer of peers/gpu_loop.py."""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.peers.gpu_loop import (
    Measured,
    allowed_attention,
    answer,
    ffn_of,
    figures,
    forget_peak,
    gpu_flags,
    mark,
    workload_for,
)
from benchmarks.workload import Workload
from plait.commands.preparing.corpus import corpus_facts
from plait.data.preparation.synthetic import write_synthetic
from plait.data.shards import open_corpus
from plait.layout import Layout
from plait.machines.detect import detect_machine
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import ModelShape, linear_layers, parameter_count
from plait.model.weights import training_flops_per_token
from plait.parallel.mesh import make_mesh, world_communicator
from plait.partition.execution import RunArithmetic
from plait.planner.derive.resources import Resources
from plait.planner.plan import Cadence, Forecast, Machines, OptimizerPlan, Placement, Plan, TrainingJob
from plait.planner.resolve.resolve import draft
from plait.probing.host_rank import machine_peak_flops
from plait.recipe.load import load_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.state import TrainState
from plait.units import Amount, Every


def model_shape(size: str, work: Workload) -> ModelShape:
    """The peer's model in plait's terms: GPT-2 at 125M, a Llama at the others, with adapters at "LoRA 8B"."""
    gpt2, adapted = size == "125M", size == "LoRA 8B"
    shape = ModelShape(
        layers=work.layers,
        width=work.width,
        heads=work.heads,
        kv_heads=work.heads // (4 if adapted else 1),
        head_width=work.width // work.heads,
        ffn=4 * work.width if gpt2 else ffn_of(size, work),
        vocabulary=work.vocabulary,
        sequence=work.sequence,
        norm="layernorm" if gpt2 else "rmsnorm",
        activation="gelu" if gpt2 else "swiglu",
        positions="learned" if gpt2 else "rope",
        bias="all" if gpt2 else "none",
        tied=gpt2,
    )
    adapter = AdapterShape(rank=16, alpha=32, targets=linear_layers(shape))
    return replace(shape, adapter=adapter) if adapted else shape


def plan_for(shape: ModelShape, work: Workload, flags: argparse.Namespace, corpus: Path) -> Plan:
    """A plan of one rank."""
    return Plan(
        placement=Placement(layout=Layout(), threads=1, micro_sequences=work.sequences_per_rank // flags.micro_batches),
        machines=Machines(
            device="cuda" if flags.device == "cuda" else "cpu", peak_flops=flags.peak_flops, fingerprint={}
        ),
        arithmetic=RunArithmetic(precision="bf16", compile="off" if flags.compile == "none" else "blocks"),
        job=TrainingJob(
            shape=shape,
            sequence=work.sequence,
            batch_sequences=work.sequences_per_rank,
            budget=Amount(1, "steps"),
            steps=flags.warmup + flags.steps,
            optimizer=OptimizerPlan(
                lr=work.learning_rate,
                warmup_steps=0,
                weight_decay=work.weight_decay,
                betas=(work.beta1, work.beta2),
                clip=work.clip,
                schedule="constant",
            ),
            corpus=str(corpus),
            corpus_hash="",
            documents=flags.documents,
        ),
        cadence=Cadence(
            checkpoint_every=Every(0, "steps"), checkpoint_keep=1, report_every_steps=10, evaluate_every_steps=0
        ),
        step_s=None,
        forecast=None,
        recipe_hash="",
        reasons=(),
    )


Around = Callable[[Assembly], AbstractContextManager[object]]
"""A context around all steps of an assembly, which may change it."""


def train(
    flags: argparse.Namespace, work: Workload, folder: Path, around: Around = lambda _: nullcontext()
) -> Measured:
    """Warm up, then time each step by events on the device, from the loader's shards to the updated weights."""
    corpus, device = folder / "corpus", torch.device(flags.device)
    corpus.mkdir()
    write_synthetic(corpus, vocabulary=work.vocabulary, sequence=work.sequence, seed=work.seed)
    (folder / "recipe.toml").write_text('[data]\nfiles = "none.txt"\n')
    plan = plan_for(model_shape(flags.size, work), work, flags, corpus)
    told = forecast_of(plan, folder)  # before this process takes memory, which would be another program's to it
    mesh = make_mesh(plan.placement.layout, plan.machines.device)
    assembly = assemble(load_recipe(folder / "recipe.toml"), plan, sums=world_communicator(), mesh=mesh)
    forget_peak(device)
    state, totals, marks = TrainState(), [], [mark(device)]
    with allowed_attention(flags), around(assembly):
        for _ in range(plan.job.steps):
            state, scalars = assembly.step(state)
            totals.append(scalars.totals)
            marks.append(mark(device))
    assembly.loader.close()
    # Some of the synthetic documents are never learned: a tiny step may have no token that counts.
    losses = tuple(float(total[0] / total[1].clamp(min=1)) for total in totals)
    flops = training_flops_per_token(plan.job.shape, plan.job.sequence, "full")
    parameters = parameter_count(plan.job.shape)
    found = figures(flags, work, marks, flops=round(flops), parameters=parameters, losses=(losses[0], losses[-1]))
    found = replace(found, losses=losses)
    return replace(found, planned_bytes=told.tensor_bytes, planned_step_s=told.step_s) if told else found


def forecast_of(plan: Plan, folder: Path) -> Forecast | None:
    """What the planner foretells of this very plan on this machine; None where the catalogue lacks its GPU."""
    keys = (
        "replicate=1",
        f"micro_sequences={plan.placement.micro_sequences}",
        f"recompute={plan.placement.layout.recompute}",
    )
    config = load_recipe(folder / "recipe.toml", [f"layout.{key}" for key in keys])
    machine = detect_machine()
    peak, _ = machine_peak_flops(machine)
    resources = Resources(machine=machine, peak_flops=peak)
    return draft(
        config, corpus_facts(open_corpus(Path(plan.job.corpus))), resources, recipe_hash="", begun=plan
    ).plan.forecast


def main() -> None:
    flags = gpu_flags()
    work = workload_for(flags)
    backend = "cpu:gloo,cuda:nccl" if flags.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            answer(flags, work, train(flags, work, Path(folder)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os._exit(0)  # see contender.leave; torch would also wait for ever for a group that an error left open


if __name__ == "__main__":
    main()
