"""Measurements of devices and links: made now, or loaded from an earlier probe."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlaitError
from plait.launch.values.job import Job
from plait.machines.machine import Machine
from plait.machines.measured import (
    MeasuredDevice,
    MeasuredLink,
    Measurements,
    WorkKind,
    WorkTiming,
    measurements_from_json,
    measurements_json,
)
from plait.private_folder import make_private_folder
from plait.probing.answer import (
    ProbeResult,
    find_slow_parts,
    measured_device,
    pair_links,
    parse_result,
    relative_speeds,
    require_all_work,
)
from plait.probing.measuring import ask_rank_0
from plait.probing.request import ProbeRequest, layer_products
from plait.regular_file import read_regular_file
from plait.screen.screen import ShowProgress, ignore_progress
from plait.workers import PROBE_ENTRY, SYMBOLIC_SHAPES, WorkerPool
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

RECHECK_AFTER_S = 900.0
"""Measurements that were made or confirmed within this time are used without another check."""

ProbeFreshness = Literal["kept", "again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeWorkers:
    """How many workers are probed, with how many threads each."""

    workers: int
    threads: int


def measure_or_load(
    pool: WorkerPool,
    machines: Sequence[Machine],
    request: ProbeRequest,
    probe_workers: ProbeWorkers,
    *,
    fresh: ProbeFreshness,
    show: ShowProgress = ignore_progress,
) -> Measurements:
    """Load the measurements of these hosts with this software for the same request, or make them now; `show` gets how
    far that is."""
    working = pool.working_folder
    if fresh == "kept" and (known := load_measurements(machines, request, probe_workers, working)):
        return known
    key = _measurements_key(machines, request, probe_workers)
    job = Job(
        entry=PROBE_ENTRY,
        argument=request.to_json(),
        world_size=probe_workers.workers,
        threads=probe_workers.threads,
        needs=(SYMBOLIC_SHAPES,),
        at_stop="abandon",
    )
    result = parse_result(ask_rank_0(pool, job, "probed", show))
    measured, kept = measurements_from(result, request, key), _measurements_path(key, working)
    make_private_folder(kept.parent)
    kept.write_text(measurements_json(measured), encoding="utf-8")
    return measured


def load_measurements(
    machines: Sequence[Machine],
    request: ProbeRequest,
    probe_workers: ProbeWorkers,
    working: WorkingFolder = CURRENT_FOLDER,
) -> Measurements | None:
    """What was measured before on machines and software like these; None where there is nothing, or nothing usable."""
    kept = _measurements_path(_measurements_key(machines, request, probe_workers), working)
    try:
        return measurements_from_json(read_regular_file(kept), str(kept)) if kept.exists() else None
    except (PlaitError, OSError, ValueError):
        return None  # another version's, or incomplete: measure again and overwrite it


def was_checked_recently(
    machines: Sequence[Machine],
    request: ProbeRequest,
    probe_workers: ProbeWorkers,
    addresses: Sequence[str],
    working: WorkingFolder = CURRENT_FOLDER,
) -> bool:
    """Whether the stored measurements were confirmed between these addresses so recently that they need no check."""
    seen = _checked_path(machines, request, probe_workers, working)
    if not seen.exists() or not 0 <= time.time() - seen.stat().st_mtime < RECHECK_AFTER_S:
        return False
    try:
        return read_regular_file(seen) == json.dumps(addresses).encode()
    except (OSError, ValueError):  # a pipe, say: not what plait left there
        return False


def mark_checked(
    machines: Sequence[Machine],
    request: ProbeRequest,
    probe_workers: ProbeWorkers,
    addresses: Sequence[str],
    working: WorkingFolder = CURRENT_FOLDER,
) -> None:
    """Record that the stored measurements were made or confirmed just now."""
    _checked_path(machines, request, probe_workers, working).write_text(json.dumps(addresses), encoding="utf-8")


def _checked_path(
    machines: Sequence[Machine], request: ProbeRequest, probe_workers: ProbeWorkers, working: WorkingFolder
) -> Path:
    return _measurements_path(_measurements_key(machines, request, probe_workers), working).with_suffix(".seen")


def send_links_of(result: ProbeResult) -> tuple[MeasuredLink, ...]:
    """The point-to-point links in a probe's result."""
    return pair_links(result.hosts, result.pairs)


def timed_work_by_host(result: ProbeResult) -> list[tuple[WorkTiming, ...]]:
    """The timed pieces of arithmetic of each host's first rank."""
    return [result.ranks[host.ranks[0]].timed for host in result.hosts]


def measurements_from(result: ProbeResult, request: ProbeRequest, key: str) -> Measurements:
    """Measurements from the result of a whole probe; raises RunFailed where a part of it is missing."""
    require_all_work(result)
    timed = {rank: one.timed for rank, one in enumerate(result.ranks)}
    devices = []
    for host in result.hosts:
        first = result.ranks[host.ranks[0]]
        device = measured_device(
            host,
            first.name,
            timed,
            first.alone,
            granted=min(result.ranks[rank].granted for rank in host.ranks),
            threads=first.threads,
            memory_bytes=first.memory_bytes,
        )
        devices.append(device)
    return Measurements(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        precision=request.precision,
        workers=len(timed),
        fingerprint=key,
        devices=tuple(devices),
        links=(*send_links_of(result), *result.links),
        overlaps=result.overlaps,
        complaints=find_slow_parts(result.hosts, relative_speeds(timed), result.pairs),
    )


def _measurements_key(machines: Sequence[Machine], request: ProbeRequest, probe_workers: ProbeWorkers) -> str:
    what = [
        [machine.fingerprint() for machine in machines],
        request.to_json(),
        probe_workers.workers,
        probe_workers.threads,
    ]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _measurements_path(key: str, working: WorkingFolder) -> Path:
    return working.cache / "probes" / f"{key}.json"


# Whether an earlier probe of several hosts still holds: a short measurement before its figures are used again.


RECHECK_MESSAGE_BYTES = 2**20
LARGEST_DRIFT = 1.3
"""A figure that is larger or smaller than before by more than this factor has changed: another cable, another load."""

ReadingByName = Mapping[object, float]


def measurements_still_hold(
    pool: WorkerPool, known: Measurements, request: ProbeRequest, probe_workers: ProbeWorkers
) -> bool:
    """Time one message over each link and one layer on each host, and compare them with the known measurements; takes
    some seconds on all hosts.

    Raises RunFailed with the name of a dead device or link, Interrupted where a signal came.
    """
    model = request.models[0]
    short = replace(
        request,
        models=(model,),
        products=layer_products(model),
        attentions=(),
        messages=(RECHECK_MESSAGE_BYTES,),
        seconds=0.0,
    )
    job = Job(
        entry=PROBE_ENTRY,
        argument=short.to_json(),
        world_size=probe_workers.workers,
        threads=probe_workers.threads,
        needs=(SYMBOLIC_SHAPES,),
        at_stop="abandon",
    )
    result = parse_result(ask_rank_0(pool, job, "probed"))
    if [host.name for host in result.hosts] != [device.host for device in known.devices]:
        return False  # the hosts have another order, or are others
    layers = zip([device.timed for device in known.devices], timed_work_by_host(result), strict=False)
    return are_close(_send_rates(known.links), _send_rates(send_links_of(result))) and all(
        are_close(*_common_product_seconds(*pair)) for pair in layers
    )


def are_close(before: ReadingByName, now: ReadingByName) -> bool:
    """Whether the same things have about the same figures."""
    return before.keys() == now.keys() and all(
        1 / LARGEST_DRIFT <= now[key] / before[key] <= LARGEST_DRIFT for key in before
    )


def _send_rates(links: Sequence[MeasuredLink]) -> ReadingByName:
    """Bytes per second over each link, of a message of LOOK_BYTES or of the longest below it."""
    found: dict[object, float] = {}
    for link in links:
        if link.kind == "send":
            point = max((one for one in link.points if one.bytes <= RECHECK_MESSAGE_BYTES), key=lambda one: one.bytes)
            found[link.scope, link.hosts] = point.bytes / point.seconds
    return found


def _common_product_seconds(
    before: Sequence[WorkTiming], now: Sequence[WorkTiming]
) -> tuple[ReadingByName, ReadingByName]:
    """The seconds of all products that were timed both times, together: single ones are too short to be steady."""
    old, new = ({(one.work, one.sizes): one.seconds for one in some} for some in (before, now))
    both = [key for key in new if key in old and key[0].startswith("product")]
    return {"products": sum(old[key] for key in both)}, {"products": sum(new[key] for key in both)}


# Removes disturbances of single readings from the times of equal hosts: such hosts differ by one factor in all they
# do.


EQUAL_HOSTS_TOLERANCE, EQUAL_HOSTS_TIME_SHARE = 0.15, 0.75
"""Hosts are equal if the times of work that makes up this share (second) of all time deviate by at most this tolerance
(first), as a difference of logarithms, from one common factor."""
POOLING_ROUNDS = 8
"""Rounds of fitting factors and common times in turn; it converges in two or three."""

RealArray = NDArray[np.float64]
_Piece = tuple[WorkKind, tuple[int, ...]]


def pool_measurements(measured: Measurements) -> Measurements:
    """The same measurements with consistent times for equal hosts: the common time of each piece of work, times one
    factor per host. A single unlucky reading then slows down neither a host nor the forecast.

    Hosts are equal if their processors or GPUs have the same name, they have as many workers and threads, and their
    times do differ by one factor (more or fewer cores granted, another clock rate); all others keep the times that were
    measured.
    """
    makes: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    for place, host in enumerate(measured.devices):
        makes[host.name, host.workers, host.threads].append(place)
    devices = list(measured.devices)
    for places in makes.values():
        if len(places) > 1:
            for place, host in zip(places, _pool_equal_hosts([devices[place] for place in places]), strict=True):
                devices[place] = host
    return replace(measured, devices=tuple(devices))


def _pool_equal_hosts(hosts: Sequence[MeasuredDevice]) -> Sequence[MeasuredDevice]:
    times = [_times(host) for host in hosts]
    pieces = [piece for piece in times[0] if all(piece in other for other in times)]
    log_times = np.log([[own[piece] for piece in pieces] for own in times])
    weights = np.exp(log_times.mean(axis=0))  # long work counts: short readings catch a pause or miss it
    factors = np.zeros(len(hosts))
    for _ in range(POOLING_ROUNDS):
        common = np.median(log_times - factors[:, None], axis=0)
        factors = np.array([_quantile(own - common, weights, 0.5) for own in log_times])
    fitted = factors[:, None] + np.median(log_times - factors[:, None], axis=0)
    if (
        max(_quantile(np.abs(off), weights, EQUAL_HOSTS_TIME_SHARE) for off in log_times - fitted)
        > EQUAL_HOSTS_TOLERANCE
    ):
        return hosts
    return [
        _with_seconds(host, dict(zip(pieces, np.exp(own).tolist(), strict=True)))
        for host, own in zip(hosts, fitted, strict=True)
    ]


def _times(host: MeasuredDevice) -> dict[_Piece, float]:
    return {(one.work, one.sizes): one.seconds for one in host.timed}


def _with_seconds(host: MeasuredDevice, seconds: dict[_Piece, float]) -> MeasuredDevice:
    kept = {**_times(host), **seconds}
    return replace(host, timed=tuple(replace(one, seconds=kept[one.work, one.sizes]) for one in host.timed))


def _quantile(values: RealArray, weights: RealArray, share: float) -> float:
    """The weighted quantile of `values`; a `share` of one half gives the weighted median."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] * share)])
