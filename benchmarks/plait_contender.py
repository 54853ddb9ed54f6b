"""plait itself as a contender: its model, strands, loader, loss, step and optimizer, fed with the common workload."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from benchmarks.chosen_arithmetic import shape_of
from benchmarks.contender import Journal, Orders, read_orders
from benchmarks.workload import Workload, load_workload
from plait.data.loader import Loader
from plait.data.samples.windows import WindowReader
from plait.data.shards import Corpus, Shard
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.matmul import select_matmul_library
from plait.parallel.apply import STAGES, parallelize
from plait.parallel.mesh import make_mesh, world_communicator
from plait.partition.execution import MatmulBackend, Precision, RunArithmetic
from plait.planner.plan import Cadence, Machines, OptimizerPlan, Placement, Plan, TrainingJob
from plait.trainer.assemble import make_autocast, make_runners, select_samples, weight_casts
from plait.trainer.optimizer.fused import FusedOptimizer, ParameterGroup
from plait.trainer.optimizer.optim import make_optimizer
from plait.trainer.step import take_step
from plait.units import Amount, Every


class GivenOrder:
    """The benchmark's list of windows in the place of plait's own shuffle, which costs no less (data_speed.py)."""

    def __init__(self, folder: Path, sequence: int) -> None:
        self.sequence = sequence
        self._windows = np.load(folder / "order.npy", mmap_mode="r")

    def windows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = self._windows[np.minimum(positions, len(self._windows) - 1)]  # the prefetch looks one step too far
        return np.zeros(len(positions), dtype=np.int32), numbers * self.sequence


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--matmul-backend", choices=get_args(MatmulBackend), default="default")
    orders, flags = read_orders(parser)
    torch.set_num_threads(orders.threads)
    torch.set_flush_denormal(True)  # as a worker does
    select_matmul_library(flags.matmul_backend)
    dist.init_process_group("gloo")
    workload = load_workload(orders.workdir)
    plan = plan_for(workload, orders)
    mesh = make_mesh(plan.placement.layout, "cpu")
    model = GPT(plan.job.shape)
    model.load_state_dict(weights(load_file(orders.workdir / "init.safetensors")))
    sharded = parallelize(model, mesh, plan.execution, STAGES)
    optimizer = make_optimizer(sharded.units, plan.job.optimizer)
    assert isinstance(optimizer, FusedOptimizer)
    decay_all_matrices(optimizer, workload.weight_decay)
    world = world_communicator()
    loader = make_loader(orders, workload, plan)
    run_micros, _ = make_runners(
        sharded, make_autocast(plan.arithmetic.precision, torch.device("cpu")), casts=weight_casts(plan)
    )

    journal = Journal(flags)
    journal.begin()
    for step in range(orders.steps):
        micros = loader.micros(step * plan.job.batch_sequences)
        scalars = take_step(
            micros, sharded=sharded, run_micros=run_micros, sums=world, optimizer=optimizer, clip=workload.clip
        )
        world.largest(torch.tensor([0, 0]))  # the loop's question whether to stop or save
        loss, tokens = scalars.totals.tolist()
        journal.step(loss / tokens)


def decay_all_matrices(optimizer: FusedOptimizer, weight_decay: float) -> None:
    """The peers' habit, so that all do the same: embeddings decay too, which plait leaves alone."""
    plain = optimizer.groups[1]
    tables = [parameter for parameter in plain.parameters if parameter.dim() > 1]
    plain.parameters = [parameter for parameter in plain.parameters if parameter.dim() == 1]
    optimizer.groups.append(ParameterGroup(parameters=tables, weight_decay=weight_decay))


def plan_for(workload: Workload, orders: Orders) -> Plan:
    """The workload as plait's own plan."""
    precision: Precision = "bf16" if orders.precision == "bf16" else "float32"
    optimizer = OptimizerPlan(
        lr=workload.learning_rate,
        warmup_steps=0,
        weight_decay=workload.weight_decay,
        betas=(workload.beta1, workload.beta2),
        clip=workload.clip,
        schedule="constant",
    )
    return Plan(
        placement=Placement(
            layout=Layout(replicate=orders.world_size),
            threads=orders.threads,
            micro_sequences=workload.sequences_per_rank,
        ),
        machines=Machines(device="cpu", peak_flops=None, fingerprint={}),
        arithmetic=RunArithmetic(precision=precision, compile="off"),
        job=TrainingJob(
            shape=shape_of(workload),
            sequence=workload.sequence,
            batch_sequences=workload.sequences_per_rank * orders.world_size,
            budget=Amount(1, "steps"),
            steps=orders.steps,
            optimizer=optimizer,
            corpus="",
            corpus_hash="",
            documents="join",
        ),
        cadence=Cadence(
            checkpoint_every=Every(0, "steps"), checkpoint_keep=1, report_every_steps=1, evaluate_every_steps=0
        ),
        step_s=None,
        forecast=None,
        recipe_hash="",
        reasons=(),
    )


def make_loader(orders: Orders, workload: Workload, plan: Plan) -> Loader:
    """plait's loader over the common token file."""
    tokens = np.memmap(orders.workdir / "tokens.bin", dtype=np.uint16, mode="r")
    shard = Shard(source=0, tokens=tokens, starts=np.zeros(1, dtype=np.int64))
    corpus = Corpus(
        folder=orders.workdir,
        vocabulary=workload.vocabulary,
        eot=0,
        dtype=np.dtype(np.uint16),
        train=(shard,),
        heldout=(),
        train_bytes=0,
        heldout_bytes=0,
        weights=(),
        sources=(),
        content_hash="",
        entries=(),
    )
    order: Any = GivenOrder(orders.workdir, workload.sequence)
    return Loader(
        corpus,
        WindowReader(corpus.train, order, corpus.vocabulary),
        select_samples(plan, plan.placement.layout, orders.rank, torch.device("cpu")),
    )


def weights(common: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The common initial weights under plait's names; the fused qkv rows come apart."""
    ours = {"embed.tokens.weight": common["tokens.weight"], "embed.positions.weight": common["positions.weight"]}
    renamed = {
        "norm1": "attention_norm",
        "out": "attention.o",
        "norm2": "feedforward_norm",
        "up": "feedforward.up",
        "down": "feedforward.down",
    }
    for name, value in common.items():
        parts = name.split(".")
        if parts[0] == "norm":
            ours[name] = value
        elif parts[0] == "blocks" and parts[2] == "qkv":
            for letter, rows in zip("qkv", value.chunk(3), strict=True):
                ours[f"layers.{parts[1]}.attention.{letter}.{parts[3]}"] = rows
        elif parts[0] == "blocks":
            ours[f"layers.{parts[1]}.{renamed[parts[2]]}.{parts[3]}"] = value
    return ours


if __name__ == "__main__":
    main()
