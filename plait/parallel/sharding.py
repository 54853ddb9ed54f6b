"""`shard` (FSDP): ranks that split what one rank would hold alone and gather it when it is used.

With shard_what = "optimizer" (ZeRO-1) gradient_reducer.py splits and nothing happens here. With "parameters" torch's
`fully_shard` (FSDP2, averaging off) does: each layer's weights are split by rows and gathered for its forward
and backward, and its gradients are reduce-scattered after the backward of every micro-batch. With "gradients" (ZeRO-2)
weights stay gathered from a step's first forward to its last backward. With "master-weights" gradients are also summed
once a step, and each rank keeps a whole model's until then (Megatron's distributed optimizer).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution


def shard(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Shard the parameters, still on the meta device, where the layout says so. Every rank must call it."""
    if execution.layout.gathers_weights:
        from plait.parallel.fully_sharded import split_parameters  # most of a second of imports

        split_parameters(sharded, mesh, execution)
    return sharded
