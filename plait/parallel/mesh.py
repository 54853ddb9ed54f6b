"""From a layout to a mesh of ranks, and sums over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.layout import AXES, Layout


class Sums(Protocol):
    """Sums over all ranks of a job, and this rank's place among them."""

    index: int
    size: int

    def __call__(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place. Every rank must call it; blocks."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """The element-wise maximum over all ranks, in place. Every rank must call it; blocks."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """Each rank's values, in rank order. Every rank must call it; blocks."""
        ...


class Alone:
    """One process: every sum is already global."""

    index = 0
    size = 1

    def __call__(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]


ALONE = Alone()


class GroupSums:
    """Sums over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __call__(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values, group=self.group)
        return parts


def open_store(rendezvous: str, rank: int, world_size: int) -> Store:
    """Where ranks find each other: a file's path, or "env://NAME" for torchrun's own store, under a name of the job.

    The name keeps the keys of one job apart from those of the next in the same processes: a rank that is fast would
    else read the address of a peer that is gone.
    """
    if not rendezvous.startswith("env://"):
        return FileStore(rendezvous, world_size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(host, port, is_master=rank == 0 and not agent_serves, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"plait/{attempt}/{rendezvous.removeprefix('env://')}", store)


def make_mesh(layout: Layout, device: str) -> DeviceMesh:
    """One axis for each of AXES, those of size 1 included. Every rank must call it, once."""
    return init_device_mesh(device, tuple(layout.degrees.values()), mesh_dim_names=AXES)


def world_sums() -> Sums:
    """Sums over all ranks of the job."""
    assert dist.group.WORLD is not None
    return GroupSums(dist.group.WORLD)


def make_groups(sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each set of several ranks; answers those that this rank is in.

    Every rank of the job must call it, with the same sets in the same order.
    """
    rank, everybody = dist.get_rank(), tuple(range(dist.get_world_size()))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sets:
        if len(ranks) == 1:
            continue
        group = dist.group.WORLD if ranks == everybody else dist.new_group(list(ranks))
        if rank in ranks and isinstance(group, dist.ProcessGroup):
            groups[ranks] = group
    return groups
