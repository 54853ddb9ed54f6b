"""Where a run can go on from: copies of the workers' state in memory, or its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.checkpoint.store import FoundCheckpoint, published_checkpoints
from plait.errors import PlaitError
from plait.run_folder import RunFolder
from plait.workers import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestState:
    """The step that a run stands at, and where its state is."""

    step: int
    where: Literal["memory", "checkpoint", "nowhere"]
    checkpoint: FoundCheckpoint | None = None
    """The one that it is in, verified."""
    damage: PlaitError | None = None
    """Why there is no way on: the run has checkpoints, and none is whole."""


def newest_state(folder: RunFolder, workers: WorkerPool, lineage: int) -> NewestState:
    """The newest state that all workers can go on from; call it when none is running any more.

    Copies in memory count where they are of this lineage, and no older than the newest checkpoint that is whole; no
    checkpoint is read where they are no older than any.
    """
    copied = next(iter(workers.copied_steps(lineage)), 0)
    if copied >= max(_published_step(folder), 1):
        return NewestState(step=copied, where="memory")
    saved = newest_checkpoint(folder)
    return NewestState(step=copied, where="memory") if copied >= max(saved.step, 1) else saved


def newest_checkpoint(folder: RunFolder) -> NewestState:
    """The newest checkpoint that is whole, as a damaged one is no way on."""
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
