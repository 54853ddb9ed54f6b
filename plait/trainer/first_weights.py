"""A rank's weights before the first step: drawn from the seed, or those of a model that the run goes on from."""

from __future__ import annotations

from pathlib import Path

import torch

from plait.errors import RunFailed
from plait.interop.base_model import read_base_model
from plait.interop.read_weights import read_boxes
from plait.model.init import first_value
from plait.model.shape import ModelShape
from plait.parallel.sharded_model import ShardedModel
from plait.planner.plan import Plan


def fill_first_weights(sharded: ShardedModel, plan: Plan, seed: int) -> None:
    """Fill this rank's weights as the plan says. Raises PlaitError where the model's folder is not as it was planned
    with."""
    if not plan.base:
        initialize_weights(sharded, plan.shape, seed)
        return
    base = read_base_model(Path(plan.base))
    if base.shape_for(plan.shape.sequence) != plan.shape:
        raise RunFailed(f"the model in {plan.base} is not the one that this run was planned with; bring that one back")
    read_boxes(base, ((held.name, held.box, held.tensor) for held in sharded.weights))


@torch.no_grad()
def initialize_weights(sharded: ShardedModel, shape: ModelShape, seed: int) -> None:
    """Fill this rank's weights from the seed: each is a slice of the value that the whole weight has in one process."""
    for held in sharded.weights:
        value = first_value(held.name, shape, seed)
        for dim, (first, length) in enumerate(zip(held.box.offset, held.box.extent, strict=True)):
            value = value.narrow(dim, first, length)
        held.tensor.copy_(value)
