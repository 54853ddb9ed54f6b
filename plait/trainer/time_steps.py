"""Measures a few real steps of a plan, to convert a time budget into steps and to choose the number of workers."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.launch.values.job import RankContext
from plait.parallel.communicator import Communicator
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan_file import read_plan
from plait.recipe.load import read_saved_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for

WARM_UP_STEPS = 2
LEAST_TIMED_STEPS = 3
STEADY_STEPS_SPREAD = 0.08
"""Distance of the quartiles over the median, below which further steps tell nothing new; of three steps it is the
whole range."""
UNSTEADY_LONGER = 3.0
"""How many times as long is timed at most where steps are unsteady."""


def rank(context: RankContext, argument: str) -> None:
    """Entry point of each rank of a measurement; `argument` is JSON: a folder with plan.json and recipe.toml, the least
    seconds of timed steps, and the most seconds of all. Rank 0 sends the median seconds of a step, None where the time
    was up before one could be timed, and the share of the time in which the ranks had their cores."""
    began_s = time.perf_counter()
    requested = json.loads(argument)
    folder = Path(requested["folder"])
    plan, config = read_plan(folder / "plan.json"), read_saved_recipe(folder / "recipe.toml")
    with process_group_for(context, plan):
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        world = world_communicator()
        assembly = assemble(config, plan, sums=world, mesh=mesh)
        if assembly.pairs is not None:  # the reference costs a step nothing, and its numbers change no time
            assembly.pairs.set_reference(torch.zeros(assembly.pairs.pairs, 2, dtype=torch.float64).to(assembly.device))
        pace = Pace(least_s=requested["least_s"], ends_at_s=began_s + requested["most_s"])
        times = _time_steps(assembly, world, pace, context.stop_requested)
        assembly.loader.close()
        waited = world.largest(
            torch.tensor([runqueue_wait_s() / (time.perf_counter() - began_s)], dtype=torch.float64)
        ).item()
        if context.rank == 0 and times is not None:
            granted = max(0.0, 1 - waited)
            context.send("measured", step_s=statistics.median(times) if times else None, granted=granted)


def runqueue_wait_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds that the thread of this process which waited longest wanted a core and another program had it; 0 where
    the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return max(int((task / "schedstat").read_text().split()[1]) for task in tasks.iterdir()) / 1e9
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When enough steps were timed."""

    least_s: float
    ends_at_s: float
    """By time.perf_counter."""

    def is_enough(self, times: Sequence[float], now_s: float) -> bool:
        """Whether these steps, the warm-up included, are enough, or a further one would end too late."""
        next_s = times[-1] if len(times) > 1 else 0.0  # the first may have compiled its layers
        if now_s + next_s > self.ends_at_s:
            return True
        timed = after_warm_up(times)
        if len(timed) < LEAST_TIMED_STEPS or sum(timed) < self.least_s:
            return False
        return _are_steady(timed) or sum(times[WARM_UP_STEPS:]) >= UNSTEADY_LONGER * self.least_s


def after_warm_up(times: Sequence[float]) -> Sequence[float]:
    """The steps that count: without the first, and without the second unless it took as long as those after it; without
    the first alone where there are but two."""
    if len(times) <= WARM_UP_STEPS or (len(times) > LEAST_TIMED_STEPS and _are_steady(times[1:])):
        return times[1:]
    return times[WARM_UP_STEPS:]


def _are_steady(times: Sequence[float]) -> bool:
    first, middle, last = statistics.quantiles(times, n=4)
    return last - first <= STEADY_STEPS_SPREAD * middle


def _time_steps(
    assembly: Assembly, world: Communicator, pace: Pace, stop_requested: Callable[[], bool]
) -> Sequence[float] | None:
    """Seconds of this rank's steps after the warm-up, none where there was time for no other; None where one of the
    ranks was asked to stop, as torchrun asks them.

    All ranks take the same number of steps: rank 0's clock decides when they are enough."""
    state, times = TrainState(), list[float]()
    enough = False
    while not enough:
        began = time.perf_counter()
        state, scalars = assembly.step(state)
        scalars.totals.tolist()  # waits for the device
        times.append(time.perf_counter() - began)
        here = world.index == 0 and pace.is_enough(times, time.perf_counter())
        enough, stop = world.largest(torch.tensor([int(here), int(stop_requested())])).tolist()
        if stop:
            return None
    return after_warm_up(times)
