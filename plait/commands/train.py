"""`plait train`: from a recipe to a trained model and a receipt; begins a run, or goes on with one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from plait.commands.hosts.invitation import ONE_HOST, HostsRequest
from plait.commands.hosts.joined_run import refuse_joined_folder
from plait.commands.hosts.leader_workers import leader_workers
from plait.commands.monitoring.finish import is_finished, print_finished
from plait.commands.monitoring.training import TrainingEnd, run_training
from plait.commands.planning.begun_plan import (
    refuse_impossible_layout,
    refuse_lowered_budget,
    refuse_other_text,
    resumed_plan,
)
from plait.commands.planning.folder_lock import lock_run_folder
from plait.commands.planning.introduction import Details, run_start, running_runs_text
from plait.commands.planning.make_plan import make_plan
from plait.commands.planning.run_folder import NEW_PLAN_KEYS, RunFolder, check_changes, run_folder
from plait.commands.planning.workers import (
    HostWorkers,
    dismiss_torchrun_ranks,
    refuse_torchrun,
    serve_under_torchrun,
    worker_pool,
)
from plait.commands.preparing.corpus import corpus_facts, prepared_corpus
from plait.commands.probing.survey import survey_machines
from plait.commands.verifying.gradient_check import check_new_layout
from plait.errors import Interrupted, StopSignal
from plait.planner.plan import Plan
from plait.recipe.load import RecipeSource, load_recipe, run_name_of
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

CheckMode = Literal["new layouts", "never"]
ReplanScope = Literal["all", "plan", "nothing"]
"""What is made again: the probe of several hosts and the plan, the plan alone, or nothing."""


def train(
    recipe: RecipeSource,
    overrides: Sequence[str] = (),
    *,
    fresh_plan: bool = False,
    check: CheckMode = "new layouts",
    hosts: HostsRequest = ONE_HOST,
    details: Details = (),
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> TrainingEnd:
    """Run a recipe to its end, from where it stands; raises PlaitError (before) or RunFailed (during) with the mend.

    A run that is finished prints its receipt. A first SIGINT, SIGTERM, SIGHUP or SIGUSR1 saves, and is the end's
    `stopped_by`. Over several hosts it first waits until the others have joined.
    """
    if serve_under_torchrun():
        return TrainingEnd(stopped_by="finished")
    config = load_recipe(recipe, overrides)
    folder = run_folder(config.run.name, working)
    if isinstance(recipe, Path) and config.run.name == run_name_of(recipe) != recipe.stem.lower():
        screen.print(f"name     {config.run.name}, made from {recipe.name} (run.name)")
    refuse_joined_folder(folder)
    with lock_run_folder(folder) as require_present:
        changed = check_changes(folder.saved_config(), config) if folder.has_begun else []
        if folder.has_begun:
            refuse_lowered_budget(config, folder.saved_plan())
            refuse_impossible_layout(config, folder.saved_plan())
        if folder.has_begun and "train.budget" not in changed and is_finished(folder):
            refuse_other_text(prepared_corpus(config, working, screen), folder.saved_plan())
            receipt = print_finished(folder, screen, details)
            dismiss_torchrun_ranks()
            return TrainingEnd(stopped_by="finished", receipt=receipt)
        plan_changed = any(key.startswith(NEW_PLAN_KEYS) for key in changed)
        renew: ReplanScope = "all" if fresh_plan else "plan" if plan_changed else "nothing"
        try:
            with _open_workers(hosts, config, working, renew, screen) as workers:
                plan = workers.with_hosts(_prepare_plan(config, folder, workers, renew=renew, screen=screen))
                screen.print(run_start(plan, folder.path, details))
                if sharing := running_runs_text(plan, folder):
                    screen.print(sharing)
                if check == "new layouts":
                    check_new_layout(config, plan, workers, screen)
                return run_training(
                    config,
                    folder,
                    workers,
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
    """What a stop means that came while text was prepared, the machine measured, or other hosts awaited."""
    if has_begun:
        return f"stopped by {signal} while no worker trained; the same command goes on with the run as it was saved"
    return f"stopped by {signal} before training began; the same command starts it again"


def _open_workers(
    hosts: HostsRequest, config: RunConfig, working: WorkingFolder, renew: ReplanScope, screen: Screen
) -> AbstractContextManager[HostWorkers]:
    """The workers of this machine, or of all hosts once they have joined, numbered as before in this run."""
    if hosts.n_hosts == 1:
        return worker_pool(working)
    refuse_torchrun()
    prepared_corpus(config, working, screen)  # an error in it is shown before anybody is invited to join
    folder = run_folder(config.run.name, working)
    begun = folder.saved_plan() if folder.has_begun and renew != "all" else None
    previous = [(share.mark, share.name) for share in (*begun.hosts, *begun.left_out)] if begun else []
    return leader_workers(
        hosts, config=config, folder=folder.path, log=screen.print, previous_hosts=previous, working=working
    )


def _prepare_plan(
    config: RunConfig, folder: RunFolder, workers: HostWorkers, *, renew: ReplanScope, screen: Screen
) -> Plan:
    """Prepare the data, survey the machines, and make or load the plan."""
    corpus = prepared_corpus(config, workers.working_folder, screen)
    screen.print(str(corpus_facts(corpus)))
    fresh, probe = renew != "nothing", "again" if renew == "all" else "kept"
    with screen.progress() as show:
        show(0, 0, "looking at the machine")
        site = survey_machines(config, workers, screen.print, probe, show)
        if folder.has_begun:
            begun = folder.saved_plan()
            return resumed_plan(config, begun, corpus, site, workers, fresh=fresh, log=screen.print, show=show)
        return make_plan(config, corpus, site, workers, fresh=fresh, say=screen.print, show=show)
