"""Runs a small model by a layout and by one plain process, and compares the gradients that they leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from shutil import copyfile
from typing import Literal

from plait.commands.verifying.small_model import plan_for_device, shrunk_plan
from plait.data.preparation.synthetic import write_synthetic
from plait.errors import PlaitError
from plait.launch.values.job import Job
from plait.layout import Layout
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.private_folder import job_folder, make_private_folder
from plait.proof import FLOAT32_TOLERANCES, FLOAT64_TOLERANCES, Tolerances, Verdict, compare_tensor_files
from plait.recipe.load import recipe_text
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.workers import CHECK_ENTRY, ROUTING, WorkerPool, modules_needed

CheckScope = Literal["all", "gradients"]
CheckProcesses = Literal["everybody", "layout", "reference"]


def check_gradients(
    config: RunConfig,
    plan: Plan,
    workers: WorkerPool,
    *,
    scope: CheckScope = "all",
    tolerances: Tolerances = FLOAT64_TOLERANCES,
) -> Verdict:
    """Run a small plan's ranks and one plain process, at once if there are enough cores, and compare the tensors.

    In a mixture of experts the ranks follow the plain process's routing, which then comes first.
    """
    with _temporary_folder(workers) as folder:
        _write_inputs(folder, config, plan)
        if plan.machines.device == "cpu" and workers.fixed_workers is None and plan.job.shape.mixture is None:
            _run_processes(folder, plan, workers, scope, "everybody")
        else:
            _run_processes(folder, plan, workers, scope, "reference")
            _run_processes(folder, plan, workers, scope, "layout")
        ranks = [folder / f"rank-{rank}.safetensors" for rank in range(plan.world_size)]
        return compare_tensor_files(
            folder / "reference.safetensors",
            ranks,
            plan.placement.layout,
            lr=plan.job.optimizer.lr,
            tolerances=tolerances,
        )


def check_new_layout(config: RunConfig, plan: Plan, workers: WorkerPool, screen: Screen) -> None:
    """Compare one small step of a run's layout with one plain process, once per layout and machine; prints one line.

    Raises PlaitError where gradients differ.
    """
    if plan.world_size == 1:
        return
    small = shrunk_plan(config, plan.job.shape, plan.placement.layout, plan.placement.shares, plan.job.optimizer.kind)
    if plan.machines.have_accelerators:
        small = plan_for_device(small, plan.machines.device, "float32")
        small = replace(small, machines=replace(small.machines, gpus=plan.machines.gpus))
    tuning = config.finetune
    objective = [tuning.objective, tuning.beta, tuning.label_smoothing, tuning.reference, tuning.margin]
    what = [
        *(objective if tuning.learns_pairs else []),
        asdict(small.placement.layout),
        small.sequences_per_replica,
        asdict(small.job.shape),
        plan.machines.device,
        dict(plan.machines.fingerprint),
    ]
    key = sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    kept = workers.working_folder.cache / "verified" / f"{key}.json"
    if kept.exists():
        return
    tolerances = FLOAT32_TOLERANCES if plan.machines.have_accelerators else FLOAT64_TOLERANCES
    with screen.progress() as show:
        show(0, 0, "checking the layout's gradients (--no-check skips it)")
        verdict = check_gradients(config, small, workers, scope="gradients", tolerances=tolerances)
    if not verdict.ok:
        raise PlaitError(
            f"the layout {plan.placement.layout} does not compute here what one process computes: {verdict.worst[0]} "
            f"is off by {verdict.worst[0].error:.0e}; this is a bug in plait or in this machine, so please "
            "report it, and choose another layout (--no-check trains all the same)"
        )
    make_private_folder(kept.parent)
    kept.write_text(verdict.to_json())
    error = verdict.largest("gradient", "sums")
    screen.print(f"checked  the layout's gradients against one plain process: equal to {error:.0e}")


def summation_order_noise(config: RunConfig, plan: Plan, workers: WorkerPool) -> float:
    """The largest error between two runs on one device that add samples in different orders: at once, one by one."""
    with _temporary_folder(workers) as parent:
        files = []
        for micro in (plan.job.batch_sequences, 1):
            folder = parent / str(micro)
            folder.mkdir()
            _write_inputs(
                folder, config, replace(plan, placement=replace(plan.placement, micro_sequences=micro, micro_limits=()))
            )
            if files and plan.job.shape.mixture is not None:
                copyfile(files[0].parent / ROUTING, folder / ROUTING)
            _run_processes(folder, plan, workers, "gradients", "reference")
            files.append(folder / "reference.safetensors")
        return compare_tensor_files(
            files[0], files[1:], Layout(), lr=plan.job.optimizer.lr, tolerances=FLOAT32_TOLERANCES
        ).largest("gradient", "sums")


@contextmanager
def _temporary_folder(workers: WorkerPool) -> Iterator[Path]:
    """A temporary folder for one proof; under torchrun below the working one, which other hosts may share."""
    cache = workers.working_folder.cache
    if workers.fixed_workers is not None:
        make_private_folder(cache)
    with job_folder("plait-verify-", cache.resolve() if workers.fixed_workers else None) as folder:
        yield folder


def _write_inputs(folder: Path, config: RunConfig, plan: Plan) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    layout = "whole" if config.data.format in ("chat", "prompt-completion") else "stream"
    layout = "pairs" if config.finetune.learns_pairs else layout
    sizes = {"vocabulary": plan.job.shape.vocabulary, "sequence": plan.job.sequence}
    write_synthetic(corpus, **sizes, seed=config.run.seed, layout=layout)
    write_plan(replace(plan, job=replace(plan.job, corpus=str(corpus))), folder / "plan.json")
    (folder / "recipe.toml").write_text(recipe_text(config))


def _run_processes(folder: Path, plan: Plan, workers: WorkerPool, scope: CheckScope, processes: CheckProcesses) -> None:
    ranks = {"everybody": plan.world_size + 1, "layout": plan.world_size, "reference": 1}[processes]
    job = Job(
        entry=CHECK_ENTRY,
        argument=json.dumps({"folder": str(folder), "extent": scope, "who": processes}),
        world_size=ranks,
        threads=plan.placement.threads,
        log_dir=str(folder),
        needs=modules_needed(plan),
        at_stop="abandon",
    )
    result = workers.run(job, lambda message: None)
    result.require_finished()
