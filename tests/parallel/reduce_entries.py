"""What the ranks of the reducer's tests do; each leaves its gradients in a folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from plait.launch.job import RankContext
from plait.parallel.mesh import GroupSums, open_store
from plait.parallel.reduce import Reducer

SMALL_BUCKET_BYTES = 64


class Branches(nn.Module):
    """Weights of unlike sizes, each in its own branch, so that backward can reach them in any order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        sizes = {"a": 5, "b": 40, "c": 3, "d": 17, "e": 29}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)))

    def forward(self, factor: float, names: str) -> torch.Tensor:
        """The sum of `factor` times the squares of the named weights; the last named is reached first by backward."""
        total = torch.zeros((), dtype=torch.float64)
        for name in names:
            total = total + factor * (self.get_parameter(name) ** 2).sum()
        return total


def reduce_branches(context: RankContext, argument: str) -> None:
    """Two steps of two micro-batches; rank 1 goes through the branches backwards and never reaches "c"."""
    with_group(context)
    group = dist.group.WORLD
    assert group is not None
    model = Branches()
    reducer = Reducer(model.parameters(), group, SMALL_BUCKET_BYTES)
    for step in (1, 2):
        reducer.open()
        assert all(parameter.grad is None for parameter in model.parameters())
        model(1.0, "abcde" if context.rank == 0 else "abde").backward()
        reducer.arm()
        model(10.0 * step, "abcde" if context.rank == 0 else "edba").backward()
        reducer.close()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        save_file(grads, Path(argument) / f"step-{step}-rank-{context.rank}.safetensors")
    dist.destroy_process_group()


def reduce_nothing(context: RankContext, argument: str) -> None:
    """No rank has a gradient at all: a step without a sequence must still end."""
    with_group(context)
    assert dist.group.WORLD is not None
    model = Branches()
    reducer = Reducer(model.parameters(), dist.group.WORLD)
    reducer.open()
    if context.rank == 0:
        reducer.arm()
        model(1.0, "abcde").backward()
    reducer.close()
    context.tell("sums", sums=[float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    dist.destroy_process_group()


def sum_and_gather(context: RankContext, argument: str) -> None:
    """GroupSums on ranks that hold their number."""
    with_group(context)
    assert dist.group.WORLD is not None
    sums = GroupSums(dist.group.WORLD)
    own = torch.tensor([float(context.rank), 1.0])
    parts = [part.tolist() for part in sums.gather(own.clone())]
    context.tell(
        "sums", total=sums(own.clone()).tolist(), largest=sums.largest(own.clone()).tolist(), parts=parts,
        place=[sums.index, sums.size],
    )  # fmt: skip
    dist.destroy_process_group()


def with_group(context: RankContext) -> None:
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
