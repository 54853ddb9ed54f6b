"""The weights of a rank's model, each with the ranks over which its gradient is summed."""

from __future__ import annotations

import torch.distributed as dist

from plait.model.names import EMBEDDING, HEAD
from plait.model.weights import describe_weight
from plait.parallel.gradients.buckets import SharedWeight
from plait.parallel.sharded_model import ShardedModel
from plait.partition.boxes import is_shared_out, ranks_sharing, ranks_splitting, weight_boxes
from plait.partition.execution import Execution


def shared_weights(sharded: ShardedModel, execution: Execution) -> list[SharedWeight]:
    """The weights of this rank's model with their places and the ranks they are shared with, in the model's order.

    Where `shard` splits, those are the ranks that keep the same part.
    """
    layout, rank = execution.layout, dist.get_rank()
    here = layout.coordinates(rank)
    places = weight_boxes(execution.shape, layout, here)
    weights = []
    for number, chunk in enumerate(sharded.chunks):
        for name, parameter in chunk.named_parameters():
            box = places[name]
            ranks = ranks_sharing(execution.shape, layout, name, box, here["shard"])
            decays = describe_weight(name, execution.shape).decays
            split = ranks_splitting(layout, name, rank) if is_shared_out(name, layout) else None
            weights.append(
                SharedWeight(
                    name=name, parameter=parameter, box=box, chunk=number, ranks=ranks, decays=decays, split=split
                )
            )
    # Stages that share both tables have them in chunks of unlike order, and their buckets must be alike.
    return (
        sorted(weights, key=lambda one: TABLE_ORDER.get(one.name, 1)) if execution.shape.objectives.weights else weights
    )


TABLE_ORDER = {EMBEDDING: 0, HEAD: 2}
"""The embedding before all other weights, and the output matrix behind them."""
