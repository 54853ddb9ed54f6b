"""Measurements of devices and links: made now, or loaded from an earlier probe."""

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
    MessageTiming,
    WorkTiming,
    measurements_from_json,
    measurements_json,
)
from plait.cluster.probe.request import ProbeRequest
from plait.cluster.probe.verdict import (
    PairTiming,
    ProbedHost,
    find_slow_parts,
    measured_device,
    pair_links,
    relative_speeds,
)
from plait.cluster.topology import Machine
from plait.commands.planning.make_plan import ask_rank_0
from plait.commands.planning.workers import PROBE_ENTRY, WorkerPool
from plait.errors import PlaitError
from plait.launch.values.job import Job
from plait.private_folder import make_private_folder
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
) -> Measurements:
    """Load the measurements of these hosts with this software for the same request, or make them now."""
    working = pool.working_folder
    if fresh == "kept" and (known := load_measurements(machines, request, probe_workers, working)):
        return known
    key = _measurements_key(machines, request, probe_workers)
    job = Job(
        entry=PROBE_ENTRY, argument=request.to_json(), world_size=probe_workers.workers, threads=probe_workers.threads
    )
    measured, kept = measurements_from(ask_rank_0(pool, job, "probed"), request, key), _measurements_path(key, working)
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
        return measurements_from_json(kept.read_text(encoding="utf-8"), str(kept)) if kept.exists() else None
    except PlaitError:
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
    return seen.read_text(encoding="utf-8") == json.dumps(addresses)


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


def send_links_of(probe_result: Mapping[str, Any]) -> tuple[MeasuredLink, ...]:
    """The point-to-point links in the result that rank 0 of a probe sent."""
    hosts = [ProbedHost(name=one["name"], ranks=tuple(one["ranks"])) for one in probe_result["hosts"]]
    return pair_links(hosts, _pair_readings(probe_result))


def timed_work_by_host(probe_result: Mapping[str, Any]) -> list[tuple[WorkTiming, ...]]:
    """The timed pieces of arithmetic of each host's first rank."""
    return [_timed_from(probe_result["ranks"][host["ranks"][0]]["timed"]) for host in probe_result["hosts"]]


def measurements_from(probe_result: Mapping[str, Any], request: ProbeRequest, key: str) -> Measurements:
    """Measurements from the result that rank 0 of a probe sent."""
    hosts = [ProbedHost(name=one["name"], ranks=tuple(one["ranks"])) for one in probe_result["hosts"]]
    pairs = _pair_readings(probe_result)
    timed = {rank: _timed_from(one["timed"]) for rank, one in enumerate(probe_result["ranks"])}
    devices = []
    for host in hosts:
        first = probe_result["ranks"][host.ranks[0]]
        device = measured_device(
            host,
            first["name"],
            timed,
            _timed_from(first["alone"]),
            granted=min(probe_result["ranks"][rank]["granted"] for rank in host.ranks),
            threads=first["threads"],
            memory_bytes=first["memory_bytes"],
        )
        devices.append(device)
    links = [_link_from(one) for one in probe_result["links"]]
    return Measurements(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        precision=request.precision,
        workers=len(timed),
        fingerprint=key,
        devices=tuple(devices),
        links=(*pair_links(hosts, pairs), *links),
        overlaps=tuple(MeasuredOverlap(**one) for one in probe_result["overlaps"]),
        complaints=find_slow_parts(hosts, relative_speeds(timed), pairs),
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


def _pair_readings(probe_result: Mapping[str, Any]) -> list[PairTiming]:
    return [
        PairTiming(first=p["first"], second=p["second"], points=_points_from(p["points"]))
        for p in probe_result["pairs"]
    ]


def _points_from(values: Sequence[Mapping[str, Any]]) -> tuple[MessageTiming, ...]:
    return tuple(MessageTiming(**one) for one in values)


def _timed_from(values: Sequence[Mapping[str, Any]]) -> tuple[WorkTiming, ...]:
    return tuple(WorkTiming(**{**one, "sizes": tuple(one["sizes"])}) for one in values)


def _link_from(values: Mapping[str, Any]) -> MeasuredLink:
    return MeasuredLink(**{**values, "hosts": tuple(values["hosts"]), "points": _points_from(values["points"])})
