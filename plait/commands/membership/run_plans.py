"""The plans of one run: the one that it begins or goes on with, and those for the machines that are there later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from plait.commands.membership.run_on_hosts import RunOnHosts
from plait.commands.planning.begun_plan import resumed_plan
from plait.commands.planning.make_plan import make_plan
from plait.commands.preparing.corpus import (
    corpus_facts,
    heldout_lines,
    learnt_facts,
    overlong_lines,
    prepared_corpus,
    run_facts,
)
from plait.commands.verifying.gradient_check import check_new_layout
from plait.machines.requested_workers import PeakNeed
from plait.planner.plan import Plan
from plait.planner.resolve.named import refuse_unfit_names
from plait.probing.survey import HostMachine, MachineSurvey, survey_machines
from plait.workers import HostWorkers

CheckMode = Literal["new layouts", "never"]
ReplanScope = Literal["all", "plan", "nothing"]
"""What is made again: the probe of several hosts and the plan, the plan alone, or nothing."""


class RunPlans:
    """Makes the plans of a run for the workers that are there; raises PlaitError where they cannot carry it."""

    def __init__(self, run: RunOnHosts, check: CheckMode) -> None:
        self._run, self._check = run, check
        self._before: Sequence[HostMachine] = ()
        """The hosts that the last plan was made for: what was measured of some of them still holds."""

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
                return survey_machines(config, workers, screen.print, probe, show, peak=peak)

            if folder.has_begun:
                begun = folder.saved_plan()
                plan = resumed_plan(config, begun, corpus, survey, workers, fresh=fresh, log=screen.print, show=show)
            else:
                plan = make_plan(config, corpus, survey("measured"), workers, fresh=fresh, say=screen.print, show=show)
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
                return survey_machines(run.config, workers, log, "kept", show, self._before, peak)

            plan = resumed_plan(run.config, begun, corpus, survey, workers, fresh=False, log=log, show=show)
        plan = self._on_hosts(plan, workers)
        self.check(plan, workers)
        return plan

    def _on_hosts(self, plan: Plan, workers: HostWorkers) -> Plan:
        self._before = workers.host_machines(self._run.peak)  # as they were probed, before some are left out
        return workers.with_hosts(plan)

    def check(self, plan: Plan, workers: HostWorkers) -> None:
        """Compare the gradients of a new layout with one process, unless that is not wanted."""
        if self._check == "new layouts":
            check_new_layout(self._run.config, plan, workers, self._run.screen)
