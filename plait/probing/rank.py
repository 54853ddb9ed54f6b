"""The ranks of a probe: they time links, devices, and how much communication hides behind arithmetic; rank 0 sends
all of it to the leader."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from plait.accelerator import is_accelerator, own_device
from plait.checked_json import parse_json
from plait.devices import DEVICE_TRAITS, DeviceName
from plait.errors import PlaitError, RunFailed
from plait.launch.values.job import RankContext
from plait.machines.detect import describe_machine
from plait.machines.machine import core_share
from plait.machines.measured import LinkScope, MeasuredLink, MeasuredOverlap, WorkTiming
from plait.model.matmul import select_matmul_library
from plait.parallel.mesh import make_groups, open_store, use_gpu
from plait.probing.answer import (
    FailureReport,
    PairReport,
    PairTiming,
    ProbedHost,
    ProbeResult,
    RankReport,
    dead_device_sentence,
    dead_link_sentence,
    group_ranks_by_host,
    host_with_rank,
    read_report,
)
from plait.probing.arithmetic import arithmetic_runs, device_failure, select_comparison_runs, timed_pieces
from plait.probing.links import (
    DeadLink,
    begin_all_reduce,
    collective_operations,
    schedule_pairs,
    time_collectives,
    time_overlap,
    time_pair,
)
from plait.probing.request import ProbeRequest
from plait.probing.timing import (
    Clock,
    GroupBarrier,
    Lockstep,
    ProcessorClock,
    SingleRank,
    TimingSetup,
    WallClock,
    event_clock,
    ignore_share,
    processor_clock,
    time_in_rounds,
)
from plait.workers import PROGRESS

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
    report = _time_arithmetic(place, request, context.threads)
    links, overlaps = _time_groups(place, request)
    place.publish(f"rank/{place.rank}", asdict(replace(report, links=links, overlaps=overlaps)))
    if context.rank == 0:
        result = ProbeResult(
            hosts=place.hosts,
            pairs=tuple(pairs),
            ranks=tuple(place.wait_for(f"rank/{one}", RankReport, one) for one in range(context.world_size)),
        )
        context.send("probed", **asdict(result))
    place.bench.lockstep.barrier()
    # Not after a failure, which must be reported first: leaving may wait for peers.
    dist.destroy_process_group()


def _time_arithmetic(place: ProbeRank, request: ProbeRequest, threads: int) -> RankReport:
    """Time this rank's device while all ranks work and, on the first rank of a host, while it works alone; the report
    has no collectives yet."""
    bench = place.bench
    require_working_devices(place)
    runs = arithmetic_runs(request, bench.device)
    if bench.device.type == "cpu":
        bench = replace(bench, clock=processor_clock(core_share(len(place.host.ranks))))
    bench = replace(bench, tell=partial(place.tell, "arithmetic"))
    began = time.perf_counter(), time.process_time()
    together = timed_pieces(time_in_rounds(runs, bench, seconds=request.seconds), request.models)
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    granted = min(1.0, cpu_s / bench.clock.share / wall_s) if isinstance(bench.clock, ProcessorClock) else 1.0
    bench.lockstep.barrier()
    alone: tuple[WorkTiming, ...] = ()
    if place.rank == place.host.ranks[0] and len(place.host.ranks) > 1:
        by_itself = replace(bench, lockstep=SingleRank(), tell=ignore_share)
        middle = request.models[(len(request.models) - 1) // 2]
        alone = timed_pieces(
            time_in_rounds(select_comparison_runs(runs, middle), by_itself, seconds=TIMING_ALONE_S), (middle,)
        )
    bench.lockstep.barrier()
    if isinstance(bench.clock, ProcessorClock):
        product = next(run for (work, _), run in runs.items() if work == "product")
        share = share_beside_other_hosts(place.hosts, place.rank, bench.lockstep, place.bench.clock, product)
        together, alone, granted = with_share(together, share), with_share(alone, share), min(1.0, granted / share)
    machine = describe_machine()
    return RankReport(
        name=machine.name,
        memory_bytes=machine.memory_bytes,
        threads=threads,
        granted=granted,
        timed=tuple(together),
        alone=tuple(alone),
        links=(),
        overlaps=(),
    )


def _time_groups(
    place: ProbeRank, request: ProbeRequest
) -> tuple[tuple[MeasuredLink, ...], tuple[MeasuredOverlap, ...]]:
    """Time collectives, alone and behind arithmetic: inside all hosts at once, then between hosts. Returns what
    this rank reports: nothing unless it is the first of its host."""
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
    if place.rank != place.host.ranks[0]:
        return (), ()
    # Between hosts all ranks have the same figures, so only the first host reports them.
    return (
        tuple(one for one in links if one.scope == "inside" or place.rank == 0),
        tuple(one for one in overlaps if one.scope == "inside" or place.rank == 0),
    )


# How the ranks of a probe or a check begin: they find each other, and every link and device proves to work.


RENDEZVOUS_TIMEOUT_S = 60.0
"""Time limit for a rank to appear, and for its links to open."""
MESSAGE_TIMEOUT_S = 20.0
"""Time limit for a message between two ranks; the largest takes a second on the slowest link that gets it."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time limit for another rank's part of the probe."""


def join_probe(context: RankContext, device_name: DeviceName, gpus: Sequence[int] = ()) -> ProbeRank:
    """Find the other ranks and open the links to them; `gpus` are torch's numbers of a host's, empty: all.

    Raises RunFailed with the names of those that did not come.
    """
    store = open_store(context.rendezvous, context.rank, context.world_size)
    store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    ranks = exchange_rank_places(store, context, within_s=RENDEZVOUS_TIMEOUT_S)
    hosts = group_ranks_by_host(ranks)
    clock: Clock = WallClock()
    if DEVICE_TRAITS[device_name].is_compiled:
        raise PlaitError(
            "plait probe times single operations, and a TPU runs programs that are compiled from many; forecasts for "
            "it rest on published rates, and several TPU machines do not train together yet: train on one"
        )
    if DEVICE_TRAITS[device_name].is_accelerator:
        use_gpu(gpus[context.local_rank] if gpus else context.local_rank)
        clock = event_clock(own_device(device_name), COLLECTIVE_TIMEOUT.total_seconds())
    try:
        dist.init_process_group(
            DEVICE_TRAITS[device_name].process_groups,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    except RuntimeError as error:
        names = " and ".join(host.name for host in hosts)
        raise RunFailed(
            f"the workers on {names} could not open their links ({str(error).splitlines()[0]}); check that the hosts "
            "reach each other at the addresses that they gave, then probe again"
        ) from error
    store.set_timeout(COLLECTIVE_TIMEOUT)
    assert dist.group.WORLD is not None
    bench = TimingSetup(device=own_device(device_name), clock=clock, lockstep=GroupBarrier(dist.group.WORLD))
    return ProbeRank(rank=context.rank, hosts=hosts, store=store, bench=bench, tell=teller_of(context))


def time_pairs(place: ProbeRank, message_bytes: Sequence[int]) -> list[PairTiming]:
    """Time messages between pairs of ranks, by schedule; rank 0 gets all results, the others an empty list.

    Uses only the store until every link has proven to work: a collective over a dead link would wait for ever.
    """
    schedule = schedule_pairs([host.ranks for host in place.hosts])
    for number, pair in enumerate(schedule):
        place.tell("messages", number / len(schedule))
        if place.rank in (pair.first, pair.second):
            reading = _time_one_pair(place, (pair.first, pair.second), message_bytes)
            if place.rank == pair.first or reading is None:
                place.publish(f"pair/{pair.first}/{pair.second}", {"points": reading})
    found: list[PairReport] = []
    if place.rank == 0:
        found = [place.wait_for(f"pair/{pair.first}/{pair.second}", PairReport, pair.first) for pair in schedule]
        dead = [pair for pair, report in zip(schedule, found, strict=True) if report.points is None]
        sentences = [dead_link_sentence(place.hosts, pair.first, pair.second) for pair in dead]
        place.publish("dead", {"failure": sentences[0] if sentences else None})
    if sentence := place.wait_for("dead", FailureReport, 0).failure:
        raise RunFailed(sentence)
    return [
        PairTiming(first=pair.first, second=pair.second, points=report.points or ())
        for pair, report in zip(schedule, found, strict=False)
    ]


def _time_one_pair(
    place: ProbeRank, ends: tuple[int, int], message_bytes: Sequence[int]
) -> list[dict[str, Any]] | None:
    """The timings of one pair as JSON values; None where the link is dead."""
    device = place.bench.device
    clock = event_clock(device, MESSAGE_TIMEOUT_S) if is_accelerator(device) else place.bench.clock
    bench = replace(place.bench, clock=clock)
    try:
        points = time_pair(ends, message_bytes, rank=place.rank, bench=bench, timeout_s=MESSAGE_TIMEOUT_S)
    except DeadLink:
        return None
    return [asdict(point) for point in points]


def require_working_devices(place: ProbeRank) -> None:
    """Raise RunFailed, on every rank, where a rank's device computes nothing or something wrong. Every rank must call
    it."""
    place.publish(f"check/{place.rank}", {"failure": device_failure(place.bench.device)})
    for other in range(sum(len(host.ranks) for host in place.hosts)):
        if reason := place.wait_for(f"check/{other}", FailureReport, other).failure:
            raise RunFailed(dead_device_sentence(place.hosts, other, reason))


_LONGEST_HOST_NAME = 255


def exchange_rank_places(store: Any, context: RankContext, *, within_s: float) -> list[tuple[str, int]]:
    """(host name, local rank) of every rank, over torch.distributed's `store`; blocks until all are here.

    Raises RunFailed for a rank that does not come, or that says anything else.
    """
    store.set(f"probe/here/{context.rank}", json.dumps([socket.gethostname(), context.local_rank]))
    places = []
    for rank in range(context.world_size):
        try:
            places.append(_place(store.get(f"probe/here/{rank}"), rank))
        except RuntimeError as error:
            raise RunFailed(f"worker {rank} did not come within {within_s:.0f} s; look what its host says") from error
    return places


def _place(data: bytes, rank: int) -> tuple[str, int]:
    try:
        host, local_rank = parse_json(data)
        if not isinstance(host, str) or type(local_rank) is not int:
            raise TypeError
        if not host.isprintable() or len(host) > _LONGEST_HOST_NAME:
            raise ValueError
    except (ValueError, TypeError):
        raise RunFailed(f"worker {rank} does not say which host it is on; install the same commit on all") from None
    return host, local_rank


# What a rank of a probe knows of itself and the others, and how it talks with them and with the leader.


_T = TypeVar("_T")
ProbeStage = Literal["messages", "arithmetic", "sums"]
_STAGES: dict[ProbeStage, tuple[int, int, str]] = {
    "messages": (0, 15, "timing messages between workers"),
    "arithmetic": (15, 70, "timing the arithmetic of a step"),
    "sums": (70, 100, "timing sums over all workers"),
}
"""Begin and end of each stage of a probe, in percent of its time, and its description."""
TELL_EVERY_S = 1.0
"""Who hears it redraws a bar, which takes some milliseconds of a core: not more often, as all cores are being timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRank:
    """A rank of a probe, and how it reaches the others and times its work."""

    rank: int
    hosts: tuple[ProbedHost, ...]
    store: Store
    bench: TimingSetup
    tell: Callable[[ProbeStage, float], None]
    """Tells the leader how much of a stage is done, from 0 to 1; only rank 0 is heard."""

    @property
    def host(self) -> ProbedHost:
        return host_with_rank(self.hosts, self.rank)

    def publish(self, key: str, values: Any) -> None:
        """Store JSON values for the other ranks."""
        self.store.set(f"probe/{key}", json.dumps(values))

    def wait_for(self, key: str, kind: type[_T], rank: int) -> _T:
        """What a rank published under a key; blocks until it is there. Raises RunFailed where it is nothing of that
        kind."""
        where = f"worker {rank} on {host_with_rank(self.hosts, rank).name}"
        return read_report(kind, self.store.get(f"probe/{key}"), where)


def teller_of(context: RankContext, clock: Callable[[], float] = time.monotonic) -> Callable[[ProbeStage, float], None]:
    """Sends rank 0's progress to the leader: each stage at once, and then at most each TELL_EVERY_S; other ranks send
    nothing."""
    told_s, told_stage = clock(), None

    def tell(stage: ProbeStage, share: float) -> None:
        nonlocal told_s, told_stage
        if context.rank or (stage == told_stage and clock() - told_s < TELL_EVERY_S):
            return
        told_s, told_stage = clock(), stage
        first, end, words = _STAGES[stage]
        context.send(PROGRESS, done=round(first + share * (end - first)), total=100, stage=words)

    return tell


# How much of its core a worker keeps while the workers of all hosts work: hosts may be machines within one machine, or
# containers of it, whose cores they share. Processor time, by which a probe measures, does not tell.


BUSY_S = 0.4
NOTICED = 0.05
"""A smaller share of the time is lost to other programs on any machine."""


def share_beside_other_hosts(
    hosts: Sequence[ProbedHost], rank: int, lockstep: Lockstep, clock: Clock, work: Callable[[], object]
) -> float:
    """The share of processor time that this worker has while all hosts work, of that while only its own host works; 1
    where that is all of it, and for a single host. Every rank must call it; `work` keeps one thread busy.

    What programs outside the probe take is taken in both cases, and does not count.
    """
    if len(hosts) == 1:
        return 1.0
    lockstep.barrier()
    together = _share_of_time(clock, work)
    if lockstep.largest(1 - together) < NOTICED:
        return 1.0
    alone = together
    for host in hosts:
        lockstep.barrier()
        if rank in host.ranks:
            alone = _share_of_time(clock, work)
    lockstep.barrier()
    share = together / alone
    return share if share < 1 - NOTICED else 1.0


def with_share(timings: Sequence[WorkTiming], share: float) -> tuple[WorkTiming, ...]:
    """Times as they are for a worker that has this share of its core."""
    return tuple(replace(one, seconds=one.seconds / share) for one in timings)


def _share_of_time(clock: Clock, work: Callable[[], object]) -> float:
    """Processor seconds over the wall seconds that went by while this worker was busy."""
    first_s, _ = clock.time(work, 1)
    wall_s, cpu_s = clock.time(work, max(1, round(BUSY_S / max(first_s, 1e-6))))
    return min(1.0, cpu_s / wall_s)
