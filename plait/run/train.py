"""`plait train`: from a recipe to a trained model and a receipt; begins a run, or goes on with one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console as Screen

from plait.cluster.topology import usable_cores
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.launch.job import Job, JobResult, Message
from plait.layout import in_words
from plait.model.shape import training_flops_per_token
from plait.plan.choose import described
from plait.plan.pace import longer, with_reports
from plait.plan.plan import Plan
from plait.plan.size import budget_of
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.report.console import Console
from plait.report.metrics import EvalReport, StepReport, read_metrics
from plait.report.receipt import Receipt, median_speed, read_receipt
from plait.run.crew import Crew, crew, dismiss_others, log_folder, serve_if_asked
from plait.run.data import prepare_data, told
from plait.run.folder import RunFolder, alone, check_changes, run_folder
from plait.run.planning import Interrupted, Say, Site, look_around, make_plan, replan
from plait.run.verify import check_once
from plait.units import format_duration

Check = Literal["new layouts", "never"]
Outcome = Literal["finished", "SIGINT", "SIGTERM"]
TOLERATED_OVERRUN = 1.15


def train(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    fresh_plan: bool = False,
    check: Check = "new layouts",
    screen: Screen,
) -> Outcome:
    """Run a recipe to its end, from where it stands; raises PlaitError (before) or RunFailed (during) with the mend.

    A run that is finished prints its receipt. A first SIGINT or SIGTERM saves and returns the signal's name.
    """
    if serve_if_asked():
        return "finished"
    config = load_recipe(recipe, overrides)
    folder = run_folder(config.run.name)
    with alone(folder):
        changed = check_changes(folder.begun_config(), config) if folder.has_begun else []
        if folder.has_begun and "train.budget" not in changed and _is_finished(folder):
            screen.print(f"{folder.path} is finished; a larger train.budget continues it")
            screen.print(read_receipt(folder.receipt).table())
            dismiss_others()
            return "finished"
        with crew() as workers:
            try:
                fresh = fresh_plan or any(key.startswith("layout.") for key in changed)
                plan = _plan(config, folder, workers, fresh=fresh, screen=screen)
                if check == "new layouts":
                    check_once(config, plan, workers, screen)
                return _train(config, folder, workers, plan, screen)
            except Interrupted as interrupted:
                return "SIGINT" if str(interrupted) == "SIGINT" else "SIGTERM"


def _plan(config: RunConfig, folder: RunFolder, workers: Crew, *, fresh: bool, screen: Screen) -> Plan:
    """Prepare the data, look at the machine, and say what will be done."""
    corpus = prepare_data(config, screen)
    screen.print(told(corpus))
    site = look_around(workers, usable_cores())
    if folder.has_begun:
        plan = _plan_of_begun(config, folder.begun_plan(), corpus, site, workers, fresh=fresh, say=screen.print)
    else:
        plan = make_plan(config, corpus, site, workers, fresh=fresh, say=screen.print)
    _introduce(plan, site, () if folder.has_begun else plan.reasons, screen)
    return plan


def _train(config: RunConfig, folder: RunFolder, workers: Crew, plan: Plan, screen: Screen) -> Outcome:
    point = folder.resume_point()
    folder.put(config, plan)
    if point:
        for sentence in point.skipped:
            screen.print(f"[yellow]passed over[/yellow] {sentence}", highlight=False)
        screen.print(f"resume   from {point.path.name}")
    done = point.manifest.step if point else 0
    result, step = _run(plan, folder, workers, done, point.path.name if point else None, screen)
    if step < plan.steps:
        screen.print(f"stopped after step {step} of {plan.steps}, saved; the same command goes on from there")
        return result.stopped_by
    _conclude(config, folder, plan, done, screen)
    return "finished"


def _plan_of_begun(
    config: RunConfig, plan: Plan, corpus: Corpus, site: Site, workers: Crew, *, fresh: bool, say: Say
) -> Plan:
    """The plan to go on with: the run's own, with more steps or another split where that was asked or is needed."""
    if corpus.content_hash != plan.corpus_hash:
        raise PlaitError(
            "the text (or its tokenizer) is not what this run was begun with; bring it back, or choose another run.name"
        )
    plan = replace(plan, corpus=str(corpus.folder))
    before = plan.budget
    if budget_of(config) != before:
        plan = longer(config, plan)
        say(f"budget   {before} → {plan.budget}: {plan.steps} steps in all")
    moved = site.machine.fingerprint() != plan.fingerprint
    if moved or fresh or _other_crew(plan, workers):
        why = "this machine is not the one it was made for" if moved else "as asked"
        plan = replan(config, plan, corpus, site, workers)
        say(f"plan     a new one for the remaining steps ({why}); {plan.steps} steps in all, as before")
    return with_reports(config, plan)


def _other_crew(plan: Plan, workers: Crew) -> bool:
    return workers.given is not None and workers.given.workers != plan.world_size


def _introduce(plan: Plan, site: Site, reasons: Sequence[str], screen: Screen) -> None:
    """What was found and what will be done, in a few lines."""
    machine = site.machine
    found = (
        f"{machine.devices} × {machine.name}" if machine.device == "cuda" else f"{machine.name}, {machine.cores} cores"
    )
    screen.print(f"machine  {found}, {machine.memory_bytes / 2**30:.0f} GiB")
    screen.print(f"model    {described(plan)}")
    crew_words = f"{plan.world_size} worker{'s' if plan.world_size > 1 else ''}"
    split = in_words(plan.layout)
    screen.print(f"layout   {split}: {crew_words} × {plan.threads} threads, {plan.precision}")
    for reason in reasons:
        screen.print(f"         · {reason}", highlight=False)
    if plan.step_s:
        screen.print(
            f"time     about {format_duration(plan.steps * plan.step_s)} at {format_duration(plan.step_s)} a step"
        )


class _Session:
    """One start of the workers: shows what they tell, and keeps account of it in the run's folder."""

    def __init__(self, folder: RunFolder, bar: Console) -> None:
        self.step = 0
        self._folder, self._bar = folder, bar
        self._counted_at = time.monotonic()

    def on_message(self, message: Message) -> None:
        values = dict(message.values)
        if message.kind == "step":
            self._bar.step(StepReport(**_numbers(values)))
        elif message.kind == "evaluation":
            self._bar.evaluation(EvalReport(**_numbers(values)))
        elif message.kind == "memory":
            self.count(**{key: tuple(value) for key, value in values.items()})
        elif message.kind == "saved":
            self.step = values["step"]
            self.count()

    def count(self, **peaks: Sequence[int]) -> None:
        """Add the time since the last count, and memory peaks where they are news."""
        now = time.monotonic()
        so_far = self._folder.so_far
        self._folder.note_so_far(replace(so_far, wall_s=so_far.wall_s + now - self._counted_at, **peaks))
        self._counted_at = now


def _run(
    plan: Plan, folder: RunFolder, workers: Crew, done: int, resume: str | None, screen: Screen
) -> tuple[JobResult, int]:
    """Start the workers and wait for their end; returns also the step that is saved."""
    bar = Console(plan.steps, done, screen=screen)
    session = _Session(folder, bar)
    session.step = done
    job = Job(
        entry="plait.train.worker:main",
        argument=json.dumps({"folder": str(folder.path.resolve()), "resume": resume}),
        world_size=plan.world_size,
        threads=plan.threads,
        log_dir=log_folder(folder.path),
    )
    try:
        return workers.run(job, session.on_message), session.step
    finally:
        bar.close()
        session.count()


def _conclude(config: RunConfig, folder: RunFolder, plan: Plan, done: int, screen: Screen) -> None:
    """Write and print the receipt of a finished run; say so when a time budget was missed."""
    receipt = _receipt(folder, plan, done)
    receipt.write(folder.receipt)
    screen.print(receipt.table(), highlight=False)
    budget, wall_s = budget_of(config), receipt.wall_s
    if budget.unit == "seconds" and not 1 / TOLERATED_OVERRUN <= wall_s / budget.value <= TOLERATED_OVERRUN:
        screen.print(
            f"the run took {format_duration(wall_s)}, not {budget}: steps took other times than when they were measured"
        )


def _receipt(folder: RunFolder, plan: Plan, done: int) -> Receipt:
    steps, evaluations = read_metrics(folder.metrics)
    speed = median_speed(steps, (0, done))
    evaluation = evaluations[-1] if evaluations else None
    so_far = folder.so_far
    full, causal = (training_flops_per_token(plan.shape, plan.sequence, kind) for kind in ("full", "causal"))
    devices = plan.world_size if plan.device == "cuda" else 1
    return Receipt(
        steps=plan.steps,
        tokens=steps[-1].tokens,
        world_size=plan.world_size,
        layout=plan.layout.degrees,
        train_loss=steps[-1].loss,
        eval_loss=evaluation.eval_loss if evaluation else None,
        eval_nats_per_byte=evaluation.eval_nats_per_byte if evaluation else None,
        step_s_median=speed.step_s_median,
        tokens_per_s=speed.tokens_per_s,
        mfu=speed.tokens_per_s * full / plan.peak_flops if plan.peak_flops else None,
        mfu_causal=speed.tokens_per_s * causal / plan.peak_flops if plan.peak_flops else None,
        peak_tensor_bytes=so_far.peak_tensor_bytes,
        peak_rss_bytes=so_far.peak_rss_bytes,
        wall_s=so_far.wall_s,
        device_hours=so_far.wall_s * devices / 3600,
        versions=dict(plan.fingerprint["versions"]),
        device=f"{devices} × {plan.fingerprint['name']}",
    )


def _is_finished(folder: RunFolder) -> bool:
    return folder.receipt.exists() and read_receipt(folder.receipt).steps >= folder.begun_plan().steps


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Undo what JSON could not say: "nan" and "inf" came as words."""
    return {key: float(value) if isinstance(value, str) else value for key, value in values.items()}
