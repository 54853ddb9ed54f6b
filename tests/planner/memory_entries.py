"""What the ranks of the memory tests do: a step that makes the optimizer's state, and one that is watched."""

from __future__ import annotations

from pathlib import Path

from plait.launch.values.job import RankContext
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.report.memory import LiveTensorPeak
from plait.trainer.assemble import assemble
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for


def watched_step(context: RankContext, argument: str) -> None:
    """Tell the most bytes of live tensors in the second step of the run in a folder."""
    folder = Path(argument)
    plan, config = read_plan(folder / "plan.json"), load_recipe(folder / "recipe.toml")
    with process_group_for(context, plan):
        assembly = assemble(
            config, plan, sums=world_communicator(), mesh=make_mesh(plan.placement.layout, plan.machines.device)
        )
        state, _ = assembly.step(TrainState())
        with LiveTensorPeak(assembly.device, assembly.tensors()) as peak:
            assembly.step(state)
        assembly.model.settle()  # the other rank may still be sending
        assembly.loader.close()
    context.send("peak", rank=context.rank, bytes=peak.bytes)
