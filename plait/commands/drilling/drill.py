"""`plait drill`: trains a recipe twice, once left alone and once with failures on purpose, and compares the two; or
disturbs a run that is at work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from plait.commands.drilling.asked import AskedFaults, planned_faults
from plait.commands.drilling.at_work import drill_at_work
from plait.commands.drilling.faults import NO_FAULT
from plait.commands.drilling.injector import Injector
from plait.commands.drilling.lent_hosts import LentHosts
from plait.commands.drilling.rehearsal import Rehearsal, drill_settings, drilled_plan
from plait.commands.drilling.report import DrillReport, report_of
from plait.commands.planning.run_folder import RunFolder, find_run, run_folder
from plait.commands.planning.running_runs import process_at_work, registry_folder
from plait.errors import PlaitError, RunFailed
from plait.recipe.load import RecipeSource, load_recipe
from plait.report.metrics import median_speed, read_metrics
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

MayDisturb = Callable[[str], bool]
"""Asks a person whether a run that is at work may be disturbed, in the words that it is given."""


def drill(
    source: Path,
    overrides: Sequence[str],
    asked: AskedFaults,
    *,
    may_disturb: MayDisturb,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> DrillReport:
    """Train NAME-left-alone, then NAME-drill with these faults and those that a seed draws; compare their ends.
    `source` is a recipe's file, or a run, which is rehearsed by its own recipe from the beginning, and stays as it is.

    A run that is at work is disturbed itself, where `may_disturb` allows it. Raises PlaitError for faults that the run
    cannot have, and where a drill of that name has begun already.
    """
    if not (asked.named or asked.drawn or asked.seconds):  # before the run that is left alone is trained
        raise PlaitError(NO_FAULT)
    if asked.seed is None:
        asked = replace(asked, seed=random.SystemRandom().randrange(1 << 31))
    run = None if source.suffix == ".toml" or source.is_file() else find_run(str(source), working)
    if run is None:
        return _rehearse(source, overrides, asked, screen, working)
    pid = process_at_work(run.path, registry_folder())
    if pid is None:
        screen.print(f"drill    {run.path} is not at work; its recipe is trained anew, and it stays as it is")
        return _rehearse(run.recipe, overrides, asked, screen, working)
    if overrides:
        raise PlaitError(f'"{run.path}" is at work, and its settings cannot be changed; leave them out')
    return drill_at_work(run, pid, asked, may_disturb, screen)


def _rehearse(
    recipe: RecipeSource, overrides: Sequence[str], asked: AskedFaults, screen: Screen, working: WorkingFolder
) -> DrillReport:
    name = load_recipe(recipe, overrides).run.name
    alone, drilled = (run_folder(f"{name}-{end}", working) for end in ("left-alone", "drill"))
    if drilled.has_begun:
        raise PlaitError(f'"{drilled.path}" is there from an earlier drill; move it away, or delete it')
    settings, seed = drill_settings(recipe, overrides, asked, screen), asked.seed or 0
    with LentHosts(asked.lost_hosts, working.cache / f"{name}-drill-hosts") as hosts:
        rehearsal = Rehearsal(recipe, settings, hosts, screen, working)
        if sentence := rehearsal.train(alone):
            raise RunFailed(sentence)
        plan, step_s = alone.saved_plan(), _step_s(alone)
        faults = planned_faults(asked, drilled_plan(plan, alone, step_s), seed, step_s)
        screen.print(f"drill    {', '.join(map(str, faults))} (seed {seed})")
        if asked.lost_hosts:
            rehearsal.give_plan(alone, drilled)
        with Injector(faults, rehearsal.run(drilled, plan)) as injector:
            sentence = rehearsal.train(drilled, injector.heard)
    if not drilled.has_begun:  # nothing to report of
        raise RunFailed(sentence)
    return report_of(drilled, faults, injector.carried, seed=seed, alone=alone, ended_by=sentence)


def _step_s(run: RunFolder) -> float:
    return median_speed(read_metrics(run.metrics)[0]).step_s_median
