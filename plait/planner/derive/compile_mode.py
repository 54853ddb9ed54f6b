"""Whether layers are compiled, and why."""

from __future__ import annotations

from plait.cluster.topology import Machine
from plait.errors import PlaitError
from plait.partition.execution import Compile
from plait.planner.plan import WARNING
from plait.recipe.schema import RunConfig


def compile_of(config: RunConfig, machine: Machine, why: list[str]) -> Compile:
    """What the recipe names, else compiled on GPUs where that can work; raises PlaitError where it cannot and is asked
    for."""
    named = config.train.compile
    if machine.device == "cpu":
        if named == "on":
            raise PlaitError(
                'train.compile = "on" is for GPUs, and this run is on the processor; write "auto" or "off"'
            )
        return "off"
    if named == "on" and machine.uncompiled:
        raise PlaitError(f'layers cannot be compiled here: {machine.uncompiled}; or write train.compile = "auto"')
    if named == "off":
        why.append('layers are not compiled: train.compile = "off"')
        return "off"
    if machine.uncompiled:
        why.append(f"{WARNING}layers are not compiled, and steps take longer: {machine.uncompiled}")
        return "off"
    return "blocks"
