"""What the ranks of the balance's tests do: a run whose ranks are slow when and where the test says so."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from plait.launch.values.job import RankContext
from plait.parallel.communicator import Communicator
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.balance.actions import Rebalancer
from plait.trainer.balance.meter import Meter, attach_meter
from plait.trainer.balance.move_layers import move_layers
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for


class Labour:
    """A clock that only goes while layers carry a burden: so much for each sequence of a forward."""

    def __init__(self, sequence: int) -> None:
        self.pace_s = self._now = 0.0
        self._sequence = sequence

    def carry(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """A layer's hook, which sees the stream [N, width]."""
        self._now += self.pace_s * len(inputs[0]) / self._sequence

    def mark(self) -> float:
        return self._now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def follow(context: RankContext, argument: str) -> None:
    """Runs one after the other in one process group, each with a shares.jsonl of its own and its own paces.

    "phases" of a run are [steps, [seconds for a sequence, by rank]], in the first layer or "in" "all layers".
    Leaves losses and last weights.
    """
    folder, runs = Path(json.loads(argument)["folder"]), json.loads(argument)["runs"]
    plan, config = read_plan(folder / "plan.json"), load_recipe(folder / "recipe.toml")
    with process_group_for(context, plan):
        mesh, world = make_mesh(plan.placement.layout, plan.machines.device), world_communicator()
        build = partial(assemble, config, sums=world, mesh=mesh)
        for number, run in enumerate(runs):
            here = replace(plan, cadence=replace(plan.cadence, balance_every_steps=run["every"]))
            labour = Labour(here.job.sequence)
            assembly, meter = attach_meter(build(here), labour)
            _burden(assembly, labour, run)

            def restage(
                layers: tuple[int, ...], assembly: Assembly = assembly, run: Any = run, labour: Labour = labour
            ) -> Meter:
                new, own = attach_meter(move_layers(assembly, build, layers), labour)
                assembly.replace_by(new)
                _burden(assembly, labour, run)
                return own

            balance = Rebalancer(assembly, meter, folder / f"shares-{number}.jsonl", world, lambda **_: None, restage)
            results = _taken(run["phases"], assembly, balance, labour, world)
            assembly.model.settle()
            assembly.loader.close()
            results |= {f"weight/{name}": p.detach().clone() for name, p in assembly.model.named_parameters()}
            save_file({key: _local(value) for key, value in results.items()}, folder / f"run-{number}-{context.rank}")


def _burden(assembly: Assembly, labour: Labour, run: Any) -> None:
    layers = list(assembly.model.chunks[0].layers.values())
    for layer in layers if run.get("in") == "all layers" else layers[:1]:
        layer.register_forward_pre_hook(labour.carry)


def _taken(
    phases: Any, assembly: Any, balance: Rebalancer, labour: Labour, world: Communicator
) -> dict[str, torch.Tensor]:
    state, losses = TrainState(), []
    for steps, seconds in phases:
        labour.pace_s = seconds[world.index]
        for _ in range(steps):
            balance.before_step(state)
            state, scalars = assembly.step(state)
            balance.after_step(state)
            losses.append(scalars.totals[0] / scalars.totals[1])
            balance.rebalance_if_due(state)
    return {"losses": torch.stack(losses)}


def _local(value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (value.to_local() if isinstance(value, DTensor) else value).contiguous()
