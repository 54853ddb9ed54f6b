"""What the ranks of the reducer's tests do; each leaves its gradients in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from plait.launch.values.job import RankContext
from plait.model.names import decays
from plait.parallel.gradient_buckets import RankSet, SharedWeight
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.mesh import GroupCommunicator, make_groups, open_store
from plait.parallel.reduction import LibraryScatter, LibrarySum, Transfer, own_slice, wait_for_all
from plait.partition.boxes import whole_box

SMALL_BUCKET_BYTES = 64
NAMES = {
    "a": "norm.weight",
    "b": "head.weight",
    "c": "layers.0.attention.q.bias",
    "d": "layers.0.attention.k.bias",
    "e": "layers.0.attention_norm.weight",
}
"""What the branches are called in a model: a bucket that is split asks which of them decay, and only b does."""


class Branches(nn.Module):
    """Weights of unlike sizes, each in its own branch, so that backward can reach them in any order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        sizes = {"a": (5,), "b": (8, 5), "c": (3,), "d": (17,), "e": (29,)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)))

    def forward(self, factor: float, names: str) -> torch.Tensor:
        """The sum of `factor` times the squares of the named weights; the last named is reached first by backward."""
        total = torch.zeros((), dtype=torch.float64)
        for name in names:
            total = total + factor * (self.get_parameter(name) ** 2).sum()
        return total


def shared(model: nn.Module, ranks: RankSet) -> list[SharedWeight]:
    """All weights of a model, shared by these ranks."""
    return [
        SharedWeight(
            name=NAMES.get(name, name),
            parameter=parameter,
            box=whole_box(parameter.shape),
            chunk=0,
            ranks=ranks,
            decays=decays(NAMES.get(name, name)),
        )
        for name, parameter in model.named_parameters()
    ]


def reduce_branches(context: RankContext, argument: str) -> None:
    """Two steps of two micro-batches; ranks but 0 go through the branches backwards and never reach "c"."""
    asked = json.loads(argument)
    with_group(context)
    model = Branches()
    reducer = reducer_of_all(context, model, asked.get("transfer", "float32"))
    for step in (1, 2):
        take_step(reducer, model, context.rank, step)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        save_file(grads, Path(asked["folder"]) / f"step-{step}-rank-{context.rank}.safetensors")
    dist.destroy_process_group()


def reducer_of_all(context: RankContext, model: Branches, transfer: Transfer) -> GradientReducer:
    """Sums over all ranks, in small buckets."""
    weights, groups = shared(model, everybody(context)), make_groups([everybody(context)])
    return GradientReducer(weights, groups, bucket_bytes=SMALL_BUCKET_BYTES, transfer=transfer)


def reduce_large_and_small(context: RankContext, argument: str) -> None:
    """Every gradient is 256 on rank 0 and 1 on the others."""
    with_group(context)
    model = Branches()
    reducer = reducer_of_all(context, model, "bf16")
    reducer.open()
    reducer.arm(0)
    (torch.stack([p.sum() for p in model.parameters()]).sum() * (256 if context.rank == 0 else 1)).backward()
    reducer.close()
    context.send("sums", sums=[float(p.grad.mean()) for p in model.parameters() if p.grad is not None])
    dist.destroy_process_group()


def sum_by_library(context: RankContext, argument: str) -> None:
    """What GPUs do, over gloo: 1 to 12 on rank 0, twice that on rank 1 and so on, summed for all and in parts."""
    with_group(context)
    group, found = dist.group.WORLD, []
    assert group is not None
    for transfer in ("float32", "bf16"):
        summed, parted = (torch.arange(1.0, 13.0) * (context.rank + 1) for _ in range(2))
        for way in (LibrarySum(summed, group, transfer), LibraryScatter(parted, group, transfer)):
            for works in way.course():
                wait_for_all(works)
        found.append([summed.tolist(), own_slice(parted, group).tolist()])
    context.send("sums", found=found)
    dist.destroy_process_group()


def split_branches(context: RankContext, argument: str) -> None:
    """The same steps with buckets split over neighbours, `split` of them, and plain descent on this rank's parts."""
    asked = json.loads(argument)
    with_group(context)
    split = asked["split"]
    first = context.rank - context.rank % split
    neighbours = tuple(range(first, first + split))
    same_part = tuple(range(context.rank % split, context.world_size, split))
    everyone = range(context.world_size)
    sets = {tuple(r for r in everyone if r // split == rank // split) for rank in everyone}
    sets |= {tuple(r for r in everyone if r % split == rank % split) for rank in everyone}
    groups = make_groups(sorted(sets))
    model = Branches()
    reducer = GradientReducer(
        shared(model, same_part), groups, groups[neighbours], asked["bucket_bytes"], asked.get("transfer", "float32")
    )
    units = reducer.split_units()
    for step in (1, 2):
        take_step(reducer, model, context.rank, step)
        assert all(parameter.grad is None for parameter in model.parameters())
        with torch.no_grad():
            for unit in units:
                assert unit.parameter.grad is not None
                unit.parameter.sub_(unit.parameter.grad, alpha=0.01)
        reducer.publish()
        reducer.settle()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(found, Path(asked["folder"]) / f"rank-{context.rank}.safetensors")
    parts = [[part.name, part.box.numbers] for unit in units if unit.owned for part in unit.parts]
    context.send("parts", parts=parts, buckets=[bucket.numel() for bucket in flats(reducer)])
    dist.destroy_process_group()


def flats(reducer: GradientReducer) -> list[torch.Tensor]:
    """The flat gradients."""
    return [bucket.flat for bucket in reducer._buckets]  # pyright: ignore[reportPrivateUsage]


def take_step(reducer: GradientReducer, model: Branches, rank: int, step: int) -> None:
    reducer.open()
    assert not any(bool(parameter.grad.any()) for parameter in model.parameters() if parameter.grad is not None)
    names = "abcde" if rank == 0 else "abde"
    model(1.0, names).backward()
    for name, parameter in model.named_parameters():
        own = 2 * parameter.detach() if name in names else torch.zeros_like(parameter)
        assert parameter.grad is None or torch.equal(parameter.grad, own), "a sum before the last micro"
    places = {flat.untyped_storage().data_ptr() for flat in flats(reducer)}
    held = [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
    assert not places or places.issuperset(held), "a gradient that exists beside its bucket"
    reducer.arm(0)
    model(10.0 * step, "abcde" if rank == 0 else "edba").backward()
    reducer.close()


def reduce_nothing(context: RankContext, argument: str) -> None:
    """A rank has no gradient at all: the step must still end."""
    with_group(context)
    model = Branches()
    weights = shared(model, everybody(context))
    reducer = GradientReducer(weights, make_groups([everybody(context)]))
    reducer.open()
    if context.rank == 0:
        reducer.arm(0)
        model(1.0, "abcde").backward()
    reducer.close()
    context.send("sums", sums=[float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    dist.destroy_process_group()


def sum_and_gather(context: RankContext, argument: str) -> None:
    """GroupCommunicator on ranks that hold their number."""
    with_group(context)
    assert dist.group.WORLD is not None
    sums = GroupCommunicator(dist.group.WORLD)
    own = torch.tensor([float(context.rank), 1.0])
    parts = [part.tolist() for part in sums.gather(own.clone())]
    context.send(
        "sums", total=sums(own.clone()).tolist(), largest=sums.largest(own.clone()).tolist(), parts=parts,
        place=[sums.index, sums.size],
    )  # fmt: skip
    dist.destroy_process_group()


def everybody(context: RankContext) -> RankSet:
    return tuple(range(context.world_size))


def with_group(context: RankContext) -> None:
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
