"""Runs a small model by a layout and by one plain process, and compares the gradients that they leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich.console import Console as Screen

from plait.commands.planning.workers import WorkerPool
from plait.commands.preparing.corpus import CACHE
from plait.commands.verifying.small_model import shrunk_plan, suited_to
from plait.data.preparation.synthetic import write_synthetic
from plait.errors import Interrupted, PlaitError
from plait.launch.values.job import Job
from plait.layout import Layout
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.proof.verdict import EXACT, SINGLE, Bars, Verdict, judge
from plait.recipe.load import recipe_text
from plait.recipe.schema import RunConfig

REFERENCE_ENTRY = "plait.commands.verifying.reference:rank"

CheckExtent = Literal["all", "gradients"]
Who = Literal["everybody", "layout", "reference"]


def check_gradients(
    config: RunConfig, plan: Plan, workers: WorkerPool, *, extent: CheckExtent = "all", bars: Bars = EXACT
) -> Verdict:
    """Run a small plan's ranks, and one plain process, and compare what they leave; side by side where cores serve."""
    with _folder(workers) as folder:
        _prepare(folder, config, plan)
        if plan.device == "cpu" and workers.fixed_workers is None:
            _run(folder, plan, workers, extent, "everybody")
        else:
            _run(folder, plan, workers, extent, "reference")
            _run(folder, plan, workers, extent, "layout")
        ranks = [folder / f"rank-{rank}.safetensors" for rank in range(plan.world_size)]
        return judge(folder / "reference.safetensors", ranks, plan.layout, lr=plan.optimizer.lr, bars=bars)


def check_new_layout(config: RunConfig, plan: Plan, workers: WorkerPool, screen: Screen) -> None:
    """One small step of a run's layout against one plain process, the first time this machine meets the layout.

    Says so in one line. Raises PlaitError where they differ.
    """
    if plan.world_size == 1:
        return
    small = shrunk_plan(config, plan.shape, plan.layout, plan.shares)
    if plan.device == "cuda":
        small = suited_to(small, "cuda", "float32")
    what = [asdict(small.layout), small.sequences_per_replica, asdict(small.shape), plan.device, dict(plan.fingerprint)]
    key = sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    kept = CACHE / "verified" / f"{key}.json"
    if kept.exists():
        return
    verdict = check_gradients(
        config, small, workers, extent="gradients", bars=SINGLE if plan.device == "cuda" else EXACT
    )
    if not verdict.ok:
        raise PlaitError(
            f"the layout {plan.layout} does not compute here what one process computes: {verdict.worst[0]} is off by "
            f"{verdict.worst[0].error:.0e}; this is a bug in plait or in this machine, so please report it, and choose "
            "another layout (--no-check trains all the same)"
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(verdict.to_json())
    error = verdict.largest("gradient", "sums")
    screen.print(f"checked  the layout's gradients against one plain process: equal to {error:.0e}", highlight=False)


def order_noise(config: RunConfig, plan: Plan, workers: WorkerPool) -> float:
    """The largest error between two runs on one device that add in another order: all at once, one by one."""
    with _folder(workers) as parent:
        files = []
        for micro in (plan.batch_sequences, 1):
            folder = parent / str(micro)
            folder.mkdir()
            _prepare(folder, config, replace(plan, micro_sequences=micro, micro_limits=()))
            _run(folder, plan, workers, "gradients", "reference")
            files.append(folder / "reference.safetensors")
        return judge(files[0], files[1:], Layout(), lr=plan.optimizer.lr, bars=SINGLE).largest("gradient", "sums")


@contextmanager
def _folder(workers: WorkerPool) -> Iterator[Path]:
    """A folder for one proof, gone after it; other hosts, where torchrun has workers, see the current folder only."""
    if workers.fixed_workers is not None:
        CACHE.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="plait-verify-", dir=CACHE.resolve() if workers.fixed_workers else None) as name:
        yield Path(name)


def _prepare(folder: Path, config: RunConfig, plan: Plan) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    write_synthetic(corpus, vocabulary=plan.shape.vocabulary, sequence=plan.sequence, seed=config.run.seed)
    write_plan(replace(plan, corpus=str(corpus)), folder / "plan.json")
    (folder / "recipe.toml").write_text(recipe_text(config))


def _run(folder: Path, plan: Plan, workers: WorkerPool, extent: CheckExtent, who: Who) -> None:
    ranks = {"everybody": plan.world_size + 1, "layout": plan.world_size, "reference": 1}[who]
    job = Job(
        entry=REFERENCE_ENTRY,
        argument=json.dumps({"folder": str(folder), "extent": extent, "who": who}),
        world_size=ranks,
        threads=plan.threads,
        log_dir=str(folder),
    )
    result = workers.run(job, lambda message: None)
    if result.stopped_by != "finished":
        raise Interrupted(result.stopped_by)
