"""Records a few steps of a run that is not training: its ranks continue from a checkpoint, and save nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.launch.values.job import RankContext
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan_file import read_plan
from plait.recipe.load import read_saved_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.checkpointing.persist import restore, verify_together
from plait.trainer.recording.recorder import StepRecorder, gather_timeline
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for

UNRECORDED_STEPS = 2
"""Steps before the recorded ones: the first fills caches and compiles layers."""
TIMELINE_FILE = "timeline.json"


def run_recording_rank(context: RankContext, argument: str) -> None:
    """Entry point of each rank; `argument` is JSON: a "folder" with plan.json and recipe.toml, in which rank 0 leaves
    the timeline, the "checkpoint" to continue from (empty: the initial weights), and the number of "steps". Rank 0
    sends its progress, and the losses of all steps as it goes ("recorded")."""
    requested = json.loads(argument)
    folder = Path(requested["folder"])
    plan, config = read_plan(folder / "plan.json"), read_saved_recipe(folder / "recipe.toml")
    with process_group_for(context, plan):
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        world = world_communicator()
        torch.manual_seed(config.run.seed + context.rank)
        assembly = assemble(config, plan, sums=world, mesh=mesh, initialize=not requested["checkpoint"])
        if assembly.pairs is not None:  # the reference costs a step nothing, and its numbers change no time
            assembly.pairs.set_reference(torch.zeros(assembly.pairs.pairs, 2, dtype=torch.float64).to(assembly.device))
        state = TrainState()
        if requested["checkpoint"]:
            path = Path(requested["checkpoint"])
            state = restore(assembly, path, verify_together(path, world, context.local_rank), world)
        _record(context, assembly, state, requested)
        assembly.loader.close()


def _record(context: RankContext, assembly: Assembly, state: TrainState, requested: Mapping[str, Any]) -> None:
    recorder, losses, steps = StepRecorder(assembly.device), list[float](), requested["steps"]
    state = _with_steps_left(assembly, state, UNRECORDED_STEPS + steps)
    for number in range(UNRECORDED_STEPS + steps):
        if number >= UNRECORDED_STEPS:
            with recorder.step(state.step + 1):
                state, scalars = assembly.step(state)
        else:
            state, scalars = assembly.step(state)
        loss_sum, counted = scalars.totals.tolist()  # waits for the device
        losses.append(loss_sum / max(counted, 1))
        if context.rank == 0:
            context.send("progress", done=number + 1, total=UNRECORDED_STEPS + steps, stage="recording steps")
    timeline = gather_timeline(recorder, assembly.sums)
    if context.rank == 0:
        (Path(requested["folder"]) / TIMELINE_FILE).write_text(timeline.to_json(), encoding="utf-8")
        context.send("recorded", losses=losses)


def _with_steps_left(assembly: Assembly, state: TrainState, steps: int) -> TrainState:
    """The state, set back so that these steps remain: a finished run's text may have no more samples. That changes
    only which samples are read, and the learning rate."""
    job = assembly.plan.job
    back = min(state.step, max(0, state.step + steps - job.steps))
    position = max(0, state.position - back * job.batch_sequences)
    return replace(state, step=state.step - back, position=position)
