"""What the ranks of the tests of `tensor` do: the same micro-batches as one process, compared number by number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.launch.values.job import RankContext
from plait.layout import Layout
from plait.model.shape import ModelShape
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.mesh import make_mesh, world_communicator
from plait.parallel.sharded_model import OptimizerUnit
from plait.partition.boxes import Box
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for
from tests.plans import changed

Asked = dict[str, Any]

COPIED = "layers.0.attention_norm.weight"


def compare(context: RankContext, argument: str) -> None:
    """For each case: the worst relative errors against one process, and which rectangles this rank compared."""
    folder, cases = Path(json.loads(argument)["folder"]), json.loads(argument)["cases"]
    plan = read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        mesh = make_mesh(Layout(tensor=context.world_size), plan.machines.device)
        for case in cases:
            context.send("case", **compared(folder, planned(plan, case, context.world_size), mesh))


def planned(plan: Plan, case: Asked, tensor: int) -> Plan:
    """The plan of a case."""
    layout = replace(plan.placement.layout, **case.get("layout", {}), tensor=tensor)
    return changed(plan, **case.get("plan", {}), shape=ModelShape.from_dict(case["shape"]), layout=layout)


def compared(folder: Path, plan: Plan, mesh: DeviceMesh) -> Asked:
    """Losses and gradients of one step, the held-out loss, and the weights after two steps."""
    with both(folder, plan, mesh) as (alone, shared):
        wanted, found = (one.run_micros(one.loader.micros(0)) for one in (alone, shared))
        grads = {name: parameter.grad for name, parameter in alone.model.named_parameters()}
        found = shared.sums(found)
        # The true gradient of a key's bias is zero.
        least = 1e-6 * max(float(torch.as_tensor(grad).abs().max()) for grad in grads.values())
        outcome = {
            "totals": worst([(found, wanted)]),
            "evaluated": worst([(shared.evaluate(), alone.evaluate())]),
            "units": [
                [part.name, part.box.offset, part.box.extent] for unit in shared.model.units for part in unit.parts
            ],
            "grads": {name_of(unit): error_of(unit, unit.parameter.grad, grads, least) for unit in shared.model.units},
        }
        states = [TrainState(), TrainState()]
        norms: list[Tensor] = []
        for _ in range(2):
            taken = [one.step(state) for one, state in zip((alone, shared), states, strict=True)]
            states, norms = [state for state, _ in taken], [scalars.norm for _, scalars in taken]
        shared.model.settle()
        weights = {name: parameter.detach() for name, parameter in alone.model.named_parameters()}
        after = {
            name_of(unit): error_of(unit, unit.parameter.detach(), weights, plan.job.optimizer.lr)
            for unit in shared.model.units
        }
        return outcome | {"norm": worst([(norms[1], norms[0])]), "weights": after}


@contextmanager
def both(folder: Path, plan: Plan, mesh: DeviceMesh) -> Iterator[tuple[Assembly, Assembly]]:
    """One process' run, and this rank's part of the same run."""
    config = load_recipe(folder / "recipe.toml")
    made = [
        assemble(config, plan, stages=(), sums=ONE_PROCESS),
        assemble(config, plan, sums=world_communicator(), mesh=mesh),
    ]
    try:
        yield made[0], made[1]
    finally:
        for one in made:
            one.loader.close()


def name_of(unit: OptimizerUnit) -> str:
    return unit.parts[0].name


def error_of(unit: OptimizerUnit, values: Tensor | None, wanted: dict[str, Any], least: float) -> float:
    """How far a unit's values are from its rectangle of the whole weight's, relative to those or to the least size."""
    assert values is not None
    (part,) = unit.parts
    whole = wanted[part.name]
    scale = max(float(whole.abs().max()), least)
    return float((values - rectangle(whole, part.box)).abs().max()) / scale


def rectangle(whole: Tensor, box: Box) -> Tensor:
    """A rectangle of a whole weight."""
    assert whole.shape == box.shape
    return whole[tuple(slice(first, first + length) for first, length in zip(box.offset, box.extent, strict=True))]


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest relative difference."""
    return max(float(((found - wanted).abs() / wanted.abs()).max()) for found, wanted in pairs)


def look_inside(context: RankContext, argument: str) -> None:
    """Tell of the first case what lies between the layers, and a copied weight's gradient before it is summed."""
    folder, (case,) = Path(json.loads(argument)["folder"]), json.loads(argument)["cases"]
    base = read_plan(folder / "plan.json")
    with process_group_for(context, base):
        plan = planned(base, case, context.world_size)
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        with both(folder, plan, mesh) as (alone, shared):
            (chunk,) = shared.model.chunks
            seen: list[int] = []
            chunk.layers["1"].register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
            norm, whole = (one.model.chunks[0].get_parameter(COPIED) for one in (shared, alone))
            partial: list[Tensor] = []
            norm.register_hook(lambda grad: partial.append(grad.clone()))
            micros = shared.loader.micros(0)[:1]
            totals = shared.run_micros(micros)
            alone.run_micros(micros)
            own, summed, wanted = (float(torch.as_tensor(grad)[0]) for grad in (partial[0], norm.grad, whole.grad))
            context.send(
                "inside",
                rows=seen,
                reports=shared.model.reports,
                totals=totals.tolist(),
                own=own,
                summed=summed,
                wanted=wanted,
            )
