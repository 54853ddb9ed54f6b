"""`plait probe`: measures what this machine's devices and links do, tells it and keeps it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from plait.cluster.cluster import cluster_json, cluster_of
from plait.cluster.measured import (
    Measured,
    MeasuredLink,
    MeasuredOverlap,
    Point,
    Timed,
    measured_from_json,
    measured_json,
)
from plait.cluster.probe.request import CPU_TOKENS, Request, request_of, typical_request
from plait.cluster.probe.verdict import Host, PairTold, complaints, device_of, pair_links, relative_speeds
from plait.cluster.topology import Machine, usable_cores
from plait.commands.plan import asked_of
from plait.commands.planning.make_plan import Site, ask, look_around
from plait.commands.planning.output_files import check_output, write_output
from plait.commands.planning.workers import Crew, crew, serve_if_asked
from plait.commands.preparing.corpus import CACHE
from plait.commands.probing.table import table
from plait.errors import PlaitError
from plait.launch.values.job import Job
from plait.recipe.load import load_recipe

ENTRY = "plait.commands.probing.rank:rank"
LATELY_S = 900.0
"""What was measured, or found to hold, so short a time ago is believed without another look."""

Fresh = Literal["kept", "again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How many workers are probed, with how many threads each."""

    workers: int
    threads: int


def probe(
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    workers: int | None,
    threads: int | None,
    fresh: Fresh,
    out: Path | None,
    screen: Console,
) -> None:
    """Measure this machine for a recipe's model or for usual ones, print a table, write a cluster.json where asked.

    Raises RunFailed with the name of a dead device or link, PlaitError for what cannot be measured.
    """
    if serve_if_asked():
        return
    check_output(out)
    with crew() as hands:
        site = look_around(hands, usable_cores())
        extent = extent_for(site.machine, workers, threads, hands)
        asked = asked_for(recipe, overrides, site, extent)
        measured = measured_by(hands, [site.machine], asked, extent, fresh=fresh)
    screen.print(table(measured), markup=False, soft_wrap=True)
    if measured.noise:
        screen.print(f"unsteady {measured.noise}; close them and give plait probe --again")
    if out is not None:
        write_output(out, with_cluster(measured, site, extent))
        screen.print(f"wrote    {out}", soft_wrap=True)


def extent_for(machine: Machine, workers: int | None, threads: int | None, hands: Crew) -> Extent:
    """As many workers as asked, or one a device and, on processors, one a core; raises PlaitError for too many."""
    if hands.given is not None:
        return Extent(workers=hands.given.workers, threads=hands.given.threads)
    usual = machine.devices if machine.device == "cuda" else max(1, machine.cores // (threads or 1))
    count = workers or usual
    if machine.device == "cuda" and count > machine.devices:
        raise PlaitError(f"--workers {count} are more than this machine's {machine.devices} GPUs; choose fewer")
    if machine.device == "cpu" and count * (threads or 1) > machine.cores:
        raise PlaitError(
            f"{count} workers of {threads or 1} threads want more than this machine's {machine.cores} cores, and would "
            "only measure how they take turns; choose fewer --workers or --threads"
        )
    return Extent(workers=count, threads=threads or max(1, machine.cores // count))


def asked_for(recipe: Path | None, overrides: Sequence[str], site: Site, extent: Extent) -> Request:
    """What a recipe's model needs measured, or usual models without one."""
    device = site.machine.device
    if recipe is None:
        return typical_request(device, extent.threads)
    config = load_recipe(recipe, overrides)
    cluster = cluster_of(site.machine, site.peak_flops if device == "cpu" else None)
    asked = asked_of(config, cluster)
    sequence = asked.workload.sequence
    sequences = config.layout.micro_sequences
    if sequences == "auto":
        most = max(1, CPU_TOKENS // sequence) if device == "cpu" else asked.workload.batch_sequences
        sequences = min(most, asked.workload.batch_sequences)
    return request_of(
        asked.shape,
        sequence=sequence,
        sequences=sequences,
        device=device,
        precision="bf16" if asked.workload.precision == "bf16" else "float32",
        threads=extent.threads,
    )


def measured_by(hands: Crew, machines: Sequence[Machine], asked: Request, extent: Extent, *, fresh: Fresh) -> Measured:
    """What was measured before on these hosts with this software for the same request, or is measured now."""
    if fresh == "kept" and (known := kept_measurement(machines, asked, extent)):
        return known
    key = _key(machines, asked, extent)
    job = Job(entry=ENTRY, argument=asked.to_json(), world_size=extent.workers, threads=extent.threads)
    measured, kept = measured_of(ask(hands, job, "probed"), asked, key), _kept(key)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(measured_json(measured), encoding="utf-8")
    return measured


def kept_measurement(machines: Sequence[Machine], asked: Request, extent: Extent) -> Measured | None:
    """What was measured before on machines and software like these; None where there is nothing, or nothing usable."""
    kept = _kept(_key(machines, asked, extent))
    try:
        return measured_from_json(kept.read_text(encoding="utf-8"), str(kept)) if kept.exists() else None
    except PlaitError:
        return None  # of another version, or torn: measured anew, and written over


def seen_lately(machines: Sequence[Machine], asked: Request, extent: Extent, addresses: Sequence[str]) -> bool:
    """Whether somebody found so short a time ago that what is kept holds between these addresses, that nobody need look
    again."""
    seen = _seen(machines, asked, extent)
    if not seen.exists() or not 0 <= time.time() - seen.stat().st_mtime < LATELY_S:
        return False
    return seen.read_text(encoding="utf-8") == json.dumps(addresses)


def note_seen(machines: Sequence[Machine], asked: Request, extent: Extent, addresses: Sequence[str]) -> None:
    """Keep that what is kept was measured, or found to hold, just now."""
    _seen(machines, asked, extent).write_text(json.dumps(addresses), encoding="utf-8")


def _seen(machines: Sequence[Machine], asked: Request, extent: Extent) -> Path:
    return _kept(_key(machines, asked, extent)).with_suffix(".seen")


def sends_of(told: Mapping[str, Any]) -> tuple[MeasuredLink, ...]:
    """The messages from rank to rank among what rank 0 of a probe told."""
    hosts = [Host(name=one["name"], ranks=tuple(one["ranks"])) for one in told["hosts"]]
    return pair_links(hosts, _pairs(told))


def timed_on_hosts(told: Mapping[str, Any]) -> list[tuple[Timed, ...]]:
    """What the first rank of each host took for the pieces of arithmetic."""
    return [_timed(told["ranks"][host["ranks"][0]]["timed"]) for host in told["hosts"]]


def measured_of(told: Mapping[str, Any], asked: Request, key: str) -> Measured:
    """From what rank 0 told to the measurement."""
    hosts = [Host(name=one["name"], ranks=tuple(one["ranks"])) for one in told["hosts"]]
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
    return Measured(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        precision=asked.precision,
        workers=len(timed),
        fingerprint=key,
        devices=tuple(devices),
        links=(*pair_links(hosts, pairs), *links),
        overlaps=tuple(MeasuredOverlap(**one) for one in told["overlaps"]),
        complaints=complaints(hosts, relative_speeds(timed), pairs),
    )


def with_cluster(measured: Measured, site: Site, extent: Extent) -> str:
    """The text of a cluster.json: this machine, with what was measured under "measured"."""
    machine = site.machine
    if machine.device == "cpu":
        cluster = cluster_of(machine, site.peak_flops, workers=extent.workers)
    else:
        cluster = cluster_of(replace(machine, devices=extent.workers))
    return cluster_json(replace(cluster, measured=measured))


def _key(machines: Sequence[Machine], asked: Request, extent: Extent) -> str:
    what = [[machine.fingerprint() for machine in machines], asked.to_json(), extent.workers, extent.threads]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _kept(key: str) -> Path:
    return CACHE / "probes" / f"{key}.json"


def _pairs(told: Mapping[str, Any]) -> list[PairTold]:
    return [PairTold(first=p["first"], second=p["second"], points=_points(p["points"])) for p in told["pairs"]]


def _points(values: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    return tuple(Point(**one) for one in values)


def _timed(values: Sequence[Mapping[str, Any]]) -> tuple[Timed, ...]:
    return tuple(Timed(**{**one, "sizes": tuple(one["sizes"])}) for one in values)


def _link(values: Mapping[str, Any]) -> MeasuredLink:
    return MeasuredLink(**{**values, "hosts": tuple(values["hosts"]), "points": _points(values["points"])})
