"""`expert` (EP): keep this rank's experts of every mixture, and reach the others by an exchange of tokens."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.layout import Layout, equal_share
from plait.model.gpt import mixtures_of
from plait.parallel.expert.exchange import ExpertExchange
from plait.parallel.mesh import PEER_TIMEOUT, connect_ranks
from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution


def hold_experts(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Drop the experts that other ranks of this one's group hold; a degree of 1 leaves the model as it is. Every rank
    must call it."""
    layout, rank = execution.layout, dist.get_rank()
    if layout.expert == 1:
        return sharded
    # Groups of their own: gloo takes one group's messages in the order in which they were begun, which is not the same
    # on all ranks where sums of gradients go on meanwhile.
    made = [(ranks, dist.new_group(list(ranks), timeout=PEER_TIMEOUT)) for ranks in expert_groups(layout)]
    (group,) = (group for ranks, group in made if rank in ranks)
    assert isinstance(group, dist.ProcessGroup)
    connect_ranks(group)
    experts = execution.shape.size_of("experts")
    shares = [equal_share(experts, layout.expert, index) for index in range(layout.expert)]
    first, count = shares[layout.expert_index(rank)]
    exchange = ExpertExchange(group=group, held=tuple(number for _, number in shares))
    for chunk in sharded.chunks:
        for mixture in mixtures_of(chunk).values():
            for name in [name for name in mixture.experts if not first <= int(name) < first + count]:
                del mixture.experts[name]
            mixture.run_all = exchange.run
    return sharded


def expert_groups(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks of each group that holds all experts together, in the experts' order; the groups in an order that is
    the same on all ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        key = (at["pipeline"], layout.place_among_tokens(rank) // layout.expert, at["tensor"])
        groups.setdefault(key, []).append(rank)
    return sorted(tuple(sorted(ranks, key=layout.expert_index)) for ranks in groups.values())
