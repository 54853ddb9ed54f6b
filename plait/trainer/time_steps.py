"""Measures a few real steps of a plan, to convert a time budget into steps and to choose the number of workers."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from plait.parallel.mesh import make_mesh, world_sums
from plait.parallel.sums import Sums
from plait.planner.plan_file import read_plan
from plait.recipe.load import read_saved_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.state import TrainState
from plait.trainer.worker import WorkerContext, process_group_for

WARM_UP_STEPS = 2
LEAST_TIMED_STEPS = 4


def rank(context: WorkerContext, argument: str) -> None:
    """Entry point of each rank of a measurement; `argument` is JSON: a folder with plan.json and recipe.toml, and the
    least seconds of timed steps. Rank 0 sends the median seconds of a step."""
    requested = json.loads(argument)
    folder = Path(requested["folder"])
    plan, config = read_plan(folder / "plan.json"), read_saved_recipe(folder / "recipe.toml")
    with process_group_for(context, plan):
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        world = world_sums()
        assembly = assemble(config, plan, sums=world, mesh=mesh)
        if assembly.pairs is not None:  # the reference costs a step nothing, and its numbers change no time
            assembly.pairs.set_reference(torch.zeros(assembly.pairs.pairs, 2, dtype=torch.float64).to(assembly.device))
        step_s = _time_steps(assembly, world, requested["least_s"], context.stop_requested)
        assembly.loader.close()
        if context.rank == 0 and step_s is not None:
            context.send("measured", step_s=step_s)


def _time_steps(assembly: Assembly, world: Sums, least_s: float, stop_requested: Callable[[], bool]) -> float | None:
    """Median seconds of a step on this rank; None where one of the ranks was asked to stop, as torchrun asks them.

    All ranks take the same number of steps: rank 0's clock decides when they are enough."""
    state, times = TrainState(), []
    enough = False
    while not enough:
        began = time.perf_counter()
        state, scalars = assembly.step(state)
        scalars.totals.tolist()  # waits for the device
        times.append(time.perf_counter() - began)
        timed = times[WARM_UP_STEPS:]
        here = len(timed) >= LEAST_TIMED_STEPS and sum(timed) >= least_s
        enough, stop = world.largest(torch.tensor([int(here and world.index == 0), int(stop_requested())])).tolist()
        if stop:
            return None
    return statistics.median(times[WARM_UP_STEPS:])
