"""Measurements of devices and links: made now, or loaded from an earlier probe after a short check that they still
hold; and equal hosts' readings pooled."""

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
from plait.planner.derive.resources import FixedWorkers
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
from plait.probing.measuring_time import UNLIMITED, MeasuringTime
from plait.probing.request import ProbeRequest, layer_products
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.screen.screen import ShowProgress, ignore_progress
from plait.workers import PROBE_ENTRY, SYMBOLIC_SHAPES, WorkerPool, ask_rank_0
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

RECHECK_AFTER_S = 900.0
"""Measurements that were made or confirmed within this time are used without another check."""

RECHECK_MESSAGE_BYTES = 2**20
LARGEST_DRIFT = 1.3
"""A figure that is larger or smaller than before by more than this factor has changed: another cable, another load."""

ReadingByName = Mapping[object, float]
EQUAL_HOSTS_TOLERANCE, EQUAL_HOSTS_TIME_SHARE = 0.15, 0.75
"""Hosts are equal if the times of work that makes up this share (second) of all time deviate by at most this tolerance
(first), as a difference of logarithms, from one common factor."""
POOLING_ROUNDS = 8
"""Rounds of fitting factors and common times in turn; it converges in two or three."""

RealArray = NDArray[np.float64]
_Piece = tuple[WorkKind, tuple[int, ...]]
ProbeFreshness = Literal["kept", "again"]
"""Whether the stored measurements of an earlier probe are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProbe:
    """A probe of some machines, whose measurements are stored for the next run on the same machines and software."""

    machines: Sequence[Machine]
    request: ProbeRequest
    workers: FixedWorkers
    working: WorkingFolder = CURRENT_FOLDER

    def load(self) -> Measurements | None:
        """The stored measurements; None where there are none, or none that can be used."""
        path = self._path
        try:
            return measurements_from_json(read_regular_file(path), str(path)) if path.exists() else None
        except (PlaitError, OSError, ValueError):
            return None  # another version's, or incomplete: measure again and overwrite it

    def measure(
        self, pool: WorkerPool, show: ShowProgress = ignore_progress, limit: MeasuringTime = UNLIMITED
    ) -> Measurements:
        """Measure and store; `show` gets the progress. Raises RunFailed with the name of a dead device or link,
        Interrupted where a signal came, OutOfTime at the end of the time."""
        return self.keep(measurements_from(self._run(pool, self.request, show, limit), self.request, self._key))

    def keep(self, measured: Measurements) -> Measurements:
        """Store measurements of these machines that were found in another way."""
        measured = replace(measured, fingerprint=self._key)
        make_private_folder(self._path.parent)
        replace_file(self._path, measurements_json(measured).encode())  # hosts that wait are measured side by side
        return measured

    def load_or_measure(
        self, pool: WorkerPool, fresh: ProbeFreshness, show: ShowProgress = ignore_progress
    ) -> Measurements:
        """The stored measurements where they may be used and are there, else new ones."""
        return (self.load() if fresh == "kept" else None) or self.measure(pool, show)

    def was_checked_recently(self, addresses: Sequence[str]) -> bool:
        """Whether the stored measurements were confirmed between these addresses within RECHECK_AFTER_S."""
        seen = self._path.with_suffix(".seen")
        if not seen.exists() or not 0 <= time.time() - seen.stat().st_mtime < RECHECK_AFTER_S:
            return False
        try:
            return read_regular_file(seen) == json.dumps(addresses).encode()
        except (OSError, ValueError):  # a pipe, say: not what plait left there
            return False

    def mark_checked(self, addresses: Sequence[str]) -> None:
        """Record that the stored measurements were made or confirmed just now."""
        self._path.with_suffix(".seen").write_text(json.dumps(addresses), encoding="utf-8")

    def still_holds(self, pool: WorkerPool, known: Measurements, limit: MeasuringTime = UNLIMITED) -> bool:
        """Time one message over each link and one layer on each host, and compare them with the known measurements;
        takes some seconds on all hosts. Raises as `measure` does."""
        model = self.request.models[0]
        short = replace(
            self.request,
            models=(model,),
            products=layer_products(model),
            attentions=(),
            messages=(RECHECK_MESSAGE_BYTES,),
            seconds=0.0,
        )
        result = self._run(pool, short, limit=limit)
        if [host.name for host in result.hosts] != [device.host for device in known.devices]:
            return False  # the hosts have another order, or are others
        firsts = [result.ranks[host.ranks[0]].timed for host in result.hosts]
        layers = zip([device.timed for device in known.devices], firsts, strict=False)
        return are_close(_send_rates(known.links), _send_rates(pair_links(result.hosts, result.pairs))) and all(
            are_close(*_common_product_seconds(*pair)) for pair in layers
        )

    def _run(
        self,
        pool: WorkerPool,
        request: ProbeRequest,
        show: ShowProgress = ignore_progress,
        limit: MeasuringTime = UNLIMITED,
    ) -> ProbeResult:
        job = Job(
            entry=PROBE_ENTRY,
            argument=request.to_json(),
            world_size=self.workers.workers,
            threads=self.workers.threads,
            needs=(SYMBOLIC_SHAPES,),
            at_stop="abandon",
        )
        return parse_result(ask_rank_0(pool, limit.limited(job), "probed", show))

    @property
    def _key(self) -> str:
        machines = [machine.fingerprint() for machine in self.machines]
        what = [machines, self.request.to_json(), self.workers.workers, self.workers.threads]
        return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def _path(self) -> Path:
        return self.working.cache / "probes" / f"{self._key}.json"


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
        links=(*pair_links(result.hosts, result.pairs), *result.links),
        overlaps=result.overlaps,
        complaints=find_slow_parts(result.hosts, relative_speeds(timed), result.pairs),
    )


def with_known_devices(now: Measurements, known: Sequence[MeasuredDevice]) -> Measurements | None:
    """Links as they were measured just now, and devices, in the same order, as they were measured more thoroughly
    before; None where one of them has another speed by now."""
    pairs = list(zip(known, now.devices, strict=True))
    if not all(are_close(*_common_product_seconds(one.timed, other.timed)) for one, other in pairs):
        return None
    return replace(now, devices=tuple(replace(one, host=other.host, rates=other.rates) for one, other in pairs))


def are_close(before: ReadingByName, now: ReadingByName) -> bool:
    """Whether the same things have about the same figures."""
    return before.keys() == now.keys() and all(
        1 / LARGEST_DRIFT <= now[key] / before[key] <= LARGEST_DRIFT for key in before
    )


def _send_rates(links: Sequence[MeasuredLink]) -> ReadingByName:
    """Bytes per second over each link, of a message of RECHECK_MESSAGE_BYTES or of the longest below it."""
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


def pool_measurements(measured: Measurements) -> Measurements:
    """The measurements with consistent times for equal hosts: the common time of each piece of work, times one
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
