"""A run's workers from the checkpoint that they go on from to the sentence or the receipt at their end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from plait.checkpoint.store import published_checkpoints
from plait.commands.monitoring.elastic_workers import change_text
from plait.commands.monitoring.finish import finish_run
from plait.commands.monitoring.forecast_monitor import monitor_of
from plait.commands.monitoring.recovery import Recovery
from plait.commands.monitoring.session import Session, Start, run_session
from plait.commands.monitoring.starting import (
    ResumePoint,
    newest_checkpoint,
    newest_state,
    next_start,
    prepared_point,
    require_newest_start,
    saved_from_copies,
    saved_point,
)
from plait.commands.planning.introduction import Details
from plait.commands.preparing.base import keep_base_files
from plait.errors import PlaitError
from plait.launch.values.copies import CopiesByStep
from plait.launch.values.failure import FailureFacts, HostNotServed, WorkersFailed
from plait.launch.values.job import StoppedBy
from plait.model.weights import trained_parameter_count
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.report.receipt import Receipt
from plait.run_files.running_runs import listed_as_running, registry_folder, run_on_this_machine
from plait.run_folder import RunFolder
from plait.screen.screen import Screen
from plait.trainer.checkpointing.fits import check_fits
from plait.units import counted, format_bytes
from plait.workers import CannotGoOn, ElasticWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnd:
    """How one start of a run ended."""

    stopped_by: StoppedBy
    sentence: str = ""
    """The run's progress after a stop, and how to continue it; empty if it is finished."""
    receipt: Receipt | None = None
    """The receipt of a run that is finished; None also on all ranks but 0 under torchrun."""


def run_training(
    config: RunConfig,
    folder: RunFolder,
    elastic: ElasticWorkers,
    plan: Plan,
    screen: Screen,
    *,
    details: Details = (),
    is_replanned: bool,
    require_present: Callable[[], None],
) -> TrainingEnd:
    """Start the workers where the run stands, wait for their end, and say how it ended. After a failure that may pass
    they are started again, as the recipe's `recover` says; where machines came or went, by another plan.

    `require_present` raises RunFailed where the run's folder is no longer there.
    """
    require_present()
    working = elastic.workers.working_folder
    plan = replace(plan, job=replace(plan.job, corpus=working.relative(plan.job.corpus)))
    point = _first_point(folder, plan, screen)
    keep_base_files(plan.job.base and str(working.path / plan.job.base), folder.base)
    folder.save_config_and_plan(config, plan, is_replanned=is_replanned)
    recovery = Recovery(config.recover, folder, plan, require_present, may_shrink=elastic.may_shrink)
    while True:
        start = next_start(folder, plan, point, screen, recovery.numbers())
        bar, failure = screen.steps(plan.job.steps, start.steps_done), None
        verbose = "receipt" in details
        off_only = "when off" if start.steps_done == 0 or is_replanned else "never"  # by one plan it is said once
        compared = monitor_of(plan, start.steps_done, bar.note, "always" if verbose else off_only)
        require_ours = partial(require_newest_start, require_present, folder, start)
        first = recovery.first_step
        session = Session(
            folder,
            bar,
            compared,
            plan.devices,
            require_present=require_ours,
            on_first_step=first,
            on_detail=bar.note if verbose else lambda text: None,
        )
        recovery.begins(start)
        copies: CopiesByStep = {}
        try:
            with listed_as_running(run_on_this_machine(plan, folder.path), registry_folder()):
                result, step = run_session(plan, folder, elastic.workers, start, session)
        except PlaitError as error:
            copies = elastic.workers.copies(start.lineage)
            state = newest_state(folder, elastic.workers, start.lineage)
            if state.where != "memory":
                state = saved_from_copies(state, folder, plan, copies, start.generation, screen)
            screen.print(recovery.after(error, session, start, state))
            failure = error.facts if isinstance(error, WorkersFailed | HostNotServed) else None
        else:
            if result.stopped_by != "finished" or step >= plan.job.steps:
                break
            state = newest_checkpoint(folder)
            if session.copies_lost:
                screen.print(f"memory   {session.copies_lost}; going on from the newest checkpoint")
            elif session.bad_step is not None:
                screen.print(recovery.after_bad_step(session.bad_step, session, start, state))
            elif result.how == "over":
                break
        try:
            renewed = _renewed_plan(config, folder, elastic, plan, failure, screen)
        except CannotGoOn as end:
            state = newest_checkpoint(folder)
            recovery.cannot_go_on(end, session, start, state)
            return _left(end, state.step, start, plan, screen)
        if renewed is not None:
            if state.where == "memory":  # these copies are of the plan before
                saved = newest_checkpoint(folder)
                state = saved_from_copies(saved, folder, plan, copies, start.generation, screen)
            plan = renewed
            recovery.follow(plan)
        point = prepared_point(folder, state, start.lineage)
    if step < plan.job.steps:
        return _stopped(result.stopped_by, step, start, plan, screen)
    receipt = finish_run(config, folder, plan, start.steps_done, screen, compared, details=details, working=working)
    return TrainingEnd(stopped_by="finished", receipt=receipt)


def _first_point(folder: RunFolder, plan: Plan, screen: Screen) -> ResumePoint:
    """The run's progress before this command starts anything; warns if the disk is too small for what follows."""
    found = folder.prepare_resume()
    if found:
        check_fits(found.manifest, plan)
    if sentence := space_warning(folder, plan):
        screen.print(sentence)
    return saved_point(found)


def _stopped(by: StoppedBy, step: int, start: Start, plan: Plan, screen: Screen) -> TrainingEnd:
    sentence = stopped_text(step, start.steps_done, plan)
    screen.print(sentence)
    return TrainingEnd(stopped_by=by, sentence=sentence)


def _left(end: CannotGoOn, step: int, start: Start, plan: Plan, screen: Screen) -> TrainingEnd:
    """How a run ends whose machines are too few: stopped where one's user took it away, and else failed."""
    if end.left_by is None:
        raise end
    screen.print(f"hosts    {end}")
    return _stopped(end.left_by, step, start, plan, screen)


def _renewed_plan(
    config: RunConfig,
    folder: RunFolder,
    elastic: ElasticWorkers,
    plan: Plan,
    failure: FailureFacts | None,
    screen: Screen,
) -> Plan | None:
    """The plan for the machines that are there now, None where they are the same. Says what changed."""
    renewed = elastic.renewed(plan, failure)
    if renewed is None:
        return None
    new = replace(
        renewed.plan,
        job=replace(renewed.plan.job, corpus=elastic.workers.working_folder.relative(renewed.plan.job.corpus)),
    )
    folder.save_config_and_plan(config, new, is_replanned=True)
    screen.print(change_text(plan, replace(renewed, plan=new)))
    return new


def stopped_text(saved_step: int, resumed_step: int, plan: Plan) -> str:
    """The run's state after a stop: at a checkpoint, an older one than this start's, or none yet."""
    if saved_step > resumed_step:
        return f"stopped after step {saved_step} of {plan.job.steps}, saved; the same command goes on from there"
    where = f"goes on from step {saved_step}" if saved_step else "starts it again"
    return f"stopped before a further step of {plan.job.steps} was done; the same command {where}"


# Whether the disk holds the checkpoints that the run will keep, asked before its first step.


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint's numbers: the weights that learn, and their moments, in float32."""
    shape = plan.job.shape
    return 4 * (trained_parameter_count(shape) + plan.job.optimizer.state_numbers(shape))


def free_bytes(folder: Path) -> float:
    """Bytes that this user may still write on the disk of a folder; infinite where it does not say."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        return disk.f_bavail * disk.f_frsize
    return inf


def space_warning(folder: RunFolder, plan: Plan, free: Callable[[Path], float] = free_bytes) -> str:
    """A warning where the disk does not hold the checkpoints that stay, and one more that is written; else ""."""
    each, there = checkpoint_bytes(plan), len(published_checkpoints(folder.checkpoints))
    most = plan.cadence.checkpoint_keep + 1
    needed = each * max(1, most - there)
    if (left := free(folder.path)) >= needed:
        return ""
    return (
        f"warning  {counted(most, 'checkpoint')} of {format_bytes(each)} (checkpoint.keep, and one that is written) "
        f"need {format_bytes(needed)} more in {folder.path}, where {format_bytes(left)} are free: free some space, "
        "else saving fails"
    )
