"""`plait drill`: trains a recipe twice, once left alone and once with failures on purpose, and compares the two; or
disturbs a run that is training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from math import ceil
from pathlib import Path

from plait.checkpoint.store import published_checkpoints
from plait.commands.drilling.faults import NO_FAULT, DrilledPlan, DrillRequest, FaultKind, require_possible
from plait.commands.drilling.hosts import DrillHosts
from plait.commands.drilling.injector import Injector
from plait.commands.drilling.report import DrillReport, report_of
from plait.commands.drilling.running_ranks import RanksOnHost, RunningRanks
from plait.commands.train import train
from plait.errors import Interrupted, PlaitError, RunFailed
from plait.launch.values.entries import EntryTable
from plait.planner.plan import Plan
from plait.planner.resolve.named import named_degrees
from plait.private_folder import make_private_folder
from plait.recipe.load import RecipeSource, flat_values, load_recipe
from plait.recipe.schema import RunConfig
from plait.report.metrics import median_speed, read_metrics
from plait.run_files.running_runs import process_at_work, registry_folder
from plait.run_folder import RunFolder, find_run, run_folder
from plait.screen.screen import Screen
from plait.units import Every, format_duration, parse_amount, parse_every
from plait.workers import ENTRIES, TRAINING_ENTRY
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

MayDisturb = Callable[[str], bool]
"""Asks a person whether a run that is training may be disturbed, in the words that it is given."""

DISTURBED_ENTRIES = replace(
    ENTRIES, functions={**ENTRIES.functions, TRAINING_ENTRY: "plait.commands.drilling.rank:main"}
)
_POSSIBLE_IN_REAL_RUNS: Sequence[FaultKind] = ("kill", "hang", "slow", "corrupt")
_DRAWN_IN_REAL_RUNS: Sequence[FaultKind] = ("kill", "hang", "slow")
_SAVE_EVERY = "5 s"
"""Checkpoint interval of a drill by time whose recipe names none: there must be saves between two faults."""
_LOOK_S = 0.05
_UNKNOWN = 1 << 40
"""More ranks or steps than any fault names."""


def drill(
    source: Path,
    overrides: Sequence[str],
    request: DrillRequest,
    *,
    may_disturb: MayDisturb,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> DrillReport:
    """Train NAME-left-alone, then NAME-drill with the requested faults; compare their ends. `source` is a recipe's
    file, or a run, which is rehearsed by its own recipe from the beginning, and stays as it is.

    A run that is training is disturbed itself, if `may_disturb` allows it. Raises PlaitError for faults that the run
    cannot have, and if a drill of that name has begun already.
    """
    if not (request.named or request.drawn or request.seconds):  # before the run that is left alone is trained
        raise PlaitError(NO_FAULT)
    run = None if source.suffix == ".toml" or source.is_file() else find_run(str(source), working)
    if run is None:
        return _rehearse(source, overrides, request, screen, working)
    pid = process_at_work(run.path, registry_folder())
    if pid is None:
        screen.print(f"drill    {run.path} is not at work; its recipe is trained again, and it stays as it is")
        return _rehearse(run.recipe, overrides, request, screen, working)
    if overrides:
        raise PlaitError(f'"{run.path}" is at work, and its settings cannot be changed; leave them out')
    return _disturb(run, pid, request, may_disturb, screen)


def _rehearse(
    recipe: RecipeSource, overrides: Sequence[str], request: DrillRequest, screen: Screen, working: WorkingFolder
) -> DrillReport:
    name = load_recipe(recipe, overrides).run.name
    alone, drilled = (run_folder(f"{name}-{end}", working) for end in ("left-alone", "drill"))
    if drilled.has_begun:
        raise PlaitError(f'"{drilled.path}" is there from an earlier drill; move it away, or delete it')
    if request.named:  # what the recipe itself says is refused before the run that is left alone is trained
        require_possible(request.named, facts_of_recipe(load_recipe(recipe, overrides), request.lost_hosts))
    settings = _settings(recipe, overrides, request, screen)

    def named(folder: RunFolder) -> list[str]:
        return [*settings, f"run.name={folder.path.name}"]

    with DrillHosts(request.lost_hosts, working.cache / f"{name}-drill-hosts") as hosts:

        def train_as(folder: RunFolder, entries: EntryTable = ENTRIES) -> str:
            """Train to the end, and return "", or the sentence of the failure that ended it. After a host was lost the
            same command is given again, with that host back."""
            while True:
                hosts.invite()
                try:
                    end = train(
                        recipe, named(folder), screen=screen, working=working, hosts=hosts.request, entries=entries
                    )
                except RunFailed as error:
                    if not hosts.has_lost_one:
                        return str(error)
                    screen.print(f"again    {error}")
                    continue
                if end.stopped_by != "finished":
                    raise Interrupted(end.stopped_by)
                return ""

        if sentence := train_as(alone):
            raise RunFailed(sentence)
        plan, step_s = alone.saved_plan(), median_speed(read_metrics(alone.metrics)[0]).step_s_median
        saved = [int(path.name.removeprefix("step-")) for path in published_checkpoints(alone.checkpoints)]
        facts = DrilledPlan(
            ranks=plan.world_size,
            steps=plan.job.steps,
            hosts=max(1, len(plan.machines.hosts)),
            save_every=_save_every(plan.cadence.checkpoint_every, saved, step_s),
        )
        faults = request.faults(facts, step_s)
        screen.print(f"drill    {', '.join(map(str, faults))} (seed {request.seed})")
        if request.lost_hosts:  # hosts that are measured once more might get another plan
            make_private_folder(drilled.path)
            drilled.save_config_and_plan(load_recipe(recipe, named(drilled)), plan)
        others = [hosts.run_folder(host, drilled.path.name) for host in range(1, len(plan.machines.hosts))]
        ranks = _ranks([drilled.path, *others], plan, os.getpid())
        with Injector(faults, ranks, folder=drilled.path, steps=plan.job.steps, lose_host=hosts.lose) as injector:
            sentence = train_as(drilled, DISTURBED_ENTRIES)
    if not drilled.has_begun:  # nothing to report of
        raise RunFailed(sentence)
    return report_of(drilled, faults, injector.injected, seed=request.seed, alone=alone, ended_by=sentence)


def facts_of_recipe(config: RunConfig, lost_hosts: int) -> DrilledPlan:
    """The recipe's own statements about its plan; values that it leaves open rule no failure out."""
    try:
        budget = parse_amount(config.train.budget)
    except PlaitError:  # "auto"
        budget = None
    degrees, every = named_degrees(config), config.checkpoint.every
    save_every = 0 if every == "never" else 1
    if every not in ("auto", "never") and (parsed := parse_every(every)).unit == "steps":
        save_every = int(parsed.value)
    return DrilledPlan(
        ranks=_UNKNOWN if degrees is None else degrees.world_size,
        steps=int(budget.value) if budget is not None and budget.unit == "steps" else _UNKNOWN,
        save_every=save_every,
        hosts=1 + lost_hosts,
    )


def _disturb(run: RunFolder, pid: int, request: DrillRequest, may_disturb: MayDisturb, screen: Screen) -> DrillReport:
    """Disturb the run that the process `pid` leads, and return once it has gone on after all faults, or is over. No run
    is left alone beside it: its ledger says whether samples were lost or repeated."""
    odd = next((fault for fault in request.named if fault.kind not in _POSSIBLE_IN_REAL_RUNS), None)
    if odd is not None:
        raise PlaitError(
            f"{odd}: of a run that is at work, workers can be killed, stopped and slowed down, and its newest "
            "checkpoint damaged; rehearse anything else with its recipe"
        )
    plan, reports = run.saved_plan(), read_metrics(run.metrics)[0]
    if not reports:
        raise PlaitError(f'"{run.path}" has not done its first step; wait a moment')
    facts = DrilledPlan(
        ranks=plan.workers_beside(0),
        steps=plan.job.steps,
        save_every=1 if plan.cadence.checkpoint_every.value else 0,
        kinds=_DRAWN_IN_REAL_RUNS,
        steps_done=reports[-1].step,
    )
    faults = request.faults(facts, median_speed(reports).step_s_median)
    what = ", ".join(map(str, faults))
    if not may_disturb(f'"{run.path}" is at work (process {pid}); {what} would hit its own workers'):
        raise Interrupted("SIGINT", "nothing was done")
    screen.print(f"drill    {what} (seed {request.seed})")
    ranks = _ranks([run.path], plan, pid)
    with Injector(faults, ranks, folder=run.path, steps=plan.job.steps) as injector:
        while not injector.is_done and _lives(pid):
            time.sleep(_LOOK_S)
    ended = "" if _lives(pid) or injector.is_done else "the run ended before all failures had come"
    return report_of(run, faults, injector.injected, seed=request.seed, alone=None, ended_by=ended)


def _settings(recipe: RecipeSource, overrides: Sequence[str], request: DrillRequest, screen: Screen) -> list[str]:
    """A person's settings with those that a drill needs besides; prints each of these once."""
    values, settings = flat_values(load_recipe(recipe, overrides)), [*overrides]

    def add(key: str, value: str, why: str) -> None:
        settings.append(f"{key}={value}")
        screen.print(f"drill    {key} is {why}")

    given = {text.partition("=")[0].strip() for text in overrides}
    if request.seconds and "train.budget" not in given:
        as_long = f"{format_duration(request.seconds)}, as long as failures come"
        add("train.budget", f"{request.seconds:.0f} s", as_long)
    if request.seconds and values["checkpoint.every"] == "auto":
        add("checkpoint.every", _SAVE_EVERY, f"{_SAVE_EVERY}: the run must get on between two failures")
    if any(fault.kind == "corrupt" for fault in request.named) and values["recover.state_every"] == "auto":
        add("recover.state_every", "never", "never: with copies in memory the damaged checkpoint would not be read")
    if request.lost_hosts and values["balance.every"] == "auto":
        add("balance.every", "never", "never: shares that follow the clock would change the last bits")
    if request.lost_hosts and values["run.devices"] == "auto":
        add("run.devices", "cpu", "cpu: hosts that are made on one machine cannot each have its GPUs")
    return settings


def _save_every(every: Every, saved: Sequence[int], step_s: float) -> int:
    """Steps between saves, 0 if only the end is saved. `saved` are the steps of the checkpoints that a whole run left:
    by time, or if saving is expensive, they say more than the interval."""
    if len(saved) < 2:
        return 0
    steps = every.value if every.unit == "steps" else every.value / step_s
    return ceil(max(steps, saved[-2] - saved[-3] if len(saved) > 2 else 1))


def _ranks(folders: Sequence[Path], plan: Plan, root: int) -> RunningRanks:
    """The ranks of hosts that have the run's files in `folders`; on this machine `root` starts them."""
    workers = [share.workers for share in plan.machines.hosts] or [plan.world_size]
    ends = list(accumulate(workers))
    hosts = [
        RanksOnHost(ranks=range(end - count, end), logs=folder / "logs")
        for end, count, folder in zip(ends, workers, folders, strict=False)
    ]
    return RunningRanks(root, hosts)


def _lives(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
