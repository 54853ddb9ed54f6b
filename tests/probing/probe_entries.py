"""What ranks do in the tests of the probe's links."""

from __future__ import annotations

import json
import os
import resource
import socket
from dataclasses import replace

import torch
import torch.distributed as dist

from plait.launch.values.job import RankContext
from plait.parallel.mesh import open_store
from plait.probing import rank
from plait.probing.answer import ProbedHost
from plait.probing.arithmetic import arithmetic_runs
from plait.probing.links import DeadLink, time_pair
from plait.probing.rank import share_beside_other_hosts
from plait.probing.request import ProbeRequest
from plait.probing.timing import GroupBarrier, SingleRank, TimingSetup, WallClock


def silent_peer(context: RankContext, argument: str) -> None:
    """Rank 1 never answers; rank 0 tells what it makes of it."""
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    if context.rank == 1:
        store.get("told")
        return
    bench = TimingSetup(device=torch.device("cpu"), clock=WallClock(), lockstep=SingleRank())
    try:
        time_pair((0, 1), (1024,), rank=0, bench=bench, timeout_s=0.5)
    except DeadLink:
        context.send("dead", name=socket.gethostname())
    store.set("told", json.dumps(True))


def count_pages(context: RankContext, argument: str) -> None:
    """Run all that a request names in rounds, and tell how many pages the system had to find for its layers."""
    request, device = ProbeRequest.from_json(argument), torch.device("cpu")
    runs = arithmetic_runs(request, device)
    found = {"layer": 0, "layer_backward": 0}
    for _ in range(3):
        for (work, _sizes), run in runs.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            run()
            if work in found:
                found[work] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    context.send("pages", **found)


def on_two_hosts(context: RankContext, argument: str) -> None:
    """A probe whose last rank believes to be the first of another host."""
    last = context.rank == context.world_size - 1
    rank.run_probe_rank(replace(context, local_rank=0 if last else context.rank), argument)


def share_of_a_core(context: RankContext, argument: str) -> None:
    """Two ranks, each a host of its own, bound to the cores that are named; each sends its share."""
    os.sched_setaffinity(0, {int(argument.split()[context.rank])})
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    assert dist.group.WORLD is not None
    hosts = tuple(ProbedHost(name=f"host {place}", ranks=(place,)) for place in range(context.world_size))
    factor = torch.ones(64, 64)
    together, clock = GroupBarrier(dist.group.WORLD), WallClock()
    share = share_beside_other_hosts(hosts, context.rank, together, clock, lambda: factor @ factor)
    context.send("share", share=share)
    dist.destroy_process_group()
