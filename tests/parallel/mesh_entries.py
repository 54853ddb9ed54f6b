"""What the ranks of the mesh's tests do."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from plait.launch.values.job import RankContext
from plait.layout import AXES, Layout
from plait.parallel import mesh
from plait.parallel.mesh import make_groups, make_mesh, open_store, world_communicator


def tell_axes(context: RankContext, argument: str) -> None:
    """Each rank tells its neighbours along every axis, as a number with a digit each, and how many groups there are."""
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    degrees = dict(part.split("=") for part in argument.split())
    made = make_mesh(Layout(**{axis: int(degree) for axis, degree in degrees.items()}), "cpu")  # pyright: ignore[reportArgumentType]
    groups = {axis: made[axis].get_group() for axis in AXES}
    rows = {axis: [rank + 1 for rank in dist.get_process_group_ranks(group)] for axis, group in groups.items()}
    told = {axis: float("".join(str(digit) for digit in row)) for axis, row in rows.items()}
    used = {group.group_name: group for group in groups.values()}
    context.send("axes", **told, groups=len(used), useless=sum(refuses(group) for group in used.values()))
    dist.destroy_process_group()


def refuses(group: dist.ProcessGroup) -> bool:
    """Whether a group sums nothing."""
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return True
    return False


def connect_groups(context: RankContext, argument: str) -> None:
    """Each rank tells the groups and pairs of stages that it connects, in their order, as NCCL's would be; gloo sums
    and sends in their place, and would wait for ever where two ranks had another order."""
    mesh.accelerator_of_group = lambda group: torch.device("cpu")  # type: ignore[assignment]
    degrees, sets = json.loads(argument)
    connected: list[list[int]] = []
    sum_up, send, recv = dist.all_reduce, dist.send, dist.recv

    def noted(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        connected.append(dist.get_process_group_ranks(group))
        sum_up(values, group=group)

    def noted_send(values: torch.Tensor, group: dist.ProcessGroup, group_dst: int) -> None:
        connected.append([context.rank, dist.get_global_rank(group, group_dst)])
        send(values, group=group, group_dst=group_dst)

    def noted_recv(values: torch.Tensor, group: dist.ProcessGroup, group_src: int) -> None:
        connected.append([dist.get_global_rank(group, group_src), context.rank])
        recv(values, group=group, group_src=group_src)

    dist.all_reduce = noted  # type: ignore[assignment]
    dist.send, dist.recv = noted_send, noted_recv  # type: ignore[assignment]
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    world_communicator()
    make_mesh(Layout(**degrees), "cpu")
    make_groups([tuple(ranks) for ranks in sets])
    context.send("connected", groups=connected)
    dist.destroy_process_group()
