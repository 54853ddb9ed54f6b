"""Where a run can go on from: copies of the workers' state in memory, or its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.checkpoint.store import published_checkpoints
from plait.commands.planning.run_folder import RunFolder
from plait.commands.planning.workers import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestState:
    """The step that a run stands at, and where its state is; of a checkpoint nobody has looked yet whether it is
    whole."""

    step: int
    where: Literal["memory", "checkpoint", "nowhere"]


def newest_state(folder: RunFolder, workers: WorkerPool, lineage: int) -> NewestState:
    """The newest state that all workers can go on from; call it when none is running any more.

    Copies in memory count where they are of this lineage, and no older than the newest checkpoint.
    """
    saved, copied = newest_checkpoint(folder.checkpoints), workers.copied_steps(lineage)
    if copied and copied[0] >= max(saved.step, 1):
        return NewestState(step=copied[0], where="memory")
    return saved


def newest_checkpoint(checkpoints: Path) -> NewestState:
    """The newest checkpoint that was saved whole."""
    found = published_checkpoints(checkpoints)
    if not found:
        return NewestState(step=0, where="nowhere")
    step = int(found[-1].name.rpartition("step-")[2].removesuffix(".replaced"))
    return NewestState(step=step, where="checkpoint")
