"""What the ranks of the echo's tests do."""

from __future__ import annotations

import time

import torch.distributed as dist

from plait.launch.values.job import RankContext
from plait.parallel.collectives import message_from_before_s
from plait.parallel.mesh import open_store


def time_messages(context: RankContext, argument: str) -> None:
    """Rank 1 comes as many seconds late as the argument says; each rank tells how long its message took."""
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    late_s, began = float(argument), time.perf_counter()
    while context.rank == 1 and time.perf_counter() - began < late_s:
        """Busy with something else."""
    waited = time.perf_counter()
    took_s = message_from_before_s(message_bytes=4096)
    context.send("took", took_s=took_s, whole_s=time.perf_counter() - waited)
    dist.destroy_process_group()
