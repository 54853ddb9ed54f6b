"""The ranks of a probe: they time links, devices, and how much communication hides behind arithmetic; rank 0 sends
all of it to the leader."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster.measure import describe_machine
from plait.cluster.measured import LinkScope, MeasuredLink, MeasuredOverlap, WorkTiming
from plait.cluster.probe.arithmetic import arithmetic_runs, select_comparison_runs, timed_pieces
from plait.cluster.probe.links import time_collectives
from plait.cluster.probe.overlap import time_overlap
from plait.cluster.probe.request import ProbeRequest
from plait.cluster.probe.timing import ProcessorClock, SingleRank, tell_nobody, time_in_rounds
from plait.commands.probing.first_contact import join_probe, require_working_devices, time_pairs
from plait.commands.probing.probe_rank import ProbeRank
from plait.commands.probing.result import (
    GroupReport,
    ProbeResult,
    RankReport,
)
from plait.commands.probing.shared_cores import share_beside_other_hosts, with_processor_clock, with_share
from plait.commands.probing.training_pieces import (
    GroupBarrier,
    begin_all_reduce,
    collective_operations,
    training_operations_for,
)
from plait.launch.values.job import RankContext
from plait.model.matmul import select_matmul_library
from plait.parallel.mesh import make_groups

TIMING_ALONE_S = 1.0


def run_probe_rank(context: RankContext, argument: str) -> None:
    """Entry of each rank of a probe, on one host or several; the argument is a ProbeRequest's JSON.

    Rank 0 sends one "probed" message with the results of all ranks. Raises RunFailed, with a sentence, for a dead
    device or link.
    """
    request = ProbeRequest.from_json(argument)
    torch.set_num_threads(context.threads)
    torch.set_flush_denormal(True)  # as training does
    if request.device == "cpu":
        select_matmul_library(request.host_backends.get(describe_machine().digest(), request.matmul_backend))
    place = join_probe(context, request.device, request.gpus)
    pairs = time_pairs(place, request.messages)
    figures = _time_arithmetic(place, request)
    _time_groups(place, request)
    machine = describe_machine()
    name, memory = machine.name, machine.memory_bytes
    place.publish(f"rank/{place.rank}", {**figures, "name": name, "memory_bytes": memory, "threads": context.threads})
    if context.rank == 0:
        firsts = [host.ranks[0] for host in place.hosts]
        shared = [place.wait_for(f"groups/{first}", GroupReport, first) for first in firsts]
        result = ProbeResult(
            hosts=place.hosts,
            pairs=tuple(pairs),
            ranks=tuple(place.wait_for(f"rank/{one}", RankReport, one) for one in range(context.world_size)),
            links=tuple(link for one in shared for link in one.links),
            overlaps=tuple(overlap for one in shared for overlap in one.overlaps),
        )
        context.send("probed", **asdict(result))
    place.bench.lockstep.barrier()
    # Not after a failure, which must be told first: leaving may wait for peers.
    dist.destroy_process_group()


def _time_arithmetic(place: ProbeRank, request: ProbeRequest) -> dict[str, Any]:
    """Time this rank's device while all ranks work and, on the first rank of a host, while it works alone."""
    bench = place.bench
    require_working_devices(place)
    runs = arithmetic_runs(request, bench.device, training_operations_for(request))
    bench = replace(with_processor_clock(bench, len(place.host.ranks)), tell=partial(place.tell, "arithmetic"))
    began = time.perf_counter(), time.process_time()
    together = timed_pieces(time_in_rounds(runs, bench, seconds=request.seconds), request.models)
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    granted = min(1.0, cpu_s / bench.clock.share / wall_s) if isinstance(bench.clock, ProcessorClock) else 1.0
    bench.lockstep.barrier()
    alone: tuple[WorkTiming, ...] = ()
    if place.rank == place.host.ranks[0] and len(place.host.ranks) > 1:
        by_itself = replace(bench, lockstep=SingleRank(), tell=tell_nobody)
        middle = request.models[(len(request.models) - 1) // 2]
        alone = timed_pieces(
            time_in_rounds(select_comparison_runs(runs, middle), by_itself, seconds=TIMING_ALONE_S), (middle,)
        )
    bench.lockstep.barrier()
    if isinstance(bench.clock, ProcessorClock):
        product = next(run for (work, _), run in runs.items() if work == "product")
        share = share_beside_other_hosts(place.hosts, place.rank, bench.lockstep, place.bench.clock, product)
        together, alone, granted = with_share(together, share), with_share(alone, share), min(1.0, granted / share)
    return {"timed": [asdict(one) for one in together], "alone": [asdict(one) for one in alone], "granted": granted}


def _time_groups(place: ProbeRank, request: ProbeRequest) -> None:
    """Time collectives, alone and behind arithmetic: inside all hosts at once, then between hosts."""
    everybody = tuple(rank for host in place.hosts for rank in host.ranks)
    firsts = tuple(host.ranks[0] for host in place.hosts)
    inside = [ranks for host in place.hosts for ranks in {host.ranks[:2], host.ranks} if len(ranks) > 1]
    between = [ranks for ranks in dict.fromkeys([firsts[:2], everybody]) if len(place.hosts) > 1]
    sets = sorted({*inside, *between}, key=lambda ranks: (ranks in between, len(ranks), ranks))
    groups = make_groups(sets)
    links: list[MeasuredLink] = []
    overlaps: list[MeasuredOverlap] = []
    for number, ranks in enumerate(sets):
        place.tell("sums", number / len(sets))
        if ranks in between:
            place.bench.lockstep.barrier()
        if place.rank in ranks:
            scope: LinkScope = "between" if ranks in between else "inside"
            names = tuple(host.name for host in place.hosts if set(host.ranks) & set(ranks))
            bench = replace(place.bench, lockstep=GroupBarrier(groups[ranks]))
            found = time_collectives(collective_operations(bench.device), request.messages, groups[ranks], bench)
            for kind, points in found.items():
                links.append(MeasuredLink(kind=kind, scope=scope, hosts=names, ranks=len(ranks), points=points))
            if ranks in (everybody, place.host.ranks):
                start = partial(begin_all_reduce, group=groups[ranks])
                seconds = request.seconds / 4
                sums = found["all_reduce"]
                overlaps.append(time_overlap(start, sums, bench, scope=scope, ranks=len(ranks), seconds=seconds))
    place.bench.lockstep.barrier()
    if place.rank == place.host.ranks[0]:
        # Between hosts all ranks have the same figures, so only the first host reports them.
        own = [one for one in (*links, *overlaps) if one.scope == "inside" or place.rank == 0]
        place.publish(
            f"groups/{place.rank}",
            {
                "links": [asdict(one) for one in own if isinstance(one, MeasuredLink)],
                "overlaps": [asdict(one) for one in own if isinstance(one, MeasuredOverlap)],
            },
        )
