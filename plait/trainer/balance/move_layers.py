"""Changes a pipeline's stages between two steps: every rank builds its new stage, and layers are sent to their new
owners."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.accelerator import allocatable_bytes, is_accelerator, peak_memory_of
from plait.machines.machine import free_memory_bytes
from plait.parallel.communicator import Communicator
from plait.parallel.exchange import gather_json
from plait.partition.boxes import Box
from plait.planner.plan import Plan
from plait.report.memory import peak_rss_bytes
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.persist import load_state, owned_state, state_boxes
from plait.trainer.optimizer.optim import updates_counted

SPARE_MEMORY = 0.9
"""Fraction of the free memory that new layers may take."""


class BuildAssembly(Protocol):
    """Builds a rank's part of a run under any plan; with `initialize` its weights get their initial values."""

    def __call__(self, plan: Plan, *, initialize: bool) -> Assembly: ...


_Place = tuple[str, tuple[int, ...]]
"""A tensor's key in a checkpoint, and the offset of a box in it."""


def move_layers(assembly: Assembly, build: BuildAssembly, stage_layers: tuple[int, ...]) -> Assembly:
    """This rank's part of the same run with `stage_layers` layers in its stages; weights and moments stay the same, bit
    for bit.

    `build` is `assemble` for any plan. Every rank must call it, between two steps; blocks until all transfers are done.
    Until then the old and the new stage are both in memory. If the run has not begun, the weights are initialized
    instead.
    """
    plan = replace(
        assembly.plan,
        placement=replace(
            assembly.plan.placement, layout=replace(assembly.plan.placement.layout, stage_layers=stage_layers)
        ),
    )
    begun = bool(assembly.optimizer.state)
    new = build(plan, initialize=not begun)
    if begun:
        _move(assembly, new, assembly.sums)
    if new.scale is not None and assembly.scale is not None:
        new.scale.resume(assembly.scale.state)
    return new


def max_stage_layers(assembly: Assembly, sharers: int) -> int:
    """Largest number of layers that fit this rank's stage in the free memory, which `sharers` ranks share.

    The new stage exists beside the old one for a moment, and each layer brings its activations.
    """
    held = sum(len(chunk.layers) for chunk in assembly.model.chunks)
    state = sum(tensor.numel() * tensor.element_size() for tensor in assembly.tensors())
    device = assembly.device
    there = is_accelerator(device)
    peak = peak_memory_of(device) if there else peak_rss_bytes()
    free = SPARE_MEMORY * (allocatable_bytes(device) if there else free_memory_bytes() / sharers)
    return int(min(free / (state / held), held + free / (max(peak, state) / held)))


@torch.no_grad()
def _move(old: Assembly, new: Assembly, world: Communicator) -> None:
    """Send weights and moments to their new owners; the ranks receive in turn, which excludes deadlocks."""
    own: dict[_Place, Tensor] = {(key, box.offset): numbers for key, box, numbers in owned_state(old)}
    wants = [
        _gather_places(world, [(key, box.offset) for key, box in state_boxes(new)]),
        _gather_places(world, list(own)),
    ]
    home = {place: rank for rank, places in enumerate(wants[1]) for place in places}
    some = next(iter(own.values()))

    def read(key: str, box: Box) -> Tensor:
        place = key, box.offset
        if place in own:
            return own[place]
        arrived = torch.empty(box.extent, dtype=some.dtype)
        dist.recv(arrived, src=home[place])
        return arrived

    for rank, places in enumerate(wants[0]):
        if rank == world.index:
            load_state(new, read, updates_counted(old.optimizer))
            continue
        for place in places:
            if home[place] == world.index:
                dist.send(own[place].cpu().contiguous(), dst=rank)
    new.model.gradients.publish()


def _gather_places(world: Communicator, places: list[_Place]) -> list[list[_Place]]:
    """The places that every rank passes, gathered on every rank, in rank order."""
    return [[(key, tuple(offset)) for key, offset in some] for some in gather_json(places, world)]
