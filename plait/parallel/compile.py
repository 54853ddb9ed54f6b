"""Compiles each layer by itself where the plan asks for it: small graphs, one compilation for all layers alike."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.woven import Woven
from plait.plan.plan import Plan


def compile_layers(woven: Woven, mesh: DeviceMesh, plan: Plan) -> Woven:
    """Compile the layers in place; parameter names stay as they are."""
    if plan.compile == "blocks":
        for chunk in woven.chunks:
            for layer in chunk.layers.values():
                layer.compile(dynamic=False)
    return woven
