"""`replicate` (DP): each rank has the whole model and its own sequences; gradients are summed over the copies."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.reduce import Reducer
from plait.parallel.woven import Woven
from plait.plan.plan import Plan


def replicate(woven: Woven, mesh: DeviceMesh, plan: Plan) -> Woven:
    """Sum every gradient over the axis' ranks during the last backward of a step. Every rank must call it."""
    if mesh["replicate"].size() == 1:
        return woven  # nobody to add to: filling buckets would cost a pass through memory, 2 % of a small model's step
    return replace(woven, gradients=Reducer(woven.model.parameters(), mesh.get_group("replicate")))
