"""Makes a run's plan, or finds the one made before: looks at the machine, drafts, measures, settles."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from plait.commands.preparing.corpus import corpus_facts, run_facts
from plait.data.shards import Corpus
from plait.errors import RunFailed
from plait.machines.machine import Machine
from plait.planner.derive.resources import ProbeNeed, probe_digest
from plait.planner.derive.training_job import rate_before_pricing, size_job
from plait.planner.plan import Plan
from plait.planner.plan_file import PLAN_FORMAT, read_plan, write_plan
from plait.planner.resolve.resolve import Draft, draft, settle, updated_forecast, with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout, best_layouts, choose
from plait.private_folder import make_private_folder
from plait.probing.calibration_store import load_calibration
from plait.probing.processor_arithmetic import (
    TIMING_PRODUCTS,
    begun_with_arithmetic,
    draft_in_best_precision,
    new_with_arithmetic,
)
from plait.probing.steps import measure
from plait.probing.survey import MachineSurvey, resources_of
from plait.recipe.load import flat_values
from plait.recipe.schema import RunConfig
from plait.screen.screen import Log, ShowProgress, ignore_progress
from plait.workers import WorkerPool
from plait.working_folder import WorkingFolder

COMPARING_LAYOUTS = "comparing layouts"
"""What a person reads while this goes on."""


def make_plan(
    config: RunConfig,
    corpus: Corpus,
    site: MachineSurvey,
    workers: WorkerPool,
    *,
    fresh: bool,
    say: Log,
    show: ShowProgress = ignore_progress,
) -> Plan:
    """The plan for a recipe on a machine: the one that was made for both before, unless `fresh`."""
    kept = None if fresh else kept_plan(config, corpus, site, workers)
    if kept is not None:
        plan, site = _plan_if_probe_holds(kept, site)
        if plan is not None:
            say("plan     as made before for this recipe on this machine (--replan makes a new one)")
            return plan
        say("plan     made again: a new probe of the hosts differs from the one that the stored plan was made with")
    key = plan_key(config, corpus.content_hash, site.machine, workers, site.others)
    facts = run_facts(config, corpus, workers.working_folder)
    seen = resources_of(site, workers)
    sized = size_job(config, facts, rate_before_pricing(seen))
    make_draft = partial(draft, config, facts, recipe_hash=key, begun=sized)
    rates = "again" if fresh else "kept"
    show(0, 0, TIMING_PRODUCTS)
    resources = new_with_arithmetic(config, sized.job, seen, workers, rates=rates)
    show(0, 0, COMPARING_LAYOUTS)
    outline = make_draft(resources)
    measured = _timed_layouts(config, outline, workers, show)
    if site.machine.device == "cpu":
        show(0, 0, "choosing the precision")
    best = draft_in_best_precision(config, outline, choose(measured), resources, workers, make_draft)
    if best.plan.arithmetic.precision != outline.plan.arithmetic.precision:
        measured = _timed_layouts(config, best, workers, show)
    return _store_plan(settle(config, best, measured), key, workers.working_folder)


def _timed_layouts(config: RunConfig, outline: Draft, workers: WorkerPool, show: ShowProgress) -> list[WorkerLayout]:
    """A draft's layouts, with timed steps where a choice or a time budget depends on them."""
    if len(outline.layouts) > 1 or outline.plan.job.budget.unit == "seconds":
        return measure(config, outline.plan, workers, outline.layouts, show)
    return list(outline.layouts)


def kept_plan(config: RunConfig, corpus: Corpus, site: MachineSurvey, workers: WorkerPool) -> Plan | None:
    """The plan that a run or `plait plan --prove` made before for this recipe, text and machine, calibrated again."""
    working = workers.working_folder
    path = _plan_path(plan_key(config, corpus.content_hash, site.machine, workers, site.others), working)
    if not path.exists():
        return None
    plan = read_plan(path)
    return _with_new_calibration(replace(plan, job=replace(plan.job, corpus=str(corpus.folder))), working)


def _plan_if_probe_holds(plan: Plan, site: MachineSurvey) -> tuple[Plan | None, MachineSurvey]:
    """An earlier plan, or None if several hosts were probed again since then; and the survey with that probe's result,
    so that nobody repeats it.

    The plan's key tells machines apart, but only a probe tells the links between them apart.
    """
    if site.probe is None:
        return plan, site
    probe = site.probe
    plans_need = ProbeNeed(
        shape=plan.job.shape,
        batch_sequences=plan.job.batch_sequences,
        precision=plan.arithmetic.precision,
        matmul_backend=plan.arithmetic.matmul_backend,
        host_backends=plan.arithmetic.host_backends,
        compile=plan.arithmetic.compile,
    )
    probed = probe(plans_need)
    holds = plan.forecast is not None and plan.forecast.probe_digest == probe_digest(probed)
    return plan if holds else None, replace(site, probe=lambda need: probed if need == plans_need else probe(need))


def proven_plan(
    config: RunConfig,
    corpus: Corpus,
    site: MachineSurvey,
    workers: WorkerPool,
    *,
    count: int,
    on_timed: Callable[[WorkerLayout], None],
    on_failed: Callable[[WorkerLayout, RunFailed], None],
) -> tuple[Plan, list[WorkerLayout]]:
    """The best of `count` layouts by their measured steps, kept as the recipe's plan here, and all that were timed.

    A layout that fails, for lack of memory for example, drops out; raises RunFailed where all of them fail.
    """
    key = plan_key(config, corpus.content_hash, site.machine, workers, site.others)
    facts = run_facts(config, corpus, workers.working_folder)
    seen = resources_of(site, workers)
    sized = size_job(config, facts, rate_before_pricing(seen))
    make_draft = partial(
        draft, config, facts, recipe_hash=key, begun=sized, worth_measuring=lambda request: best_layouts(request, count)
    )
    resources = new_with_arithmetic(config, sized.job, seen, workers, rates="kept")
    outline = make_draft(resources)
    outline = draft_in_best_precision(config, outline, outline.layouts[0], resources, workers, make_draft)
    trials: list[WorkerLayout] = []
    failure: RunFailed | None = None
    for split in outline.layouts:
        try:
            trials += measure(config, outline.plan, workers, (split,))
        except RunFailed as error:
            on_failed(split, error)
            failure = error
        else:
            on_timed(trials[-1])
    if failure and not trials:
        raise failure
    return _store_plan(settle(config, outline, trials), key, workers.working_folder), trials


def _with_new_calibration(plan: Plan, working: WorkingFolder) -> Plan:
    """An earlier plan, with its forecast corrected by what runs have measured since."""
    forecast = plan.forecast
    if forecast is None or not forecast.calibration.ground:
        return plan
    calibration = load_calibration(forecast.calibration.ground, working)
    return replace(plan, forecast=updated_forecast(forecast, calibration, plan.step_s))


def _plan_path(key: str, working: WorkingFolder) -> Path:
    return working.cache / "plans" / f"{key}.json"


def _store_plan(plan: Plan, key: str, working: WorkingFolder) -> Plan:
    path = _plan_path(key, working)
    make_private_folder(path.parent)
    write_plan(plan, path)
    return plan


def replan(
    config: RunConfig,
    plan: Plan,
    corpus: Corpus,
    site: MachineSurvey,
    workers: WorkerPool,
    say: Log,
    show: ShowProgress = ignore_progress,
) -> Plan:
    """A begun run's plan for the present machines: another layout, the same steps and the same mathematics.

    On other machines the library of their processors' products is chosen again, and `say` gets the reason.
    """
    key = plan_key(config, corpus.content_hash, site.machine, workers, site.others)
    moved = not _were_all_there(plan, site)
    plan = replace(plan, machines=replace(plan.machines, hosts=(), left_out=()))
    show(0, 0, TIMING_PRODUCTS)
    resources = begun_with_arithmetic(
        config, plan, resources_of(site, workers), workers, processors="other" if moved else "same"
    )
    for reason in resources.arithmetic.reasons if moved and resources.arithmetic else ():
        say(f"         · {reason}")
    show(0, 0, COMPARING_LAYOUTS)
    outline = draft(config, corpus_facts(corpus), resources, recipe_hash=key, begun=plan)
    plan = _on_machine(plan, outline.plan)
    again = plan.step_s is not None and site.probe is None  # over several hosts a probe has told how long steps take
    timing = len(outline.layouts) > 1 or again
    return with_layout(
        plan, choose(measure(config, plan, workers, outline.layouts, show) if timing else outline.layouts)
    )


def _were_all_there(plan: Plan, site: MachineSurvey) -> bool:
    """Whether a plan was made for all of these machines, and chose one library for them."""
    known = {share.machine for share in (*plan.machines.hosts, *plan.machines.left_out)}
    others = all(other.digest() in known for other in site.others)
    return site.machine.fingerprint() == plan.machines.fingerprint and others and not plan.arithmetic.host_backends


def _on_machine(plan: Plan, here: Plan) -> Plan:
    """A begun run's plan, with what depends on the machines taken from the plan `here`."""
    cadence = replace(plan.cadence, balance_every_steps=here.cadence.balance_every_steps)
    return replace(here, cadence=cadence, forecast=plan.forecast, step_s=plan.step_s, reasons=plan.reasons)


_NOT_OF_THE_PLAN = ("run.name", "data.files", "recover.give_up_after")


def plan_key(
    config: RunConfig, content_hash: str, machine: Machine, workers: WorkerPool, others: Sequence[Machine] = ()
) -> str:
    """Hash of a plan's inputs: the recipe but for its name, where its text lies and what follows a failure, the text,
    and the machines."""
    named = flat_values(config).items()
    requested = {key: value for key, value in named if key not in _NOT_OF_THE_PLAN}
    given = [
        PLAN_FORMAT,
        requested,
        content_hash,
        machine.fingerprint(),
        workers.fixed_workers and workers.fixed_workers.workers,
    ]
    given += [other.fingerprint() for other in others]
    return sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:32]
