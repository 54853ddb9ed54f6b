"""The ranks of a probe: they time links, devices, and how much communication hides behind arithmetic; rank 0 sends
all of it to the leader."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster.measure import detect_machine
from plait.cluster.measured import LinkScope, MeasuredLink, MeasuredOverlap, WorkTiming
from plait.cluster.probe.arithmetic import arithmetic_runs, select_comparison_runs, timed_pieces
from plait.cluster.probe.links import DeadLink, schedule_pairs, time_collectives, time_pair
from plait.cluster.probe.overlap import time_overlap
from plait.cluster.probe.pieces import device_failure
from plait.cluster.probe.request import ProbeRequest
from plait.cluster.probe.timing import (
    Clock,
    ProcessorClock,
    SingleRank,
    TimingSetup,
    WallClock,
    tell_nobody,
    time_in_rounds,
)
from plait.cluster.probe.verdict import (
    PairTiming,
    dead_device_sentence,
    dead_link_sentence,
    group_ranks_by_host,
)
from plait.commands.probing.probe_rank import ProbeRank, teller_of
from plait.commands.probing.rank_places import exchange_rank_places
from plait.commands.probing.result import (
    DeadPair,
    DeviceCheck,
    GroupReport,
    PairReport,
    ProbeResult,
    RankReport,
)
from plait.commands.probing.shared_cores import share_beside_other_hosts, with_processor_clock, with_share
from plait.commands.probing.training_pieces import (
    GroupBarrier,
    begin_all_reduce,
    collective_operations,
    gpu_clock,
    training_operations_for,
)
from plait.errors import RunFailed
from plait.launch.values.job import RankContext
from plait.model.matmul import select_matmul_library
from plait.parallel.mesh import make_groups, open_store

RENDEZVOUS_TIMEOUT_S = 60.0
"""Time limit for a rank to appear, and for its links to open."""
MESSAGE_TIMEOUT_S = 20.0
"""Time limit for a message between two ranks; the largest takes a second on the slowest link that gets it."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time limit for another rank's part of the probe."""
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
        select_matmul_library(request.host_backends.get(detect_machine().digest(), request.matmul_backend))
    place = _join_probe(context, request)
    pairs = _time_pairs(place, request)
    figures = _time_arithmetic(place, request)
    _time_groups(place, request)
    machine = detect_machine()
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


def _join_probe(context: RankContext, request: ProbeRequest) -> ProbeRank:
    """Find the other ranks and open the links to them; raises RunFailed with the names of those that did not come."""
    store = open_store(context.rendezvous, context.rank, context.world_size)
    store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    ranks = exchange_rank_places(store, context, within_s=RENDEZVOUS_TIMEOUT_S)
    hosts = group_ranks_by_host(ranks)
    backend = "gloo"
    clock: Clock = WallClock(synchronize=_no_wait)
    if request.device == "cuda":
        torch.cuda.set_device(request.gpus[context.local_rank] if request.gpus else context.local_rank)
        backend, clock = "cpu:gloo,cuda:nccl", gpu_clock(COLLECTIVE_TIMEOUT.total_seconds())
    try:
        dist.init_process_group(
            backend, store=store, rank=context.rank, world_size=context.world_size, timeout=COLLECTIVE_TIMEOUT
        )
    except RuntimeError as error:
        names = " and ".join(host.name for host in hosts)
        raise RunFailed(
            f"the workers on {names} could not open their links ({str(error).splitlines()[0]}); check that the hosts "
            "reach each other at the addresses that they gave, then probe again"
        ) from error
    store.set_timeout(COLLECTIVE_TIMEOUT)
    assert dist.group.WORLD is not None
    device = torch.device(request.device, torch.cuda.current_device()) if request.device == "cuda" else "cpu"
    bench = TimingSetup(device=torch.device(device), clock=clock, lockstep=GroupBarrier(dist.group.WORLD))
    return ProbeRank(rank=context.rank, hosts=hosts, store=store, bench=bench, tell=teller_of(context))


def _time_pairs(place: ProbeRank, request: ProbeRequest) -> list[PairTiming]:
    """Time messages between pairs of ranks, by schedule; rank 0 gets all results, the others an empty list.

    Uses only the store until every link has proven to work: a collective over a dead link would wait for ever.
    """
    schedule = schedule_pairs([host.ranks for host in place.hosts])
    for number, pair in enumerate(schedule):
        place.tell("messages", number / len(schedule))
        if place.rank in (pair.first, pair.second):
            reading = _time_one_pair(place, (pair.first, pair.second), request)
            if place.rank == pair.first or reading is None:
                place.publish(f"pair/{pair.first}/{pair.second}", {"points": reading})
    found: list[PairReport] = []
    if place.rank == 0:
        found = [place.wait_for(f"pair/{pair.first}/{pair.second}", PairReport, pair.first) for pair in schedule]
        dead = [place for place, report in enumerate(found) if report.points is None]
        place.publish("dead", {"pair": dead[0] if dead else None})
    pair = place.wait_for("dead", DeadPair, 0).pair
    if pair is not None:
        raise RunFailed(dead_link_sentence(place.hosts, schedule[pair].first, schedule[pair].second))
    return [
        PairTiming(first=pair.first, second=pair.second, points=report.points or ())
        for pair, report in zip(schedule, found, strict=False)
    ]


def _time_one_pair(place: ProbeRank, ends: tuple[int, int], request: ProbeRequest) -> list[dict[str, Any]] | None:
    """The timings of one pair as JSON values; None where the link is dead."""
    clock = gpu_clock(MESSAGE_TIMEOUT_S) if place.bench.device.type == "cuda" else place.bench.clock
    bench = replace(place.bench, clock=clock)
    try:
        points = time_pair(ends, request.messages, rank=place.rank, bench=bench, timeout_s=MESSAGE_TIMEOUT_S)
    except DeadLink:
        return None
    return [asdict(point) for point in points]


def _time_arithmetic(place: ProbeRank, request: ProbeRequest) -> dict[str, Any]:
    """Time this rank's device while all ranks work and, on the first rank of a host, while it works alone."""
    bench = place.bench
    place.publish(f"check/{place.rank}", {"failure": device_failure(bench.device)})
    ranks = range(sum(len(host.ranks) for host in place.hosts))
    for other in ranks:
        if reason := place.wait_for(f"check/{other}", DeviceCheck, other).failure:
            raise RunFailed(dead_device_sentence(place.hosts, other, reason))
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


def _no_wait() -> None:
    """Return at once: on a processor the work is done when its call returns."""
