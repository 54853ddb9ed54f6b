"""A run's workers from the checkpoint that they go on from to the sentence or the receipt at their end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from plait.commands.monitoring.disk_space import space_warning
from plait.commands.monitoring.finish import finish_run
from plait.commands.monitoring.forecast_monitor import monitor_of
from plait.commands.monitoring.newest_state import NewestState, newest_state
from plait.commands.monitoring.recovery import Recovery
from plait.commands.monitoring.session import Session, run_session
from plait.commands.monitoring.starting import next_start, prepared_point, saved_point
from plait.commands.planning.introduction import Details
from plait.commands.planning.run_folder import RunFolder
from plait.commands.planning.running_runs import listed_as_running, registry_folder, run_on_this_machine
from plait.commands.planning.workers import WorkerPool
from plait.commands.preparing.base import keep_base_files
from plait.errors import PlaitError
from plait.launch.values.job import StoppedBy
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.report.receipt import Receipt
from plait.screen.screen import Screen
from plait.trainer.checkpointing.fits import check_fits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnd:
    """How one start of a run ended."""

    stopped_by: StoppedBy
    sentence: str = ""
    """Where the run stands after a stop, and how it goes on; empty where it is finished."""
    receipt: Receipt | None = None
    """The receipt of a run that is finished; None also on all ranks but 0 under torchrun."""


def run_training(
    config: RunConfig,
    folder: RunFolder,
    workers: WorkerPool,
    plan: Plan,
    screen: Screen,
    *,
    details: Details = (),
    is_replanned: bool,
    require_present: Callable[[], None],
) -> TrainingEnd:
    """Start the workers where the run stands, wait for their end, and say how it ended. After a failure that may pass
    they are started again, as the recipe's `recover` says.

    `require_present` raises RunFailed where the run's folder is no longer there.
    """
    require_present()
    plan = replace(plan, corpus=workers.working_folder.relative(plan.corpus))
    found = folder.prepare_resume()
    if found:
        check_fits(found.manifest, plan)
    point = saved_point(found)
    if sentence := space_warning(folder, plan):
        screen.print(sentence)
    keep_base_files(plan.base and str(workers.working_folder.path / plan.base), folder.base)
    folder.save_config_and_plan(config, plan, is_replanned=is_replanned)
    recovery = Recovery(config.recover, folder, plan, require_present)
    with listed_as_running(run_on_this_machine(plan, folder.path), registry_folder()):
        while True:
            start = next_start(folder, plan, point, screen, recovery.numbers())
            state = NewestState(step=0, where="checkpoint")
            bar = screen.steps(plan.steps, start.steps_done)
            compared = monitor_of(plan, start.steps_done, bar.note, "always" if "receipt" in details else "when off")
            first = recovery.first_step
            session = Session(folder, bar, compared, plan.devices, require_present=require_present, on_first_step=first)
            recovery.begins(start)
            try:
                result, step = run_session(plan, folder, workers, start, session)
            except PlaitError as error:
                state = newest_state(folder, workers, start.lineage)
                sentence = recovery.after(error, session, start, state)
            else:
                if session.copies_lost and result.stopped_by == "finished":
                    sentence = f"memory   {session.copies_lost}; going on from the newest checkpoint"
                elif session.bad_step is None or result.stopped_by != "finished":
                    break
                else:
                    sentence = recovery.after_bad_step(session.bad_step, session, start)
            screen.print(sentence)
            point = prepared_point(folder, state, start.lineage)
    if step < plan.steps:
        sentence = stopped_text(step, start.steps_done, plan)
        screen.print(sentence)
        return TrainingEnd(stopped_by=result.stopped_by, sentence=sentence)
    shown, working = details, workers.working_folder
    receipt = finish_run(config, folder, plan, start.steps_done, screen, compared, details=shown, working=working)
    return TrainingEnd(stopped_by="finished", receipt=receipt)


def stopped_text(saved_step: int, resumed_step: int, plan: Plan) -> str:
    """Where the run stands after a stop: at a checkpoint, an older one than this start's, or none yet."""
    if saved_step > resumed_step:
        return f"stopped after step {saved_step} of {plan.steps}, saved; the same command goes on from there"
    where = f"goes on from step {saved_step}" if saved_step else "starts it again"
    return f"stopped before a further step of {plan.steps} was done; the same command {where}"
