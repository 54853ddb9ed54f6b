"""A run's workers from the checkpoint that they go on from to the sentence or the receipt at their end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from plait.checkpoint.fitting import check_model, check_weights
from plait.commands.monitoring.finish import finish_run
from plait.commands.monitoring.forecast_monitor import monitor_of
from plait.commands.monitoring.session import Session, run_session
from plait.commands.planning.introduction import Details, time_left_text
from plait.commands.planning.run_folder import RunFolder
from plait.commands.planning.running_runs import listed_as_running, registry_folder, run_on_this_machine
from plait.commands.planning.workers import WorkerPool
from plait.commands.preparing.base import keep_base_files
from plait.launch.values.job import StoppedBy
from plait.model.shape import weight_sizes
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.report.receipt import Receipt
from plait.screen.screen import Screen


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
    """Start the workers where the run stands, wait for their end, and say how it ended.

    `require_present` raises RunFailed where the run's folder is no longer there.
    """
    require_present()
    plan = replace(plan, corpus=workers.working_folder.relative(plan.corpus))
    point = folder.prepare_resume()
    if point:
        check_model(point.manifest, plan.shape.to_dict())
        check_weights(point.manifest, weight_sizes(plan.shape))
    keep_base_files(plan.base, folder.base)
    folder.save_config_and_plan(config, plan, is_replanned=is_replanned)
    if point:
        for sentence in point.skipped:
            screen.print(f"skipped  {sentence}")
        screen.print(resumed_text(point.manifest.step, plan))
    done = point.manifest.step if point else 0
    bar = screen.steps(plan.steps, done)
    compared = monitor_of(plan, done, bar.note, "always" if "receipt" in details else "when off")
    session = Session(folder, bar, compared, plan.devices, require_present=require_present)
    with listed_as_running(run_on_this_machine(plan, folder.path), registry_folder()):
        result, step = run_session(plan, folder, workers, done, point.path.name if point else None, session)
    if step < plan.steps:
        sentence = stopped_text(step, done, plan)
        screen.print(sentence)
        return TrainingEnd(stopped_by=result.stopped_by, sentence=sentence)
    receipt = finish_run(config, folder, plan, done, screen, compared, details=details, working=workers.working_folder)
    return TrainingEnd(stopped_by="finished", receipt=receipt)


def resumed_text(step: int, plan: Plan) -> str:
    """From which checkpoint a run goes on, and how long that takes."""
    left = time_left_text(plan, step)
    return f"resume   from step-{step} of {plan.steps}{left and f', {left} more'}"


def stopped_text(saved_step: int, resumed_step: int, plan: Plan) -> str:
    """Where the run stands after a stop: at a checkpoint, an older one than this start's, or none yet."""
    if saved_step > resumed_step:
        return f"stopped after step {saved_step} of {plan.steps}, saved; the same command goes on from there"
    where = f"goes on from step {saved_step}" if saved_step else "starts it again"
    return f"stopped before a further step of {plan.steps} was done; the same command {where}"
