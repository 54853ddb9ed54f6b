"""Gives the model real memory on the plan's device once every parallelism has cut its part away."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.accelerator import own_device
from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution


def materialize(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Allocate the meta tensors' memory; their values come later, from the seed or a checkpoint."""
    device = own_device(execution.device)
    for chunk in sharded.chunks:
        if any(parameter.is_meta for parameter in chunk.parameters()):
            _allocate(chunk, device)
    return sharded


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Like `module.to_empty`, which for plain tensors on the meta device imports sympy, a third of a second in every
    rank. So does torch.distributed.tensor: a DTensor is recognised by not being plain."""
    if any(type(one) is not nn.Parameter for one in module.parameters()):
        module.to_empty(device=device)
        return
    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            numbers = torch.empty(old.shape, dtype=old.dtype, device=device)
            setattr(part, name, nn.Parameter(numbers, requires_grad=old.requires_grad))
        for name, old in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, torch.empty(old.shape, dtype=old.dtype, device=device))
