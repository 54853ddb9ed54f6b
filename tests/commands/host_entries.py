"""What the ranks of the tests of several hosts do: each in the folder of the host that it plays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from plait.launch.values.job import RankContext
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import assemble
from plait.trainer.checkpointing.carrier import PartsCarrier
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for
from tests.trainer.saved import save


def save_apart(context: RankContext, argument: str) -> None:
    """Save after one step; the argument lists each rank's folder for checkpoints, rank 0's is where they are wanted."""
    asked = json.loads(argument)
    home, folder = Path(asked["home"]), Path(asked["folders"][context.rank])
    config, plan = load_recipe(home / "recipe.toml"), read_plan(home / "plan.json")
    plan = replace(
        plan, placement=replace(plan.placement, layout=replace(plan.placement.layout, replicate=context.world_size))
    )
    folder.mkdir(parents=True, exist_ok=True)

    carrier = None
    if asked["folders"][context.rank] != asked["folders"][0]:
        carrier = PartsCarrier(context.send, None, rank=context.rank, local_rank=0, sharers=1, lineage=0)
    with process_group_for(context, plan):
        world = world_communicator()
        assembly = assemble(config, plan, sums=world, mesh=make_mesh(plan.placement.layout, plan.machines.device))
        state, _ = assembly.step(TrainState())
        context.send("heard", rank=context.rank)
        save(assembly, state, folder, carrier)
        assembly.loader.close()
