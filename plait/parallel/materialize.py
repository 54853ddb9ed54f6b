"""Gives the model real memory on the plan's device once every strand has cut its part away."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.sharded_model import Woven
from plait.planner.plan import Plan


def fill(woven: Woven, mesh: DeviceMesh, plan: Plan) -> Woven:
    """Allocate what was only described so far; the numbers come later, from the seed or a checkpoint."""
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    for chunk in woven.chunks:
        if any(parameter.is_meta for parameter in chunk.parameters()):
            chunk.to_empty(device=device)
    return woven
