"""What devices and links were measured to do: measured now, or kept from before."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from plait.cluster.measured import (
    MeasuredLink,
    MeasuredOverlap,
    Measurements,
    Point,
    Timed,
    measured_from_json,
    measured_json,
)
from plait.cluster.probe.request import ProbeRequest
from plait.cluster.probe.verdict import PairReading, ProbedHost, complaints, device_of, pair_links, relative_speeds
from plait.cluster.topology import Machine
from plait.commands.planning.make_plan import ask_rank_0
from plait.commands.planning.workers import WorkerPool
from plait.commands.preparing.corpus import CACHE
from plait.errors import PlaitError
from plait.launch.values.job import Job

PROBE_ENTRY = "plait.commands.probing.rank:rank"
LATELY_S = 900.0
"""What was measured, or found to hold, so short a time ago is believed without another look."""

Fresh = Literal["kept", "again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExtent:
    """How many workers are probed, with how many threads each."""

    workers: int
    threads: int


def measure_or_load(
    hands: WorkerPool, machines: Sequence[Machine], asked: ProbeRequest, extent: WorkerExtent, *, fresh: Fresh
) -> Measurements:
    """What was measured before on these hosts with this software for the same request, or is measured now."""
    if fresh == "kept" and (known := kept_measurement(machines, asked, extent)):
        return known
    key = _key(machines, asked, extent)
    job = Job(entry=PROBE_ENTRY, argument=asked.to_json(), world_size=extent.workers, threads=extent.threads)
    measured, kept = measured_of(ask_rank_0(hands, job, "probed"), asked, key), _kept(key)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(measured_json(measured), encoding="utf-8")
    return measured


def kept_measurement(machines: Sequence[Machine], asked: ProbeRequest, extent: WorkerExtent) -> Measurements | None:
    """What was measured before on machines and software like these; None where there is nothing, or nothing usable."""
    kept = _kept(_key(machines, asked, extent))
    try:
        return measured_from_json(kept.read_text(encoding="utf-8"), str(kept)) if kept.exists() else None
    except PlaitError:
        return None  # of another version, or torn: measured anew, and written over


def checked_lately(
    machines: Sequence[Machine], asked: ProbeRequest, extent: WorkerExtent, addresses: Sequence[str]
) -> bool:
    """Whether somebody found so short a time ago that what is kept holds between these addresses, that nobody need look
    again."""
    seen = _seen(machines, asked, extent)
    if not seen.exists() or not 0 <= time.time() - seen.stat().st_mtime < LATELY_S:
        return False
    return seen.read_text(encoding="utf-8") == json.dumps(addresses)


def note_checked(
    machines: Sequence[Machine], asked: ProbeRequest, extent: WorkerExtent, addresses: Sequence[str]
) -> None:
    """Keep that what is kept was measured, or found to hold, just now."""
    _seen(machines, asked, extent).write_text(json.dumps(addresses), encoding="utf-8")


def _seen(machines: Sequence[Machine], asked: ProbeRequest, extent: WorkerExtent) -> Path:
    return _kept(_key(machines, asked, extent)).with_suffix(".seen")


def sends_of(told: Mapping[str, Any]) -> tuple[MeasuredLink, ...]:
    """The messages from rank to rank among what rank 0 of a probe told."""
    hosts = [ProbedHost(name=one["name"], ranks=tuple(one["ranks"])) for one in told["hosts"]]
    return pair_links(hosts, _pairs(told))


def timed_on_hosts(told: Mapping[str, Any]) -> list[tuple[Timed, ...]]:
    """What the first rank of each host took for the pieces of arithmetic."""
    return [_timed(told["ranks"][host["ranks"][0]]["timed"]) for host in told["hosts"]]


def measured_of(told: Mapping[str, Any], asked: ProbeRequest, key: str) -> Measurements:
    """From what rank 0 told to the measurement."""
    hosts = [ProbedHost(name=one["name"], ranks=tuple(one["ranks"])) for one in told["hosts"]]
    pairs = _pairs(told)
    timed = {rank: _timed(one["timed"]) for rank, one in enumerate(told["ranks"])}
    devices = []
    for host in hosts:
        first = told["ranks"][host.ranks[0]]
        device = device_of(
            host,
            first["name"],
            timed,
            _timed(first["alone"]),
            granted=min(told["ranks"][rank]["granted"] for rank in host.ranks),
            threads=first["threads"],
            memory_bytes=first["memory_bytes"],
        )
        devices.append(device)
    links = [_link(one) for one in told["links"]]
    return Measurements(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        precision=asked.precision,
        workers=len(timed),
        fingerprint=key,
        devices=tuple(devices),
        links=(*pair_links(hosts, pairs), *links),
        overlaps=tuple(MeasuredOverlap(**one) for one in told["overlaps"]),
        complaints=complaints(hosts, relative_speeds(timed), pairs),
    )


def _key(machines: Sequence[Machine], asked: ProbeRequest, extent: WorkerExtent) -> str:
    what = [[machine.fingerprint() for machine in machines], asked.to_json(), extent.workers, extent.threads]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _kept(key: str) -> Path:
    return CACHE / "probes" / f"{key}.json"


def _pairs(told: Mapping[str, Any]) -> list[PairReading]:
    return [PairReading(first=p["first"], second=p["second"], points=_points(p["points"])) for p in told["pairs"]]


def _points(values: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    return tuple(Point(**one) for one in values)


def _timed(values: Sequence[Mapping[str, Any]]) -> tuple[Timed, ...]:
    return tuple(Timed(**{**one, "sizes": tuple(one["sizes"])}) for one in values)


def _link(values: Mapping[str, Any]) -> MeasuredLink:
    return MeasuredLink(**{**values, "hosts": tuple(values["hosts"]), "points": _points(values["points"])})
