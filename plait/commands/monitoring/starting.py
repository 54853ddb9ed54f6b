"""Decides from what the next start of a run's workers continues (copies of their state in memory, or the newest
checkpoint), and records and prints the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from plait.checkpoint.assembled import PartsCopy, parse_copy, publish_copies
from plait.checkpoint.durable import NoRoom
from plait.checkpoint.generation import raise_generation, require_newest
from plait.checkpoint.store import FoundCheckpoint, checkpoint_for, published_checkpoints, staging_for
from plait.commands.monitoring.session import Start
from plait.commands.planning.introduction import time_left_text
from plait.errors import PlaitError
from plait.launch.values.copies import CopiesByStep, ReadableCopy
from plait.planner.plan import Plan
from plait.report.incidents import StartLine, append_start
from plait.run_folder import RunFolder
from plait.screen.screen import Screen
from plait.trainer.checkpointing.fits import described_model, needed_tensors
from plait.workers import WorkerPool

_LIST_BYTES = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestState:
    """The newest step of a run, and where its state is."""

    step: int
    where: Literal["memory", "checkpoint", "nowhere"]
    checkpoint: FoundCheckpoint | None = None
    """The verified checkpoint with it."""
    was_copied: bool = False
    """Whether that checkpoint has just been written from copies in memory."""
    damage: PlaitError | None = None
    """Why the run cannot continue: it has checkpoints, and none is intact."""


def newest_state(folder: RunFolder, workers: WorkerPool, lineage: int) -> NewestState:
    """The newest state from which all workers can continue; call it when none is running any more.

    Copies in memory count if they belong to this lineage and are no older than the newest intact checkpoint; no
    checkpoint is read if they are no older than any.
    """
    copied = next(iter(workers.copied_steps(lineage)), 0)
    if copied >= max(_published_step(folder), 1):
        return NewestState(step=copied, where="memory")
    saved = newest_checkpoint(folder)
    return NewestState(step=copied, where="memory") if copied >= max(saved.step, 1) else saved


def saved_from_copies(
    state: NewestState, folder: RunFolder, plan: Plan, copies: CopiesByStep, generation: int, screen: Screen
) -> NewestState:
    """`state`, or a checkpoint written from the newest `copies` that are newer and contain the whole state: when a host
    is lost for good, or the layout changes, the copies themselves cannot be resumed from. Blocks until it is saved; no
    ranks may run."""
    for step in sorted((step for step in copies if step > state.step), reverse=True):
        staging, final = staging_for(folder.checkpoints, step, generation), checkpoint_for(folder.checkpoints, step)
        try:
            require_newest(folder.path, generation)
            found = [_opened(one) for one in copies[step]]
            publish_copies(found, staging, final, step=step, model=described_model(plan), needs=needed_tensors(plan))
        except NoRoom as error:
            screen.print(f"warning  the state of step {step} is in memory and could not be saved: {error}")
            return state
        except (PlaitError, ValueError, RecursionError):  # it lacks the lost host's part
            continue
        saved = newest_checkpoint(folder)
        return replace(saved, was_copied=saved.step == step)
    return state


def _opened(copy: ReadableCopy) -> PartsCopy:
    """A copy and its parts; raises PlaitError or ValueError if it cannot be read."""
    size, text = copy.read("list", 0, _LIST_BYTES)
    while len(text) < size:
        _, more = copy.read("list", len(text), _LIST_BYTES)
        if not more:
            raise ValueError(f"the copy of rank {copy.rank} ends too early")
        text += more
    data_bytes, _ = copy.read("tensors", 0, 0)
    return parse_copy(copy.rank, text, data_bytes, lambda offset, nbytes: copy.read("tensors", offset, nbytes)[1])


def newest_checkpoint(folder: RunFolder) -> NewestState:
    """The newest intact checkpoint; damaged ones are skipped."""
    try:
        found = folder.find_checkpoint()
    except OSError:  # the run's folder is gone
        return NewestState(step=0, where="nowhere")
    except PlaitError as error:
        return NewestState(step=0, where="nowhere", damage=error)
    if found is None:
        return NewestState(step=0, where="nowhere")
    return NewestState(step=found.manifest.step, where="checkpoint", checkpoint=found)


def _published_step(folder: RunFolder) -> int:
    found = published_checkpoints(folder.checkpoints)
    return int(found[-1].name.rpartition("step-")[2].removesuffix(".replaced")) if found else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """What the next start continues from: a checkpoint's name, the lineage of copies in memory, or neither."""

    steps_done: int = 0
    checkpoint: str | None = None
    lineage: int | None = None
    skipped: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that is damaged."""


def saved_point(found: FoundCheckpoint | None) -> ResumePoint:
    """A checkpoint, or the beginning."""
    if found is None:
        return ResumePoint()
    return ResumePoint(steps_done=found.manifest.step, checkpoint=found.path.name, skipped=found.skipped)


def prepared_point(folder: RunFolder, state: NewestState, lineage: int) -> ResumePoint:
    """Cut the run's files back to the state from which it continues."""
    if state.where != "memory":
        return saved_point(folder.prepare_resume(state.checkpoint))
    folder.prepare_resume_at(state.step)
    return ResumePoint(steps_done=state.step, lineage=lineage)


def next_start(folder: RunFolder, plan: Plan, point: ResumePoint, screen: Screen, numbers: Mapping[str, Any]) -> Start:
    """One more start of the workers, from a checkpoint, from copies in memory or from the beginning; prints which."""
    for sentence in point.skipped:
        screen.print(f"skipped  {sentence}")
    generation = raise_generation(folder.path)
    steps_done, at = point.steps_done, datetime.now(UTC).isoformat(timespec="milliseconds")
    append_start(folder.starts, StartLine(generation=generation, steps_done=steps_done, at=at))
    if steps_done or point.checkpoint:
        screen.print(resumed_text(steps_done, plan, "checkpoint" if point.checkpoint else "memory"))
    return Start(
        generation=generation,
        lineage=generation if point.lineage is None else point.lineage,
        steps_done=steps_done,
        resume_from=point.checkpoint,
        from_copies=point.lineage is not None,
        numbers=numbers,
    )


def require_newest_start(require_present: Callable[[], None], folder: RunFolder, start: Start) -> None:
    """Raise RunFailed if the run's folder is gone, or another plait process has begun a later start of the run in
    it."""
    require_present()
    require_newest(folder.path, start.generation)


def resumed_text(step: int, plan: Plan, where: Literal["checkpoint", "memory"] = "checkpoint") -> str:
    """The printed source of a resumed run, a checkpoint or copies in memory, and the remaining time."""
    left = time_left_text(plan, step)
    kept = (
        f"step {step} of {plan.job.steps}, kept in memory" if where == "memory" else f"step-{step} of {plan.job.steps}"
    )
    return f"resume   from {kept}{left and f', {left} more'}"
