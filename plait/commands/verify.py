"""`plait verify`: proves that a layout computes what one plain process computes, on any machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich.console import Console as Screen

from plait.cluster.topology import Machine, usable_cores
from plait.commands.planning.make_plan import look_around
from plait.commands.planning.output_files import check_output, write_output
from plait.commands.planning.workers import Crew, crew, serve_if_asked
from plait.commands.preparing.corpus import CACHE
from plait.commands.verifying.small_model import asked_layout, asked_shares, shrunk_plan, suited_to
from plait.data.preparation.synthetic import write_synthetic
from plait.errors import Interrupted, PlaitError
from plait.launch.values.job import Job
from plait.layout import Layout
from plait.partition.execution import Precision
from plait.planner.plan import Plan, write_plan
from plait.planner.search.validity import check_devices
from plait.proof.verdict import EXACT, ROUNDED, SINGLE, Bars, Verdict, judge
from plait.recipe.load import load_recipe, recipe_text
from plait.recipe.schema import RunConfig

ENTRY = "plait.commands.verifying.reference:rank"
NOISE_FACTOR = 4.0
"""A layout may differ by so many times what two runs on one device differ by that only add in another order."""

Extent = Literal["all", "gradients"]
Who = Literal["everybody", "layout", "reference"]


def verify(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    where: Literal["anywhere", "here"] = "anywhere",
    json_file: Path | None = None,
    screen: Screen,
) -> bool:
    """Prove a recipe's layout and tell the result; False where it differs.

    "anywhere": in float64 on as many gloo ranks as it needs. "here": on this machine's devices, first in float32, then
    in the run's own precision. Raises PlaitError, before a worker computes, for a layout that cannot be.
    """
    if serve_if_asked():
        return True
    check_output(json_file)
    config = load_recipe(recipe, overrides)
    shape, layout = asked_layout(config)
    plan = shrunk_plan(config, shape, layout, asked_shares(config))
    with crew() as workers:
        _check_given(layout, workers)
        if where == "anywhere":
            told = f"{layout}{_shares_words(plan)}: {_gloo_words(layout)} in float64, beside one plain process"
            screen.print(f"layout   {told}", highlight=False)
            verdict = prove(config, plan, workers)
            if verdict.ok and config.train.gradient_transfer == "bf16":
                verdict = _prove_rounded(config, plan, workers, screen)
        else:
            machine = look_around(workers, usable_cores()).machine
            check_devices(layout, machine)
            verdict = _prove_here(config, plan, machine, workers, screen)
    _tell(verdict, screen, "" if where == "here" else _rounding_words(config))
    if json_file is not None:
        write_output(json_file, verdict.to_json())
    return verdict.ok


def prove(config: RunConfig, plan: Plan, workers: Crew, *, extent: Extent = "all", bars: Bars = EXACT) -> Verdict:
    """Run a small plan's ranks, and one plain process, and compare what they leave; side by side where cores serve."""
    with _folder(workers) as folder:
        _prepare(folder, config, plan)
        if plan.device == "cpu" and workers.given is None:
            _run(folder, plan, workers, extent, "everybody")
        else:
            _run(folder, plan, workers, extent, "reference")
            _run(folder, plan, workers, extent, "layout")
        ranks = [folder / f"rank-{rank}.safetensors" for rank in range(plan.world_size)]
        return judge(folder / "reference.safetensors", ranks, plan.layout, lr=plan.optimizer.lr, bars=bars)


def _prove_rounded(config: RunConfig, plan: Plan, workers: Crew, screen: Screen) -> Verdict:
    """The proof once more with gradients that travel as the recipe asks; it is exact but for their rounding."""
    screen.print("         exact where gradients travel whole; now as bfloat16, which changes the numbers")
    rounded = replace(plan, gradient_transfer="bf16")
    return prove(config, rounded, workers, extent="gradients", bars=ROUNDED)


def check_once(config: RunConfig, plan: Plan, workers: Crew, screen: Screen) -> None:
    """One small step of a run's layout against one plain process, the first time this machine meets the layout.

    Says so in one line. Raises PlaitError where they differ.
    """
    if plan.world_size == 1:
        return
    small = shrunk_plan(config, plan.shape, plan.layout, plan.shares)
    if plan.device == "cuda":
        small = suited_to(small, "cuda", "float32")
    what = [asdict(small.layout), small.parts, asdict(small.shape), plan.device, dict(plan.fingerprint)]
    key = sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    kept = CACHE / "verified" / f"{key}.json"
    if kept.exists():
        return
    verdict = prove(config, small, workers, extent="gradients", bars=SINGLE if plan.device == "cuda" else EXACT)
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


def _prove_here(config: RunConfig, plan: Plan, machine: Machine, workers: Crew, screen: Screen) -> Verdict:
    """The worse of two verdicts: in float32 without shortcuts, and as the run itself computes."""
    single = suited_to(plan, machine.device, "float32")
    told = f"{plan.layout}{_shares_words(plan)} on {plan.world_size} × {machine.name}, in float32"
    screen.print(f"layout   {told}", highlight=False)
    strict = prove(config, single, workers, extent="gradients", bars=SINGLE)
    precision = _own_precision(config, machine)
    own = replace(suited_to(plan, machine.device, precision), compile="blocks" if machine.device == "cuda" else "off")
    if not strict.ok or own == single:
        return strict
    noise = _noise(config, own, workers)
    compiled = ", compiled" if own.compile == "blocks" else ""
    screen.print(f"         float32 agrees to {strict.largest('gradient', 'sums'):.0e}", highlight=False)
    screen.print(
        f"         in {precision}{compiled} two runs on one device differ by {noise:.0e}; "
        f"the layout may differ by {NOISE_FACTOR * noise:.0e}",
        highlight=False,
    )
    allowed = replace(SINGLE, gradient=max(SINGLE.gradient, NOISE_FACTOR * noise))
    return prove(config, own, workers, extent="gradients", bars=allowed)


def _noise(config: RunConfig, plan: Plan, workers: Crew) -> float:
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
def _folder(workers: Crew) -> Iterator[Path]:
    """A folder for one proof, gone after it; other hosts, where torchrun has workers, see the current folder only."""
    if workers.given is not None:
        CACHE.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="plait-verify-", dir=CACHE.resolve() if workers.given else None) as name:
        yield Path(name)


def _prepare(folder: Path, config: RunConfig, plan: Plan) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    write_synthetic(corpus, vocabulary=plan.shape.vocabulary, sequence=plan.sequence, seed=config.run.seed)
    write_plan(replace(plan, corpus=str(corpus)), folder / "plan.json")
    (folder / "recipe.toml").write_text(recipe_text(config))


def _run(folder: Path, plan: Plan, workers: Crew, extent: Extent, who: Who) -> None:
    ranks = {"everybody": plan.world_size + 1, "layout": plan.world_size, "reference": 1}[who]
    job = Job(
        entry=ENTRY,
        argument=json.dumps({"folder": str(folder), "extent": extent, "who": who}),
        world_size=ranks,
        threads=plan.threads,
        log_dir=str(folder),
    )
    result = workers.run(job, lambda message: None)
    if result.stopped_by != "finished":
        raise Interrupted(result.stopped_by)


def _check_given(layout: Layout, workers: Crew) -> None:
    if workers.given is not None and workers.given.workers != layout.world_size:
        raise PlaitError(
            f"torchrun started {workers.given.workers} workers and the layout needs {layout.world_size}; "
            f"start torchrun with --nproc-per-node {layout.world_size}, or verify without torchrun"
        )


def _own_precision(config: RunConfig, machine: Machine) -> Precision:
    asked = config.train.precision
    return asked if asked != "auto" else "bf16" if machine.device == "cuda" else "float32"


def _shares_words(plan: Plan) -> str:
    return f" with shares of {' + '.join(map(str, plan.shares))} sequences" if plan.shares else ""


def _gloo_words(layout: Layout) -> str:
    workers, cores = layout.world_size, usable_cores()
    return f"{workers} gloo workers" + (f" taking turns on {cores} cores" if workers > cores else "")


def _rounding_words(config: RunConfig) -> str:
    rounded = config.train.gradient_transfer == "bf16"
    return ", but for the rounding of gradients on their way" if rounded else ""


def _tell(verdict: Verdict, screen: Screen, but: str) -> None:
    screen.print(verdict.table(), highlight=False)
    if verdict.ok:
        screen.print(f"proven   the layout computes what one plain process computes{but}", soft_wrap=True)
    else:
        screen.print(
            "[red]differs[/red]  this layout does not compute what one plain process computes: a bug, so report it"
        )
