"""`replicate` (DP): ranks with the same weights and other sequences; the end of all weaving, where gradients meet.

What is summed over whom follows from who holds what: Note [same box, same sum] in partition/boxes.py. So the copies of
`replicate`, the sequences of `shard`, the tokens of `context` and the copied weights of `tensor` all meet in one
reducer, and so do the two ends of a pipeline whose head is the embedding, unless one of them keeps it
(tied_embedding.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.parallel.gradients.buckets import BUCKET_BYTES, Shared, whole_units
from plait.parallel.gradients.reduce import Reducer
from plait.parallel.mesh import make_groups
from plait.parallel.pipeline.stage import StagePipe
from plait.parallel.pipeline.tied_embedding import Ends, kept_at_one_end
from plait.parallel.sharded_model import Held, Woven
from plait.partition.boxes import boxes, sharers, sharing_sets
from plait.planner.plan import Plan


def replicate(woven: Woven, mesh: DeviceMesh, plan: Plan, *, bucket_bytes: int = BUCKET_BYTES) -> Woven:
    """Sum every gradient over the ranks that hold the same weight, during backward. Every rank must call it."""
    layout = plan.layout
    weights, groups = shared_weights(woven, plan), make_groups(sharing_sets(plan.shape, layout))
    if layout.shard > 1 and layout.shard_what == "parameters":
        from plait.parallel.sharding.fully_sharded import fully_sharded  # most of a second of imports

        return fully_sharded(woven, weights, groups, bucket_bytes=bucket_bytes, transfer=plan.gradient_transfer)
    split = mesh.get_group("shard") if layout.shard > 1 else None
    kept = [weight for weight in weights if kept_at_one_end(weight, plan)]
    here = [replace(one, ranks=(dist.get_rank(),)) if kept_at_one_end(one, plan) else one for one in weights]
    reducer = Reducer(here, groups, split, bucket_bytes, plan.gradient_transfer)
    if split:
        reducer.wait_in_forward(woven.chunks)
    for weight in kept:
        assert isinstance(woven.pipe, StagePipe)
        embeds = woven.chunks[weight.chunk].part.embeds
        woven.pipe.ends = Ends(weight, groups[weight.ranks], embeds=embeds)
        if embeds:
            here = [one for one in here if one.name != weight.name]
    units = reducer.split_units() if split else whole_units(here)
    held = tuple(Held(name=w.name, tensor=w.parameter.detach(), box=w.box) for w in weights)
    return replace(woven, weights=held, units=tuple(units), gradients=reducer)


def shared_weights(woven: Woven, plan: Plan) -> list[Shared]:
    """The weights of this rank's model with their places and the ranks they are shared with, in the model's order.

    Where `shard` splits, those are the ranks with the same coordinate on it.
    """
    layout, rank = plan.layout, dist.get_rank()
    here = layout.coordinates(rank)
    places = boxes(plan.shape, layout, here)
    weights = []
    for number, chunk in enumerate(woven.chunks):
        for name, parameter in chunk.named_parameters():
            box = places[name]
            ranks = sharers(plan.shape, layout, name, box, here["shard"])
            weights.append(Shared(name=name, parameter=parameter, box=box, chunk=number, ranks=ranks))
    return weights
