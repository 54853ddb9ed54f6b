"""How the ranks of a probe or a check begin: they find each other, and every link and device proves to work."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from plait.checked_json import parse_json
from plait.cluster.probe.links import DeadLink, schedule_pairs, time_pair
from plait.cluster.probe.pieces import device_failure
from plait.cluster.probe.timing import Clock, TimingSetup, WallClock
from plait.cluster.probe.verdict import (
    PairTiming,
    dead_device_sentence,
    dead_link_sentence,
    group_ranks_by_host,
)
from plait.cluster.topology import MachineDevice
from plait.commands.probing.probe_rank import ProbeRank, teller_of
from plait.commands.probing.result import DeadPair, DeviceCheck, PairReport
from plait.commands.probing.training_pieces import GroupBarrier, gpu_clock
from plait.errors import RunFailed
from plait.launch.values.job import RankContext
from plait.parallel.mesh import open_store, use_gpu

RENDEZVOUS_TIMEOUT_S = 60.0
"""Time limit for a rank to appear, and for its links to open."""
MESSAGE_TIMEOUT_S = 20.0
"""Time limit for a message between two ranks; the largest takes a second on the slowest link that gets it."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time limit for another rank's part of the probe."""


def join_probe(context: RankContext, device_kind: MachineDevice, gpus: Sequence[int] = ()) -> ProbeRank:
    """Find the other ranks and open the links to them; `gpus` are torch's numbers of a host's, empty: all.

    Raises RunFailed with the names of those that did not come.
    """
    store = open_store(context.rendezvous, context.rank, context.world_size)
    store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    ranks = exchange_rank_places(store, context, within_s=RENDEZVOUS_TIMEOUT_S)
    hosts = group_ranks_by_host(ranks)
    backend = "gloo"
    clock: Clock = WallClock(synchronize=_no_wait)
    if device_kind == "cuda":
        use_gpu(gpus[context.local_rank] if gpus else context.local_rank)
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
    device = torch.device("cuda", torch.cuda.current_device()) if device_kind == "cuda" else "cpu"
    bench = TimingSetup(device=torch.device(device), clock=clock, lockstep=GroupBarrier(dist.group.WORLD))
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
        dead = [place for place, report in enumerate(found) if report.points is None]
        place.publish("dead", {"pair": dead[0] if dead else None})
    pair = place.wait_for("dead", DeadPair, 0).pair
    if pair is not None:
        raise RunFailed(dead_link_sentence(place.hosts, schedule[pair].first, schedule[pair].second))
    return [
        PairTiming(first=pair.first, second=pair.second, points=report.points or ())
        for pair, report in zip(schedule, found, strict=False)
    ]


def _time_one_pair(
    place: ProbeRank, ends: tuple[int, int], message_bytes: Sequence[int]
) -> list[dict[str, Any]] | None:
    """The timings of one pair as JSON values; None where the link is dead."""
    clock = gpu_clock(MESSAGE_TIMEOUT_S) if place.bench.device.type == "cuda" else place.bench.clock
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
        if reason := place.wait_for(f"check/{other}", DeviceCheck, other).failure:
            raise RunFailed(dead_device_sentence(place.hosts, other, reason))


def _no_wait() -> None:
    """Return at once: on a processor the work is done when its call returns."""


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
