"""A drill on a run that is at work for real: its own workers are killed, after its owner was asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from plait.commands.drilling.asked import AskedFaults, faults_from_now
from plait.commands.drilling.faults import DrilledPlan, FaultKind
from plait.commands.drilling.injector import DrilledRun, Injector
from plait.commands.drilling.report import DrillReport, report_of
from plait.commands.drilling.running_ranks import RankPlace, RunningRanks
from plait.commands.planning.run_folder import RunFolder
from plait.errors import Interrupted, PlaitError
from plait.report.metrics import median_speed, read_metrics
from plait.screen.screen import Screen

POSSIBLE: tuple[FaultKind, ...] = ("kill", "hang", "slow", "corrupt")
_DRAWN: tuple[FaultKind, ...] = ("kill", "hang", "slow")
_LOOK_S = 0.05


def drill_at_work(
    run: RunFolder, pid: int, asked: AskedFaults, may_disturb: Callable[[str], bool], screen: Screen
) -> DrillReport:
    """Disturb the run that the process `pid` leads, and return once it is back at work after all faults, or over. There
    is no run left alone beside it: its ledger says whether samples were lost or repeated.

    Raises PlaitError for faults that only a rehearsal can have, Interrupted where nobody allows it.
    """
    odd = next((fault for fault in asked.named if fault.kind not in POSSIBLE), None)
    if odd is not None:
        raise PlaitError(
            f"{odd}: of a run that is at work, workers can be killed, stopped and slowed down, and its newest "
            "checkpoint damaged; rehearse anything else with its recipe"
        )
    plan, reports = run.saved_plan(), read_metrics(run.metrics)[0]
    if not reports:
        raise PlaitError(f'"{run.path}" has not done its first step; wait a moment')
    ranks, step_s = plan.workers_beside(0), median_speed(reports).step_s_median
    saves = 1 if plan.cadence.checkpoint_every.value else 0
    drilled = DrilledPlan(
        ranks=ranks, steps=plan.job.steps, save_every=saves, kinds=_DRAWN, steps_done=reports[-1].step
    )
    faults = faults_from_now(asked, drilled, asked.seed or 0, step_s)
    what = ", ".join(map(str, faults))
    if not may_disturb(f'"{run.path}" is at work (process {pid}); {what} would hit its own workers'):
        raise Interrupted("SIGINT", "nothing was done")
    screen.print(f"drill    {what} (seed {asked.seed})")
    places = {rank: RankPlace(log=run.path / "logs" / f"rank-{rank}.log", slot=rank) for rank in range(ranks)}
    target = DrilledRun(folder=run.path, ranks=RunningRanks(pid, places), steps=plan.job.steps)
    with Injector(faults, target) as injector:
        while not injector.is_done and _lives(pid):
            time.sleep(_LOOK_S)
    ended = "" if _lives(pid) or injector.is_done else "the run ended before all failures had come"
    return report_of(run, faults, injector.carried, seed=asked.seed or 0, alone=None, ended_by=ended)


def _lives(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
