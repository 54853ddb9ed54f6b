"""What the ranks of the timeline's tests do."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from plait.launch.values.job import RankContext
from plait.layout import Layout
from plait.parallel.mesh import make_mesh, world_communicator
from plait.parallel.watched import WATCH
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.recording.clock_offsets import clock_offsets
from plait.trainer.recording.recorder import StepRecorder, gather_timeline
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for


def record_layouts(context: RankContext, argument: str) -> None:
    """Each layout twice, from the same first weights: its losses without a recorder, and with one and what it saw."""
    asked = json.loads(argument)
    folder = Path(asked["folder"])
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        for number, case in enumerate(asked["cases"]):
            named: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in case.items()}
            layout = Layout(**named)
            shares = tuple(asked["shares"].get(str(number), ()))
            here = replace(plan, placement=replace(plan.placement, layout=layout, shares=shares))
            mesh, world = make_mesh(layout, here.machines.device), world_communicator()
            plain, watched = (assemble(config, here, sums=world, mesh=mesh) for _ in range(2))
            before = _hooks(watched)
            losses = _losses(plain, asked["steps"], None)
            recorder = StepRecorder(watched.device)
            recorded = _losses(watched, asked["steps"], recorder)
            timeline = gather_timeline(recorder, world)
            context.send(
                f"case {number}",
                losses=losses,
                recorded=recorded,
                hooks=[before, _hooks(watched)],
                is_off=WATCH.recorder is None,
            )
            if context.rank == 0:
                (folder / f"timeline-{number}.json").write_text(timeline.to_json())


def compare_clocks(context: RankContext, argument: str) -> None:
    """Rank 1's clock is ahead, as another machine's."""
    ahead_s = json.loads(argument)["ahead_s"] * context.rank
    folder = Path(json.loads(argument)["folder"])
    with process_group_for(context, read_plan(folder / "plan.json")):
        world = world_communicator()
        apart = clock_offsets(world, lambda: time.perf_counter() + ahead_s, lambda: f"machine {context.rank}")
        context.send("clocks", apart=[asdict(one) for one in apart], same=[asdict(one) for one in clock_offsets(world)])


def _losses(assembly: Assembly, steps: int, recorder: StepRecorder | None) -> list[float]:
    state, losses = TrainState(), list[float]()
    for _ in range(steps):
        if recorder is None:
            state, scalars = assembly.step(state)
        else:
            with recorder.step(state.step + 1):
                state, scalars = assembly.step(state)
        losses.append(float(scalars.totals[0] / scalars.totals[1]))
    assembly.loader.close()
    return losses


def _hooks(assembly: Assembly) -> int:
    modules = [module for chunk in assembly.model.chunks for module in chunk.modules()]
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)
