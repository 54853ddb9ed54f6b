"""`shard` (FSDP): ranks that split what one rank would hold alone and gather it when it is used.

By "optimizer" the split is the reducer's matter (reduce.py), and nothing happens here. By "parameters" it is torch's
`fully_shard`: each layer's weights lie split by rows and are gathered for its forward and backward; its gradients are
summed and split again after the backward of every micro-batch. To sum them only once a step would keep a whole model's
gradients on each rank, and memory is why somebody splits parameters (fully_sharded.py).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution


def shard(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Shard the parameters, still on the meta device, where the layout says so. Every rank must call it."""
    if execution.layout.shard > 1 and execution.layout.shard_what == "parameters":
        from plait.parallel.sharding.fully_sharded import split_parameters  # most of a second of imports

        split_parameters(sharded, mesh, execution)
    return sharded
