"""The two trainings of a drill: with the hosts that it lends itself, and once more after one of them was lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from math import ceil

from plait.checkpoint.store import published_checkpoints
from plait.commands.drilling.asked import AskedFaults
from plait.commands.drilling.faults import DrilledPlan
from plait.commands.drilling.injector import DrilledRun
from plait.commands.drilling.lent_hosts import LentHosts
from plait.commands.drilling.listening import Heard, ListeningScreen
from plait.commands.drilling.running_ranks import RankPlace, RunningRanks
from plait.commands.planning.run_folder import RunFolder
from plait.commands.train import train
from plait.errors import Interrupted, RunFailed
from plait.planner.plan import Plan
from plait.private_folder import make_private_folder
from plait.recipe.load import RecipeSource, flat_values, load_recipe
from plait.screen.screen import Screen
from plait.units import Every, format_duration
from plait.working_folder import WorkingFolder

_SAVE_EVERY = "5 s"
"""Of a drill by time whose recipe leaves checkpoint.every open: between two faults there must be saves."""


class Rehearsal:
    """Trains a recipe with these settings under other names."""

    def __init__(
        self, recipe: RecipeSource, settings: Sequence[str], hosts: LentHosts, screen: Screen, working: WorkingFolder
    ) -> None:
        self._recipe, self._settings, self._hosts = recipe, settings, hosts
        self._screen, self._working = screen, working

    def train(self, folder: RunFolder, heard: Heard = lambda note: None) -> str:
        """Train to the end, and return "", or the sentence of the failure that ended it. After a host was lost the same
        command is given again, with that host back. Raises Interrupted."""
        screen = ListeningScreen(self._screen, heard)
        while True:
            self._hosts.invite()
            try:
                named = self._named(folder)
                end = train(self._recipe, named, screen=screen, working=self._working, hosts=self._hosts.request)
            except RunFailed as error:
                if not self._hosts.lost:
                    return str(error)
                self._screen.print(f"again    {error}")
                continue
            if end.stopped_by != "finished":
                raise Interrupted(end.stopped_by)
            return ""

    def give_plan(self, source: RunFolder, folder: RunFolder) -> None:
        """Begin a run with another one's plan: hosts that are measured once more might get another."""
        make_private_folder(folder.path)
        folder.save_config_and_plan(load_recipe(self._recipe, self._named(folder)), source.saved_plan())

    def run(self, folder: RunFolder, plan: Plan) -> DrilledRun:
        """A run as the injector sees it, before it begins."""
        workers = [share.workers for share in plan.machines.hosts] or [plan.world_size]
        first_rank = [0, *accumulate(workers)][:-1]
        name = folder.path.name
        folders = [folder.path, *(self._hosts.run_folder(host, name) for host in range(1, len(workers)))]
        places = {
            first + slot: RankPlace(log=where / "logs" / f"rank-{first + slot}.log", slot=slot)
            for first, count, where in zip(first_rank, workers, folders, strict=True)
            for slot in range(count)
        }
        return DrilledRun(
            folder=folder.path,
            ranks=RunningRanks(os.getpid(), places),
            steps=plan.job.steps,
            first_rank=first_rank,
            lose_host=self._hosts.lose,
        )

    def _named(self, folder: RunFolder) -> list[str]:
        return [*self._settings, f"run.name={folder.path.name}"]


def drill_settings(recipe: RecipeSource, overrides: Sequence[str], asked: AskedFaults, screen: Screen) -> list[str]:
    """A person's settings with those that a drill needs besides; says each of these once."""
    values, own = flat_values(load_recipe(recipe, overrides)), [*overrides]
    given = {text.partition("=")[0].strip() for text in overrides}
    if asked.seconds and "train.budget" not in given:
        own.append(f"train.budget={asked.seconds:.0f} s")
        screen.print(f"drill    train.budget is {format_duration(asked.seconds)}, as long as failures come")
    if asked.seconds and values["checkpoint.every"] == "auto":
        own.append(f"checkpoint.every={_SAVE_EVERY}")
        screen.print(f"drill    checkpoint.every is {_SAVE_EVERY}: the run must get on between two failures")
    if any(fault.kind == "corrupt" for fault in asked.named) and values["recover.state_every"] == "auto":
        own.append("recover.state_every=never")
        screen.print("drill    recover.state_every is never: with copies in memory nobody would read what is damaged")
    if asked.lost_hosts and values["balance.every"] == "auto":
        own.append("balance.every=never")
        screen.print("drill    balance.every is never: shares that follow the clock would change the last bits")
    if asked.lost_hosts and values["run.devices"] == "auto":
        own.append("run.devices=cpu")
        screen.print("drill    run.devices is cpu: hosts that are made on one machine cannot each have its GPUs")
    return own


def drilled_plan(plan: Plan, alone: RunFolder, step_s: float) -> DrilledPlan:
    """What of the plan of a run that was left alone a drill must know."""
    hosts = max(1, len(plan.machines.hosts))
    saved = [int(path.name.removeprefix("step-")) for path in published_checkpoints(alone.checkpoints)]
    return DrilledPlan(
        ranks=plan.world_size,
        steps=plan.job.steps,
        hosts=hosts,
        save_every=_save_every(plan.cadence.checkpoint_every, saved, step_s),
    )


def _save_every(every: Every, saved: Sequence[int], step_s: float) -> int:
    """Steps between saves, 0 where there is none but that of the end. `saved` are the steps of the checkpoints that a
    whole run left: by time, or where saving is dear, they say more than the interval."""
    if len(saved) < 2:
        return 0
    steps = every.value if every.unit == "steps" else every.value / step_s
    return ceil(max(steps, saved[-2] - saved[-3] if len(saved) > 2 else 1))
