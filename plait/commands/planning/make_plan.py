"""Makes a run's plan, or finds the one made before: looks at the machine, drafts, measures, settles."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal

from plait.commands.preparing.corpus import corpus_facts, run_facts
from plait.data.shards import Corpus
from plait.errors import OutOfTime, RunFailed
from plait.machines.machine import Machine
from plait.planner.derive.resources import ProbeNeed, Resources, probe_digest
from plait.planner.derive.training_job import rate_before_pricing, size_job
from plait.planner.plan import Plan
from plait.planner.plan_file import PLAN_FORMAT, read_plan, write_plan
from plait.planner.resolve.resolve import Draft, draft, settle, updated_forecast, with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout, best_layouts, choose
from plait.private_folder import make_private_folder
from plait.probing.calibration_store import load_calibration
from plait.probing.kept import KeptTimings, keep_timings, load_timings
from plait.probing.measuring_time import MeasuringTime, Timing, with_skip_hint
from plait.probing.processor_arithmetic import (
    TIMING_PRECISIONS,
    TIMING_PRODUCTS,
    RatesFreshness,
    RunProcessors,
    begun_with_arithmetic,
    draft_in_best_precision,
    new_with_arithmetic,
)
from plait.probing.steps import kept_steps, measure, with_kept_step, with_ratio_of_timed
from plait.probing.survey import MachineSurvey, resources_of
from plait.recipe.load import flat_values
from plait.recipe.schema import RunConfig
from plait.screen.screen import Log, ShowProgress, ignore_progress
from plait.units import counted
from plait.workers import WorkerPool
from plait.working_folder import WorkingFolder

PLANNING = "planning"
"""Shown to the user while layouts are compared by their forecasts."""


def make_plan(
    config: RunConfig,
    corpus: Corpus,
    site: MachineSurvey,
    workers: WorkerPool,
    *,
    fresh: bool,
    say: Log,
    show: ShowProgress = ignore_progress,
    timing: Timing = "bounded",
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
    rates: RatesFreshness = "again" if fresh else "kept"
    limit = MeasuringTime.of(sized.job.budget, timing)
    timer = LayoutTimer(config, site, workers, limit=limit, rates=rates, show=show, say=say)
    resources = timer.with_arithmetic(
        lambda limit: new_with_arithmetic(config, sized.job, seen, workers, rates=rates, limit=limit), seen
    )
    show(0, 0, PLANNING)
    outline = make_draft(resources)
    need: StepNeed = "seconds" if sized.job.budget.unit == "seconds" else "order"
    measured = timer.layouts(outline.plan, outline.layouts, need)
    best = timer.draft_in_best_precision(outline, choose(measured), resources, make_draft)
    if best.plan.arithmetic.precision != outline.plan.arithmetic.precision:
        measured = timer.layouts(best.plan, best.layouts, need)
    plan = settle(config, best, measured)
    if sentence := timer.sentence:  # not kept for later runs, which have another chance to measure
        return replace(plan, reasons=(sentence, *plan.reasons))
    return _store_plan(plan, key, workers.working_folder)


StepNeed = Literal["order", "seconds"]
"""The purpose of step times: to choose among layouts, or also to turn a time budget into steps."""


class LayoutTimer:
    """Measures what a plan depends on, within the time that there is for it, and knows what it had to leave out.

    What earlier runs of similar models measured here is used, unless it is to be measured again.
    """

    def __init__(
        self,
        config: RunConfig,
        site: MachineSurvey,
        workers: WorkerPool,
        *,
        limit: MeasuringTime,
        rates: RatesFreshness,
        show: ShowProgress,
        say: Log,
    ) -> None:
        self._config, self._site, self._workers = config, site, workers
        self._limit, self._show = limit, with_skip_hint(show)
        self._rates: RatesFreshness = rates
        self._missing: list[str] = []
        self._keeps = site.probe is None and workers.fixed_workers is None
        self._kept = load_timings(workers.working_folder, site.machine, say) if self._keeps else KeptTimings()

    @property
    def sentence(self) -> str:
        """What was not measured for lack of time, as a reason of the plan; empty if everything was."""
        return self._limit.sentence(self._missing)

    def with_arithmetic(
        self, choose_arithmetic: Callable[[MeasuringTime], Resources], otherwise: Resources
    ) -> Resources:
        """The resources with the library that suits their products; with torch's own where that takes too long."""
        if self._site.machine.device == "cpu":
            self._show(0, 0, TIMING_PRODUCTS)
        try:
            return choose_arithmetic(self._limit.part(0.3))
        except OutOfTime:
            self._missing.append("the speed of matrix products")
            return otherwise

    def draft_in_best_precision(
        self, outline: Draft, split: WorkerLayout, resources: Resources, make_draft: Callable[[Resources], Draft]
    ) -> Draft:
        """The draft in the precision that suits the processors; in float32 where finding out takes too long."""
        if self._site.machine.device == "cpu":
            self._show(0, 0, TIMING_PRECISIONS)
        try:
            return draft_in_best_precision(
                self._config,
                outline,
                split,
                resources,
                self._workers,
                make_draft,
                rates=self._rates,
                limit=self._limit.part(0.7),
            )
        except OutOfTime:
            self._missing.append("whether steps are faster in bf16")
            return outline

    def layouts(self, plan: Plan, layouts: tuple[WorkerLayout, ...], need: StepNeed) -> list[WorkerLayout]:
        """A draft's layouts, with the times of their steps where something depends on them: the kept ones of similar
        models, else timed now."""
        known = [with_kept_step(plan, one, self._kept) if self._rates == "kept" else None for one in layouts]
        found = [one or layout for one, layout in zip(known, layouts, strict=True)]
        if len(found) == 1 and need == "order":
            return found
        if all(known):
            best = choose(found)
            if need == "order" or best.step_s is not None:
                return found
            found = [best]
        first = choose([replace(one, step_s=None) for one in found]).layout
        found.sort(key=lambda one: one.layout != first)
        measured = measure(self._config, plan, self._workers, tuple(found), self._show, self._limit.part(0.7))
        timed = [one for one, before in zip(measured, found, strict=True) if one is not before]
        if self._keeps and (new := kept_steps(plan, timed)):
            keep_timings(self._workers.working_folder, self._site.machine, factors=new)
            self._kept = replace(self._kept, factors=(*self._kept.factors, *new))
        untimed = sum(one.step_s is None for one in measured)
        if not untimed:
            return measured
        self._missing.append(f"steps of {counted(untimed, 'layout')}")
        known = [with_kept_step(plan, one, self._kept) if one.step_s is None else None for one in measured]
        return with_ratio_of_timed([one or layout for one, layout in zip(known, measured, strict=True)])


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
    so that it is not repeated.

    The plan's key tells machines apart, but only a probe tells the links between them apart.
    """
    if site.probe is None:
        return plan, site
    probe = site.probe
    plans_need = probe_need(plan)
    probed = probe(plans_need)
    holds = plan.forecast is not None and plan.forecast.probe_digest == probe_digest(probed)
    return plan if holds else None, replace(site, probe=lambda need: probed if need == plans_need else probe(need))


def probe_need(plan: Plan) -> ProbeNeed:
    """What a probe of several hosts measured for a plan."""
    return ProbeNeed(
        shape=plan.job.shape,
        batch_sequences=plan.job.batch_sequences,
        precision=plan.arithmetic.precision,
        matmul_backend=plan.arithmetic.matmul_backend,
        host_backends=plan.arithmetic.host_backends,
        compile=plan.arithmetic.compile,
    )


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
    timing: Timing = "bounded",
    rates: RatesFreshness = "kept",
) -> Plan:
    """A begun run's plan for the present machines: another layout, the same steps and the same mathematics.

    On other machines the library of their processors' products is chosen again, and `say` gets the reason.
    """
    key = plan_key(config, corpus.content_hash, site.machine, workers, site.others)
    moved = not _were_all_there(plan, site)
    begun = replace(plan, machines=replace(plan.machines, hosts=(), left_out=()))
    processors: RunProcessors = "other" if moved else "same"
    seen, limit = resources_of(site, workers), MeasuringTime.of(plan.job.budget, timing)
    timer = LayoutTimer(config, site, workers, limit=limit, rates=rates, show=show, say=say)
    resources = timer.with_arithmetic(
        lambda limit: begun_with_arithmetic(
            config, begun, seen, workers, processors=processors, rates=rates, limit=limit
        ),
        seen,
    )
    for reason in resources.arithmetic.reasons if moved and resources.arithmetic else ():
        say(f"         · {reason}")
    show(0, 0, PLANNING)
    outline = draft(config, corpus_facts(corpus), resources, recipe_hash=key, begun=begun)
    plan = _on_machine(begun, outline.plan)
    again = plan.step_s is not None and site.probe is None  # over several hosts a probe has timed the steps
    best = choose(timer.layouts(plan, outline.layouts, "seconds" if again else "order"))
    if sentence := timer.sentence:
        say(f"         · {sentence}")
    return with_layout(plan, best)


def _were_all_there(plan: Plan, site: MachineSurvey) -> bool:
    """Whether a plan was made for all of these machines, and chose one library for them."""
    known = {share.machine for share in (*plan.machines.hosts, *plan.machines.left_out)}
    others = all(other.digest() in known for other in site.others)
    return site.machine.fingerprint() == plan.machines.fingerprint and others and not plan.arithmetic.host_backends


def _on_machine(plan: Plan, here: Plan) -> Plan:
    """A begun run's plan, with what depends on the machines taken from the plan `here`."""
    cadence = replace(plan.cadence, balance_every_steps=here.cadence.balance_every_steps)
    is_same = plan.arithmetic.matmul_backend == here.arithmetic.matmul_backend
    return replace(
        here,
        cadence=cadence,
        forecast=plan.forecast,
        step_s=plan.step_s,
        reasons=plan.reasons,
        faster_arithmetic=(plan if is_same else here).faster_arithmetic,
        warnings=plan.warnings,
    )


_NOT_OF_THE_PLAN = ("run.name", "data.files", "recover.give_up_after", "plan.")


def plan_key(
    config: RunConfig, content_hash: str, machine: Machine, workers: WorkerPool, others: Sequence[Machine] = ()
) -> str:
    """Hash of a plan's inputs: the recipe, the text and the machines. Of the recipe its name, where its text lies, what
    follows a failure and what a pool is for do not count."""
    named = flat_values(config).items()
    requested = {key: value for key, value in named if not key.startswith(_NOT_OF_THE_PLAN)}
    given = [
        PLAN_FORMAT,
        requested,
        content_hash,
        machine.fingerprint(),
        workers.fixed_workers and workers.fixed_workers.workers,
    ]
    given += [other.fingerprint() for other in others]
    return sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:32]
