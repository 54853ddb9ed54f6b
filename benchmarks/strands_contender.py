"""plait's side of the strands' benchmark: a plan with the strand's layout, put together as a training run is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.strands_work import Work, join, serve, tokens_of, window_starts
from plait.data.loader import Loader, heldout_micros
from plait.data.samples.windows import WindowReader
from plait.data.shards import Corpus, Shard
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.parallel.apply import STAGES, parallelize
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.mesh import make_mesh, world_communicator
from plait.partition.execution import RunArithmetic
from plait.planner.plan import Cadence, Machines, OptimizerPlan, Placement, Plan, TrainingJob
from plait.planner.search.validity import balanced_stages
from plait.trainer.assemble import Assembly, make_autocast, make_runners, select_samples
from plait.trainer.auxiliary.losses import AuxiliaryLosses
from plait.trainer.experts.loads import ExpertLoads
from plait.trainer.first_weights import initialize_weights
from plait.trainer.optimizer.optim import make_optimizer
from plait.trainer.state import TrainState
from plait.units import Amount, Every


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder:
    """One window after the other, where plait would shuffle."""

    work: Work
    sequence: int

    def windows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(positions), dtype=np.int32), window_starts(self.work, positions)


def main() -> None:
    work, flags = join()
    assembly = assembled(work, plan_for(work, flags.kind))
    state = TrainState()

    def take_step(step: int) -> float:
        nonlocal state
        state, scalars = assembly.step(state)
        loss, tokens = scalars.totals.tolist()
        return loss / tokens

    serve(take_step)


def plan_for(work: Work, kind: str) -> Plan:
    """The work as plait's own plan; `kind` is the layout as JSON, with "micro_sequences" where it is not the usual."""
    asked = json.loads(kind)
    micro_sequences = asked.pop("micro_sequences", None)
    if "pipeline" in asked:
        asked["stage_layers"] = balanced_stages(work.shape, asked["pipeline"])
    layout = Layout(**asked)
    optimizer = OptimizerPlan(
        lr=work.learning_rate,
        warmup_steps=0,
        weight_decay=work.weight_decay,
        betas=work.betas,
        clip=None,
        schedule="constant",
    )
    return Plan(
        placement=Placement(
            layout=layout, threads=1, micro_sequences=micro_sequences or work.sequences // layout.data_parallel_degree
        ),
        machines=Machines(device="cpu", peak_flops=None, fingerprint={}),
        arithmetic=RunArithmetic(precision="float32", compile="off"),
        job=TrainingJob(
            shape=work.shape,
            sequence=work.sequence,
            batch_sequences=work.sequences,
            budget=Amount(1, "steps"),
            steps=1,
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


def assembled(work: Work, plan: Plan) -> Assembly:
    """What `plait.trainer.assemble.assemble` makes of a recipe, with the benchmark's tokens for the recipe's."""
    together = dist.is_initialized()
    device = torch.device("cpu")
    with torch.device("meta" if together else "cpu"):
        model = GPT(plan.job.shape)
    mesh = make_mesh(plan.placement.layout, "cpu") if together else None
    sharded = parallelize(model, mesh, plan.execution, STAGES if together else ())
    initialize_weights(sharded.weights, plan.job.shape, work.seed)
    sums = world_communicator() if together else ONE_PROCESS
    samples = select_samples(plan, plan.placement.layout, sums.index, device)
    corpus = corpus_of(work)
    order: Any = InOrder(work=work, sequence=work.sequence)
    autocast = make_autocast(plan.arithmetic.precision, device)
    auxiliary = AuxiliaryLosses(sharded, plan.job.shape, autocast)
    run_micros, evaluate_micros = make_runners(sharded, autocast, auxiliary=auxiliary)
    return Assembly(
        plan=plan,
        device=device,
        model=sharded,
        optimizer=make_optimizer(sharded.units, plan.job.optimizer),
        corpus=corpus,
        loader=Loader(corpus, WindowReader(corpus.train, order, corpus.vocabulary), samples),
        heldout=partial(heldout_micros, corpus, samples),
        sums=sums,
        run_micros=run_micros,
        evaluate_micros=evaluate_micros,
        loads=ExpertLoads(sharded, plan.job.shape),
        auxiliary=auxiliary,
    )


def corpus_of(work: Work) -> Corpus:
    """The benchmark's text as plait's own prepared tokens."""
    shard = Shard(source=0, tokens=tokens_of(work), starts=np.zeros(1, dtype=np.int64))
    return Corpus(
        folder=Path(),
        vocabulary=work.vocabulary,
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


if __name__ == "__main__":
    main()
