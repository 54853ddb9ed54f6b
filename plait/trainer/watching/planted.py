"""Bad numbers on purpose: what a drill has planted in a run's folder for a rank and a step is carried out there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from plait.parallel.sharded_model import HeldWeight
from plait.trainer.assemble import Assembly
from plait.trainer.loop import LoopActions
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars

FOLDER, CARRIED_OUT = ".planted", "done-"
_NAME = re.compile(r"nan-([0-9]{1,4})@([0-9]{1,9})\.[0-9]{1,3}")


def with_planted_faults(actions: LoopActions, assembly: Assembly, run: Path, rank: int) -> LoopActions:
    """The same actions; before a step for which a file "nan-RANK@STEP.N" was planted in the run's folder, the first
    weight that this rank trains becomes NaN in its memory, and "done-" is put before the file's name. One file a step
    and start. Where nobody planted anything before the start, nobody looks again."""
    if not (run / FOLDER).is_dir():
        return actions
    done = set[int]()

    def step(state: TrainState) -> tuple[TrainState, Scalars]:
        coming = state.step + 1
        if coming not in done and (file := planted_files(run, rank).get(coming)):
            done.add(coming)
            file.rename(file.with_name(f"{CARRIED_OUT}{file.name}"))
            _spoil(next(held for held in assembly.model.weights if held.trained))
        return actions.step(state)

    return replace(actions, step=step)


def planted_files(run: Path, rank: int) -> Mapping[int, Path]:
    """For each step the first file that is planted for it and this rank; none in a run that is no drill."""
    found: dict[int, Path] = {}
    for path in sorted((run / FOLDER).glob("nan-*")):
        name = _NAME.fullmatch(path.name)
        if name and int(name[1]) == rank:
            found.setdefault(int(name[2]), path)
    return found


@torch.no_grad()
def _spoil(held: HeldWeight) -> None:
    held.tensor.fill_(float("nan"))
