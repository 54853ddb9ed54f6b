"""Frozen matrices in the numbers that products compute in: a run in 16 bits keeps them rounded, and only so."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.model.linear import HALF_DTYPES, Linear
from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution

# Note [frozen matrices are rounded once]: autocast rounds a weight before each product, and an update needs the weight
# as it was before. A frozen one has no update: the rounded copy is all that anybody reads, bit for bit, in half the
# memory and without a cast for each micro-batch. Embeddings, norms and biases stay float32, as the stream does.


def round_frozen(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Keep the frozen weights of linear layers in 16 bits where the run computes in them."""
    if (dtype := HALF_DTYPES.get(execution.arithmetic.precision)) is not None:
        for chunk in sharded.chunks:
            for module in chunk.modules():
                if isinstance(module, Linear) and not module.weight.requires_grad:
                    module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
    return sharded
