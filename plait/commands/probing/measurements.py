"""Measurements of devices and links: made now, or loaded from an earlier probe."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Literal

from plait.cluster.measured import (
    MeasuredLink,
    Measurements,
    WorkTiming,
    measurements_from_json,
    measurements_json,
)
from plait.cluster.probe.request import ProbeRequest
from plait.cluster.probe.verdict import (
    find_slow_parts,
    measured_device,
    pair_links,
    relative_speeds,
)
from plait.cluster.topology import Machine
from plait.commands.planning.measuring import ask_rank_0
from plait.commands.planning.workers import PROBE_ENTRY, SYMBOLIC_SHAPES, WorkerPool
from plait.commands.probing.result import ProbeResult, parse_result, require_all_work
from plait.errors import PlaitError
from plait.launch.values.job import Job
from plait.private_folder import make_private_folder
from plait.regular_file import read_regular_file
from plait.screen.screen import ShowProgress, ignore_progress
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
