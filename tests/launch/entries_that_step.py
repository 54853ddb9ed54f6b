"""Ranks that step together and say how far they are, for tests that stop one of them."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import NoReturn

from plait.launch.values.job import RankContext


def step_together(context: RankContext, argument: str) -> None:
    """Sum a number each step until stopped; the rank that `argument` names computes without end after 20 steps."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(context.rendezvous, context.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=timedelta(seconds=60)
    )
    dist.all_reduce(torch.ones(1))
    context.send("pid", pid=os.getpid(), server=os.getppid())
    step, progress = 0, context.progress
    while True:
        step += 1
        progress.step(step)
        progress.phase("forward and backward")
        time.sleep(0.02)
        if argument == str(context.rank) and step > 20:
            _spin()
        progress.phase("the sum of gradients")
        progress.collective()
        if dist.all_reduce(stop := torch.tensor([float(context.stop_requested())])) is None and stop.item():
            break
    context.send("stepped", steps=step)
    dist.destroy_process_group()


def _spin() -> NoReturn:
    while True:
        time.monotonic()
