"""`replicate` (DP): ranks with the same weights and other sequences; applied last, as it sums all gradients.

What is summed over whom follows from who holds what: Note [same box, same sum] in partition/boxes.py. So the copies of
`replicate`, the sequences of `shard`, the tokens of `context` and the copied weights of `tensor` share one reducer, and
so do the two ends of a pipeline whose head is the embedding, unless one of them keeps it
(tied_embedding.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.gradient_buckets import BUCKET_BYTES, whole_units
from plait.parallel.gradient_reducer import GradientReducer, shared_weights
from plait.parallel.mesh import make_groups
from plait.parallel.sharded_model import ShardedModel, held_weight
from plait.partition.boxes import all_expert_splits, all_sharing_sets
from plait.partition.execution import Execution


def replicate(
    sharded: ShardedModel, mesh: DeviceMesh, execution: Execution, *, bucket_bytes: int = BUCKET_BYTES
) -> ShardedModel:
    """Sum every gradient over the ranks that hold the same weight, during backward; a frozen weight has none.

    Every rank must call it.
    """
    layout = execution.layout
    splits = all_expert_splits(layout) if layout.shard_what == "optimizer" else []
    weights = shared_weights(sharded, execution)
    groups = make_groups([*all_sharing_sets(execution.shape, layout), *splits])
    if layout.gathers_weights:
        from plait.parallel.fully_sharded import fully_sharded  # most of a second of imports

        return fully_sharded(
            sharded,
            layout,
            weights,
            groups,
            bucket_bytes=bucket_bytes,
            transfer=execution.arithmetic.gradient_transfer,
        )
    split = mesh.get_group("shard") if layout.shard > 1 else None
    learning = [one for one in weights if one.trained]
    alone = (dist.get_rank(),)
    summed = [replace(one, ranks=alone) if one.name in sharded.single_owner else one for one in learning]
    reducer = GradientReducer(summed, groups, split, bucket_bytes, execution.arithmetic.gradient_transfer)
    if split:
        reducer.wait_in_forward(sharded.chunks)
    updated = [one for one in summed if sharded.single_owner.get(one.name) != "another rank"]
    whole = [one for one in updated if split is None or one.split == alone]
    units = [*reducer.split_units(), *whole_units(whole)]
    held = tuple(held_weight(one.name, one.parameter, one.box) for one in weights)
    return replace(sharded, weights=held, units=tuple(units), gradients=reducer)
