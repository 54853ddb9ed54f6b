"""`plait train`: from a recipe to a trained model and a receipt; begins a run, or goes on with one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.commands.monitoring.elastic_workers import OneMachine
from plait.commands.monitoring.finish import print_finished
from plait.commands.monitoring.training import TrainingEnd, run_training
from plait.commands.planning.begun_plan import (
    refuse_impossible_layout,
    refuse_lowered_budget,
    refuse_other_text,
    resumed_plan,
)
from plait.commands.planning.introduction import Details, StartOf, run_start, running_runs_text
from plait.commands.planning.make_plan import make_plan, probe_need
from plait.commands.preparing.corpus import (
    corpus_facts,
    heldout_lines,
    learnt_facts,
    overlong_lines,
    prepared_corpus,
    run_facts,
)
from plait.commands.verifying.gradient_check import check_new_layout
from plait.errors import Interrupted, OutOfTime, StopSignal, signal_in_words
from plait.hosts.job_files import refuse_joined_folder
from plait.hosts.joining import ONE_HOST, HostsRequest
from plait.hosts.run_hosts import MeasureAhead, RunHosts, run_hosts
from plait.hosts.workers import RunOnHosts, WaitingHostWorkers
from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.machines.machine import Machine
from plait.machines.requested_workers import PeakNeed
from plait.planner.derive.model_size import budget_of
from plait.planner.plan import Plan
from plait.planner.resolve.named import named_workers, refuse_unfit_names
from plait.probing.measuring_time import MeasuringTime, Timing
from plait.probing.processor_arithmetic import library_of_newcomer
from plait.probing.survey import MachineSurvey, PlannedHosts, measure_ahead, survey_machine, survey_machines
from plait.recipe.load import RecipeSource, load_recipe, run_name_of
from plait.report.metrics import read_metrics
from plait.run_folder import NEW_PLAN_KEYS, check_changes, lock_run_folder, run_folder
from plait.screen.screen import Screen
from plait.tracking.processes import tools_behind, tracked
from plait.tracking.trackers import refuse_missing_tools
from plait.workers import (
    ENTRIES,
    HostWorkers,
    PlanFor,
    dismiss_torchrun_ranks,
    refuse_torchrun,
    serve_under_torchrun,
    worker_pool,
)
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


def train(
    recipe: RecipeSource,
    overrides: Sequence[str] = (),
    *,
    fresh_plan: bool = False,
    check: CheckMode = "new layouts",
    hosts: HostsRequest = ONE_HOST,
    timing: Timing = "bounded",
    details: Details = (),
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
    entries: EntryTable = ENTRIES,
    started: ForkServer | None = None,
) -> TrainingEnd:
    """Run a recipe to its end, from where it stands; raises PlaitError (before) or RunFailed (during).

    A run that is finished prints its receipt. A first SIGINT, SIGTERM, SIGHUP or SIGUSR1 saves, and is the end's
    `stopped_by`. Over several hosts it first waits until the others have joined. `entries` are what the ranks of this
    machine run; `started` is their fork server where one was started ahead.
    """
    if serve_under_torchrun():
        return TrainingEnd(stopped_by="finished")
    config = load_recipe(recipe, overrides)
    refuse_missing_tools(config.report.to)
    folder = run_folder(config.run.name, working)
    if isinstance(recipe, Path) and config.run.name == run_name_of(recipe) != recipe.stem.lower():
        screen.print(f"name     {config.run.name}, made from {recipe.name} (run.name)")
    refuse_joined_folder(folder)
    with lock_run_folder(folder) as require_present:
        changed = check_changes(folder.saved_config(), config) if folder.has_begun else []
        if folder.has_begun:
            refuse_lowered_budget(config, folder.saved_plan())
            refuse_impossible_layout(config, folder.saved_plan())
        if folder.has_begun and "train.budget" not in changed and folder.is_finished:
            refuse_other_text(prepared_corpus(config, working, screen), folder.saved_plan())
            behind = tools_behind(config.report.to, folder.path, folder.saved_plan().job.steps)
            with tracked(behind, folder.path, screen.print):
                receipt = print_finished(folder, screen, details)
            dismiss_torchrun_ranks()
            return TrainingEnd(stopped_by="finished", receipt=receipt)
        plan_changed = any(key.startswith(NEW_PLAN_KEYS) for key in changed)
        renew: ReplanScope = "all" if fresh_plan else "plan" if plan_changed else "nothing"
        try:
            peak: PeakNeed = "as known" if folder.has_begun and renew == "nothing" else "measured"
            run = RunOnHosts(config=config, folder=folder, screen=screen, working=working, peak=peak, entries=entries)
            plans, begun = (
                RunPlans(run, check, timing),
                folder.saved_plan() if folder.has_begun and renew != "all" else None,
            )
            with open_workers(hosts, run, plans.further, plans.measure_ahead, begun, started) as elastic:
                start: StartOf = "known plan" if begun and renew == "nothing" else "new plan"
                plan = plans.first(elastic.workers, renew)
                screen.print(run_start(plan, folder.path, details, start))
                if sharing := running_runs_text(plan, folder):
                    screen.print(sharing)
                plans.check(plan, elastic.workers)
                with tracked(config.report.to, folder.path, screen.print):
                    return run_training(
                        config,
                        folder,
                        elastic,
                        plan,
                        screen,
                        details=details,
                        is_replanned=renew != "nothing",
                        require_present=require_present,
                    )
        except Interrupted as interrupted:
            sentence = stopped_early_text(interrupted.signal, has_begun=folder.has_begun)
            screen.print(sentence)
            return TrainingEnd(stopped_by=interrupted.signal, sentence=sentence)


def stopped_early_text(signal: StopSignal, *, has_begun: bool) -> str:
    """The consequence of a stop while text was prepared, the machine measured, or other hosts awaited."""
    if has_begun:
        words = "while no worker trained; the same command goes on with the run as it was saved"
        return f"stopped by {signal_in_words(signal)} {words}"
    return f"stopped by {signal_in_words(signal)} before training began; the same command starts it again"


def continuing_command(
    recipe: Path, overrides: Sequence[str], hosts: HostsRequest, check: CheckMode, timing: Timing = "bounded"
) -> str:
    """The whole command that goes on with a run that was stopped, with the settings that it was given."""
    words = ["plait", "train", str(recipe), *overrides, *(["--no-check"] if check == "never" else [])]
    words += ["--no-timing"] if timing == "none" else []
    if hosts.n_hosts > 1:
        words += ["--hosts", str(hosts.n_hosts)]
        words += ["--address", hosts.address] if hosts.address else []
        words += ["--port", str(hosts.port)] if hosts.port else []
        words += ["--secret-file", str(hosts.secret_file)] if hosts.secret_file else []
    return shlex.join(words)


CheckMode = Literal["new layouts", "never"]
ReplanScope = Literal["all", "plan", "nothing"]
"""What is repeated: the probe of several hosts and the plan, only the plan, or nothing."""


class RunPlans:
    """Makes the plans of a run for the workers that are there; raises PlaitError where they cannot carry it."""

    def __init__(self, run: RunOnHosts, check: CheckMode, timing: Timing = "bounded") -> None:
        self._run, self._check = run, check
        self._timing: Timing = timing
        self._before: list[PlannedHosts] = []
        """The hosts that plans were made for, oldest first: what was measured of them still holds."""

    def first(self, workers: HostWorkers, renew: ReplanScope) -> Plan:
        """Prepare the data, survey the machines, and make or load the plan."""
        config, folder, screen = self._run.config, self._run.folder, self._run.screen
        corpus = prepared_corpus(config, workers.working_folder, screen)
        screen.print(str(learnt_facts(config, corpus)))
        for line in heldout_lines(corpus):
            screen.print(line)
        if not self._run.folder.has_begun:
            refuse_unfit_names(config, run_facts(config, corpus, workers.working_folder))
        fresh, probe = renew != "nothing", "again" if renew == "all" else "kept"
        with screen.progress() as show:
            show(0, 0, "looking at the machine")

            def survey(peak: PeakNeed) -> MachineSurvey:
                return survey_machines(config, workers, screen.print, probe, show, peak=peak, timing=self._timing)

            if folder.has_begun:
                evaluated = [report.step for report in read_metrics(folder.metrics)[1]]
                plan = resumed_plan(
                    config,
                    folder.saved_plan(),
                    corpus,
                    survey,
                    workers,
                    evaluated=evaluated,
                    fresh=fresh,
                    log=screen.print,
                    show=show,
                    timing=self._timing,
                )
            else:
                site = survey("measured")
                plan = make_plan(
                    config, corpus, site, workers, fresh=fresh, say=screen.print, show=show, timing=self._timing
                )
                not_read = tuple(f"text left out: {sentence}" for sentence in corpus.left_out)
                plan = replace(plan, reasons=(*plan.reasons, *not_read))
        for line in overlong_lines(corpus_facts(corpus), plan.job.sequence, config.data.overlong):
            screen.print(line)
        return self._on_hosts(plan, workers)

    def further(self, workers: HostWorkers) -> Plan:
        """The plan for the rest of a run that has begun, on other machines than before."""
        run = self._run
        corpus = prepared_corpus(run.config, workers.working_folder, run.screen)
        with run.screen.progress() as show:
            show(0, 0, "looking at the machines that are there")
            begun, log = run.folder.saved_plan(), run.screen.print

            def survey(peak: PeakNeed) -> MachineSurvey:
                return survey_machines(run.config, workers, log, "kept", show, self._before, peak, self._timing)

            plan = resumed_plan(
                run.config, begun, corpus, survey, workers, fresh=False, log=log, show=show, timing=self._timing
            )
        plan = self._on_hosts(plan, workers)
        self.check(plan, workers)
        return plan

    def _on_hosts(self, plan: Plan, workers: HostWorkers) -> Plan:
        if self._before:
            self._before[-1] = replace(self._before[-1], together_until_s=time.monotonic())
        hosts = workers.host_machines(self._run.peak)  # as they were probed, before some are left out
        libraries = plan.arithmetic.host_backends
        self._before.append(PlannedHosts(hosts=hosts, addresses=workers.addresses(), host_backends=libraries))
        return workers.with_hosts(plan)

    def measure_ahead(self, newcomer: WaitingHostWorkers) -> None:
        """Measure a host that waits to take part, as the next plan needs it."""
        config, plan, machine = self._run.config, self._run.folder.saved_plan(), newcomer.machine
        limit, threads = MeasuringTime.of(budget_of(config), self._timing), plan.placement.threads
        with suppress(OutOfTime):  # then more is measured when it is taken in
            library = library_of_newcomer(config, plan, machine, newcomer, limit)
            need = replace(probe_need(plan), matmul_backend=library, host_backends={})
            measure_ahead(config, newcomer, machine, newcomer.leading_machine, threads, need, limit)

    def check(self, plan: Plan, workers: HostWorkers) -> None:
        """Compare the gradients of a new layout with one process, unless that is not wanted."""
        if self._check == "new layouts":
            check_new_layout(self._run.config, plan, workers, self._run.screen)


@contextmanager
def open_workers(
    hosts: HostsRequest,
    run: RunOnHosts,
    plan_for: PlanFor,
    measure_ahead: MeasureAhead,
    begun: Plan | None,
    started: ForkServer | None = None,
) -> Iterator[RunHosts | OneMachine]:
    """The workers of this machine, or of all hosts once they have joined, numbered as in the plan of a `begun` run.
    `plan_for` makes the plans for those that are there later, `measure_ahead` measures a further host before.

    Raises PlaitError for an error in the recipe's text, before anybody is invited.
    """
    if hosts.n_hosts == 1:
        with worker_pool(run.working, run.entries, started) as workers:

            def survey() -> Machine:
                return survey_machine(workers, named_workers(run.config), "as known").machine

            yield OneMachine(workers, survey, plan_for)
        return
    refuse_torchrun()
    prepared_corpus(run.config, run.working, run.screen)
    previous = (
        [(share.mark, share.name) for share in (*begun.machines.hosts, *begun.machines.left_out)] if begun else []
    )
    with ExitStack() as opened:
        with run.screen.progress() as show:
            show(0, 0, "waiting for the other hosts")
            elastic = opened.enter_context(run_hosts(hosts, run, plan_for, measure_ahead, previous))
        yield elastic
