"""What the ranks of plait.Muon's tests do with torch's own fully_shard."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import plait
from plait.launch.values.job import RankContext
from plait.parallel.mesh import open_store


def updates_of_shards(rank: RankContext, argument: str) -> None:
    """Tell the largest differences of weights and momenta from those of one process, after three steps."""
    store = open_store(rank.rendezvous, rank.rank, rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    torch.manual_seed(1)
    sizes = ((12, 12), (12, 5), (5, 1), (1, 12))  # rows that no two ranks share evenly, and a single one
    layers = [nn.Linear(inputs, outputs, bias=False, dtype=torch.float64) for inputs, outputs in sizes]
    whole = nn.Sequential(*layers, nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2, bias=False, dtype=torch.float64))
    cut = deepcopy(whole)
    fully_shard(cut, mesh=init_device_mesh("cpu", (rank.world_size,)))
    optimizers = [plait.Muon(model.parameters(), lr=0.05) for model in (whole, cut)]
    for _ in range(3):
        batch = torch.randn(2 * rank.world_size, 12, dtype=torch.float64)
        own = batch.chunk(rank.world_size)[rank.rank]
        for model, rows, optimizer in zip((whole, cut), (batch, own), optimizers, strict=True):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    errors = []
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        momenta = [muon.state[p]["momentum_buffer"] for muon, p in zip(optimizers, (one, other), strict=True)]
        kept = [one for one in (momenta[1], other) if isinstance(one, DTensor)]
        assert len(kept) == 2 and kept[0].placements == kept[1].placements
        errors += [float((_whole(b) - a).abs().max()) for a, b in ((one.detach(), other.detach()), momenta)]
    rank.send("case", errors=errors)
    dist.destroy_process_group()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
