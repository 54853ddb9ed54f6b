"""Gives the model real memory on the plan's device once every strand has cut its part away."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution


def materialize(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Allocate the meta tensors' memory; their values come later, from the seed or a checkpoint."""
    on_gpu = execution.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for chunk in sharded.chunks:
        if any(parameter.is_meta for parameter in chunk.parameters()):
            chunk.to_empty(device=device)
    return sharded
