"""A rank of a run that `plait drill` disturbs: it trains as any rank, with one more observer, on a disk that may be
full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from plait.checkpoint.durable import NoRoom, earlier_checkpoints
from plait.checkpoint.transfer import TensorSlice, write_rank
from plait.commands.drilling.faults import FAILED_SAVE, FAULT_FOLDER, FULL_DISK, carried_out, nan_files
from plait.launch.values.job import RankContext
from plait.trainer import worker
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.background import SaveEnd
from plait.trainer.loop import Observer
from plait.trainer.state import TrainState


def main(context: RankContext, argument: str) -> None:
    """Entry point of every rank of the disturbed run."""

    def observers(assembly: Assembly, run: Path) -> list[Observer]:
        folder = run / FAULT_FOLDER
        return [rehearsed_faults(assembly, folder, context.rank)] if folder.is_dir() else []

    worker.main(context, argument, observers, write_unless_full)


def write_unless_full(
    staging: Path,
    rank: int,
    tensors: Mapping[str, TensorSlice | Sequence[TensorSlice]],
    *,
    when_full: Literal["clear all", "clear own"] = "clear all",
) -> None:
    """Write a rank's part of a checkpoint; raises NoRoom while the drill has filled this host's disk."""
    checkpoints = staging.parent
    if (checkpoints.parent / FAULT_FOLDER / FULL_DISK).exists():
        raise NoRoom(
            f"saving finds no room in {checkpoints}, because the drill has filled the disk; "
            f"{earlier_checkpoints(checkpoints)}: wait until it has room again"
        )
    write_rank(staging, rank, tensors, when_full=when_full)


def rehearsed_faults(assembly: Assembly, folder: Path, rank: int) -> Observer:
    """Before a step that a file in `folder` names, the first weight that this rank trains becomes NaN, once a step and
    start; rank 0 leaves a file there when a save has failed."""
    done = set[int]()

    def before_step(state: TrainState) -> None:
        step = state.step + 1
        files = nan_files(folder, rank, step)
        if files and step not in done:
            done.add(step)
            files[0].rename(carried_out(files[0]))
            with torch.no_grad():
                next(held for held in assembly.model.weights if held.trained).tensor.fill_(float("nan"))

    def at_save(end: SaveEnd) -> None:
        if end.failure and rank == 0:
            (folder / FAILED_SAVE).touch()

    return Observer(before_step=before_step, at_save=at_save)
