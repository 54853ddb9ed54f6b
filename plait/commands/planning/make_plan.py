"""Makes a run's plan, or finds the one made before: looks at the machine, drafts, measures, settles."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plait.cluster.topology import Machine
from plait.commands.planning.calibration_store import calibration_key, load_calibration
from plait.commands.planning.workers import MEASURE_ENTRY, TIMING_ENTRY, WorkerPool
from plait.commands.preparing.corpus import corpus_facts
from plait.data.shards import Corpus
from plait.errors import PlaitError, RunFailed
from plait.launch.values.job import Job, Message
from plait.planner.derive.resources import Probe, ProbeNeed, Resources, probe_digest
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.resolve.forecast_update import updated_forecast
from plait.planner.resolve.resolve import draft, settle, with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout, best_layouts, choose
from plait.private_folder import make_private_folder
from plait.recipe.load import flat_values, recipe_text
from plait.recipe.schema import RunConfig
from plait.screen.screen import ShowProgress, ignore_progress
from plait.working_folder import WorkingFolder

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSurvey:
    """The machine that a run finds, and the arithmetic peak that MFU is a share of."""

    machine: Machine
    peak_flops: float | None
    peak_doubt: str = ""
    """What makes the peak doubtful, in a sentence; empty where nothing does."""
    others: tuple[Machine, ...] = ()
    """The machines of the run's other hosts."""
    probe: Probe | None = None
    """Measures all hosts and the links between them."""


def look_around(workers: WorkerPool, cores: int) -> MachineSurvey:
    """Describe this machine and measure its arithmetic peak, in a worker that uses all cores."""
    found = ask_rank_0(workers, Job(entry=MEASURE_ENTRY, argument="", world_size=1, threads=cores), "machine")
    machine = Machine.from_fingerprint(found["fingerprint"])
    return MachineSurvey(machine=machine, peak_flops=found["peak_flops"], peak_doubt=found["peak_doubt"])


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
        say("plan     made anew: a new probe of the hosts differs from the one that the stored plan was made with")
    key = plan_key(config, corpus.content_hash, site.machine, workers, site.others)
    outline = draft(config, corpus_facts(corpus), resources_of(site, workers), recipe_hash=key)
    measured = list(outline.layouts)
    if len(measured) > 1 or outline.plan.budget.unit == "seconds":
        measured = measure(config, outline.plan, workers, outline.layouts, show)
    return _store_plan(settle(config, outline, measured), key, workers.working_folder)


def kept_plan(config: RunConfig, corpus: Corpus, site: MachineSurvey, workers: WorkerPool) -> Plan | None:
    """The plan that a run or `plait plan --prove` made before for this recipe, text and machine, calibrated anew."""
    working = workers.working_folder
    path = _plan_path(plan_key(config, corpus.content_hash, site.machine, workers, site.others), working)
    if not path.exists():
        return None
    return _with_new_calibration(replace(read_plan(path), corpus=str(corpus.folder)), working)


def _plan_if_probe_holds(plan: Plan, site: MachineSurvey) -> tuple[Plan | None, MachineSurvey]:
    """An earlier plan, or None if several hosts were probed again since then; and the survey with that probe's result,
    so that nobody repeats it.

    The plan's key tells machines apart, but only a probe tells the links between them apart.
    """
    if site.probe is None:
        return plan, site
    probe = site.probe
    plans_need = ProbeNeed(shape=plan.shape, batch_sequences=plan.batch_sequences, precision=plan.precision)
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
    outline = draft(
        config,
        corpus_facts(corpus),
        resources_of(site, workers),
        recipe_hash=key,
        worth_measuring=lambda request: best_layouts(request, count),
    )
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


def resources_of(site: MachineSurvey, workers: WorkerPool) -> Resources:
    """The surveyed machines and their workers as the planner's Resources."""
    machines, working = (site.machine, *site.others), workers.working_folder
    return Resources(
        machine=site.machine,
        peak_flops=site.peak_flops,
        peak_doubt=site.peak_doubt,
        fixed_workers=workers.fixed_workers,
        probe=site.probe,
        load_calibration=lambda precision, basis: load_calibration(
            calibration_key(machines, precision, basis), working
        ),
    )


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


def replan(config: RunConfig, plan: Plan, corpus: Corpus, site: MachineSurvey, workers: WorkerPool) -> Plan:
    """A begun run's plan for the present machines: another layout, the same steps and the same mathematics."""
    key = plan_key(config, corpus.content_hash, site.machine, workers, site.others)
    outline = draft(config, corpus_facts(corpus), resources_of(site, workers), recipe_hash=key, begun=plan)
    moved = _moved(plan, outline.plan)
    again = plan.step_s is not None and site.probe is None  # over several hosts a probe has told how long steps take
    timing = len(outline.layouts) > 1 or again
    return with_layout(moved, choose(measure(config, moved, workers, outline.layouts) if timing else outline.layouts))


def _moved(plan: Plan, here: Plan) -> Plan:
    """A begun run's plan, with what depends on the machine, and the reports, taken from the plan `here`."""
    return replace(
        plan,
        device=here.device,
        compile=here.compile,
        layout=here.layout,
        threads=here.threads,
        balance_every_steps=here.balance_every_steps,
        corpus=here.corpus,
        peak_flops=here.peak_flops,
        fingerprint=here.fingerprint,
        recipe_hash=here.recipe_hash,
    )


def measure(
    config: RunConfig,
    plan: Plan,
    workers: WorkerPool,
    layouts: tuple[WorkerLayout, ...],
    show: ShowProgress = ignore_progress,
) -> list[WorkerLayout]:
    """Time real steps of each layout."""
    measured = []
    for number, split in enumerate(layouts):
        show(number, len(layouts), f"timing steps of layout {number + 1} of {len(layouts)}")
        measured.append(_measured(config, with_layout(plan, split), split, workers))
    return measured


def _measured(config: RunConfig, plan: Plan, split: WorkerLayout, workers: WorkerPool) -> WorkerLayout:
    with TemporaryDirectory(prefix="plait-measure-") as name:
        write_plan(plan, Path(name) / "plan.json")
        (Path(name) / "recipe.toml").write_text(recipe_text(config))
        job = Job(
            entry=TIMING_ENTRY,
            argument=name,
            world_size=plan.world_size,
            threads=plan.threads,
            log_dir=name,
        )
        found = ask_rank_0(workers, job, "measured")
    return replace(split, step_s=found["step_s"])


def ask_rank_0(workers: WorkerPool, job: Job, kind: str) -> dict[str, Any]:
    """Run a job whose rank 0 sends one message of this kind, and return its values; raises Interrupted where a
    signal came."""
    answers: list[Message] = []
    result = workers.run(job, lambda message: answers.append(message) if message.kind == kind else None)
    result.require_finished()
    if not answers:
        raise PlaitError(f"a worker ended without an answer ({job.entry}); this is a bug in plait, please report it")
    return dict(answers[0].values)


def plan_key(
    config: RunConfig, content_hash: str, machine: Machine, workers: WorkerPool, others: Sequence[Machine] = ()
) -> str:
    """Hash of a plan's inputs: the recipe but for its name and where its text lies, the text, and the machines."""
    requested = {key: value for key, value in flat_values(config).items() if key not in ("run.name", "data.files")}
    given = [requested, content_hash, machine.fingerprint(), workers.fixed_workers and workers.fixed_workers.workers]
    given += [other.fingerprint() for other in others]
    return sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:32]
