"""`plait train`: from a recipe to a trained model and a receipt; begins a run, or goes on with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.commands.hosts.invitation import ONE_HOST, HostsRequest
from plait.commands.hosts.joined_run import refuse_joined_folder
from plait.commands.membership.open_workers import open_workers
from plait.commands.membership.run_on_hosts import RunOnHosts
from plait.commands.membership.run_plans import CheckMode, ReplanScope, RunPlans
from plait.commands.monitoring.finish import is_finished, print_finished
from plait.commands.monitoring.training import TrainingEnd, run_training
from plait.commands.planning.begun_plan import refuse_impossible_layout, refuse_lowered_budget, refuse_other_text
from plait.commands.planning.folder_lock import lock_run_folder
from plait.commands.planning.introduction import Details, run_start, running_runs_text
from plait.commands.planning.run_folder import NEW_PLAN_KEYS, check_changes, run_folder
from plait.commands.preparing.corpus import prepared_corpus
from plait.errors import Interrupted, StopSignal
from plait.launch.values.entries import EntryTable
from plait.machines.requested_workers import PeakNeed
from plait.recipe.load import RecipeSource, load_recipe, run_name_of
from plait.screen.screen import Screen
from plait.workers import ENTRIES, dismiss_torchrun_ranks, serve_under_torchrun
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


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
    entries: EntryTable = ENTRIES,
) -> TrainingEnd:
    """Run a recipe to its end, from where it stands; raises PlaitError (before) or RunFailed (during).

    A run that is finished prints its receipt. A first SIGINT, SIGTERM, SIGHUP or SIGUSR1 saves, and is the end's
    `stopped_by`. Over several hosts it first waits until the others have joined. `entries` are what the ranks of this
    machine run.
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
            peak: PeakNeed = "as known" if folder.has_begun and renew == "nothing" else "measured"
            run = RunOnHosts(config=config, folder=folder, screen=screen, working=working, peak=peak, entries=entries)
            plans, begun = RunPlans(run, check), folder.saved_plan() if folder.has_begun and renew != "all" else None
            with open_workers(hosts, run, plans.further, begun) as elastic:
                plan = plans.first(elastic.workers, renew)
                screen.print(run_start(plan, folder.path, details))
                if sharing := running_runs_text(plan, folder):
                    screen.print(sharing)
                plans.check(plan, elastic.workers)
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
    """What a stop means that came while text was prepared, the machine measured, or other hosts awaited."""
    if has_begun:
        return f"stopped by {signal} while no worker trained; the same command goes on with the run as it was saved"
    return f"stopped by {signal} before training began; the same command starts it again"
