"""From a layout to a mesh of ranks, and sums over it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from urllib.parse import SplitResult, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from plait.accelerator import accelerator_name, choose_device, named_devices, own_device, synchronize
from plait.devices import ACCELERATORS, DEVICE_TRAITS
from plait.layout import AXES, Layout
from plait.machines.gpus import TorchGpus, check_gpu_computes
from plait.machines.tpus import check_tpu_computes
from plait.parallel.communicator import ONE_PROCESS, Communicator
from plait.parallel.launcher_store import open_launcher_store
from plait.parallel.watched import WATCH

PEER_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another one's part of a sum or a message."""
_AXES_OF_COLLECTIVES = ("shard", "tensor", "context")
"""Sums of gradients have separate groups, and stages send messages from rank to rank."""


class LocalGroup(dist.ProcessGroup):
    """The group of one rank: there are no peers, so it has neither threads nor collectives."""

    def __init__(self, *_: object) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportCallIssue]
        self._name = ""

    def getBackendName(self) -> str:
        """The name of its backend, which torch reads of every group."""
        return LOCAL_BACKEND

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The name by which a mesh finds the group again; torch only keeps the names of groups with a backend."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


LOCAL_BACKEND = "lone"
dist.Backend.register_backend(LOCAL_BACKEND, LocalGroup, devices=named_devices())


class GroupCommunicator:
    """The collectives over a process group of torch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __call__(self, values: Tensor) -> Tensor:
        with WATCH.exchange("step numbers", values):
            dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        with WATCH.exchange("step numbers", values):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with WATCH.exchange("step numbers", values):
            dist.all_gather(parts, values, group=self.group)
        return parts


def use_gpu(number: int) -> None:
    """Make a GPU this process's own; raises PlaitError where it does not compute."""
    name = accelerator_name()
    assert name is not None, "a plan for accelerators runs on a machine without"
    choose_device(torch.device(name, number))
    check = check_tpu_computes if DEVICE_TRAITS[name].is_compiled else check_gpu_computes
    check(TorchGpus(), number)


def open_store(rendezvous: str, rank: int, world_size: int) -> Store:
    """Where ranks find each other: a file's path, "tcp://HOST:PORT/NAME", or "env://NAME" where another launcher
    started them.

    The name keeps the keys of one job apart from those of another: a rank that is fast would else read the address of
    a peer that is gone.
    """
    if rendezvous.startswith("tcp://"):
        return _store_of_hosts(urlsplit(rendezvous))
    if rendezvous.startswith("env://"):
        return open_launcher_store(rendezvous.removeprefix("env://"), rank)
    return FileStore(rendezvous, world_size)


def _store_of_hosts(rendezvous: SplitResult) -> Store:
    """The store that a separate process serves on host 0 (`launch.local.store_process`).

    It listens before any rank is started. TCPStore prints a warning for each address without a name, which many a
    network at home has.
    """
    assert rendezvous.hostname is not None and rendezvous.port is not None
    with _nothing_printed():
        store = TCPStore(rendezvous.hostname, rendezvous.port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"plait{rendezvous.path}", store)


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """Keep what C++ code of this process prints to stderr off it."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def make_mesh(layout: Layout, device: str) -> DeviceMesh:
    """One axis for each of AXES, those of size 1 included. Every rank must call it, once.

    Axes of the same groups share one, as all of size 1 do. To torch's own `init_device_mesh` each is another group, and
    at rest the three threads of a group of gloo's take 0.4 % of a core: four of them 8 % of a host with a fifth of one.
    """
    ranks = torch.arange(layout.world_size).view(*layout.degrees.values())
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
    groups: list[dist.ProcessGroup] = []
    for axis, size in enumerate(ranks.shape):
        sets = tuple(tuple(row) for row in ranks.movedim(axis, -1).reshape(-1, size).tolist())
        if sets not in made:
            made[sets] = _own_group(sets)
            if AXES[axis] in _AXES_OF_COLLECTIVES:
                connect_ranks(made[sets])
        if AXES[axis] == "pipeline":
            connect_stages(made[sets])
        groups.append(made[sets])
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=AXES)


def world_communicator(timeout: timedelta = PEER_TIMEOUT) -> Communicator:
    """The communicator of all ranks of the job; each waits this long for others. Every rank must call it, once.

    gloo's messages between two ranks of a group stand in line: over the connections that carry gradients and weights a
    single number would wait until all of those have arrived. So they have separate connections.
    """
    if dist.get_world_size() == 1:
        return ONE_PROCESS
    group = dist.new_group(timeout=timeout) if dist.get_backend() == "gloo" else dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    connect_ranks(group)
    return GroupCommunicator(group)


def connect_ranks(group: dist.ProcessGroup) -> None:
    """Have NCCL connect the ranks of a group now. Every rank of it must call it, and ranks their groups in one order.

    Left to itself NCCL connects in a group's first sum, where the host blocks until all of the group are there. In the
    middle of a backward pass one of them may be waiting for a message that another sends only after its sum. gloo
    connects a group when it is made.
    """
    device = accelerator_of_group(None)
    if device is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        synchronize(device)


def connect_stages(group: dist.ProcessGroup) -> None:
    """Have NCCL connect each rank of a pipeline with the next, the last with the first. Every rank of it must call it.

    NCCL connects two ranks in their first message, in which both hosts block until the other is there; without this it
    would be in the pipeline's first micro-batches. The pairs come one after the other, so ranks cannot wait for each
    other in a circle.
    """
    device, rank, ranks = accelerator_of_group(None), dist.get_rank(group), dist.get_world_size(group)
    if device is None:
        return
    word = torch.zeros(1, device=device)
    for first in range(ranks if ranks > 2 else ranks - 1):
        following = (first + 1) % ranks
        if rank == first:
            dist.send(word, group=group, group_dst=following)
        elif rank == following:
            dist.recv(word, group=group, group_src=first)
    synchronize(device)


def accelerator_of_group(group: dist.ProcessGroup | None) -> torch.device | None:
    """This rank's accelerator, where a group's backends carry its tensors; None: they carry a processor's alone. The
    group of the whole job where none is given."""
    backends = str(dist.get_backend_config(group))
    return next((own_device(row.name) for row in ACCELERATORS if row.messages in backends), None)


def make_groups(sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each set of several ranks; returns those that this rank is in.

    Every rank of the job must call it, with the same sets in the same order.
    """
    groups = {ranks: _group(ranks) for ranks in sets if len(ranks) > 1}
    own = {ranks: group for ranks, group in groups.items() if group is not None}
    for group in own.values():
        connect_ranks(group)
    return own


def _own_group(sets: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
    """The group of this rank's set, of sets that have every rank once. Every rank must call it."""
    (own,) = (group for group in [_group(ranks) for ranks in sets] if group is not None)
    return own


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A process group of these ranks; None for a rank that is not in it. Every rank must call it."""
    if len(ranks) == dist.get_world_size():
        group = dist.group.WORLD
    else:
        backend = LOCAL_BACKEND if len(ranks) == 1 else None
        group = dist.new_group(list(ranks), timeout=PEER_TIMEOUT, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None
