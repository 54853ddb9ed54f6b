"""Measurements made up by hand, with rates that a test can compute."""

from __future__ import annotations

from plait.machines.measured import (
    WORK_SIZES,
    CommOperation,
    LinkScope,
    MeasuredDevice,
    MeasuredLink,
    MeasuredOverlap,
    Measurements,
    MessageTiming,
    WorkKind,
    WorkTiming,
)


def timed(work: WorkKind, sizes: tuple[int, ...], seconds: float) -> WorkTiming:
    return WorkTiming(work=work, sizes=sizes, seconds=seconds, spread=0.1)


def device(*timings: WorkTiming, host: str = "a", rates: tuple[float, ...] = (1.0, 0.9)) -> MeasuredDevice:
    """A device that took these times, and a microsecond for each other kind of work."""
    done = {one.work for one in timings}
    rest = [timed(work, (4,) * len(names), 1e-6) for work, names in WORK_SIZES.items() if work not in done]
    return MeasuredDevice(
        host=host,
        name="a processor",
        workers=2,
        threads=1,
        memory_bytes=2**34,
        timed=(*timings, *rest),
        beside={"product": 1.25},
        granted=1.0,
        rates=rates,
    )


def point(size: int, seconds: float) -> MessageTiming:
    return MessageTiming(bytes=size, seconds=seconds, spread=0.1, cpu_s=seconds / 2)


def link(kind: CommOperation, *points: MessageTiming, scope: LinkScope = "inside", ranks: int = 2) -> MeasuredLink:
    hosts = ("a",) if scope == "inside" else ("a", "b")
    return MeasuredLink(kind=kind, scope=scope, hosts=hosts, ranks=ranks, points=points)


def measured(*links: MeasuredLink, devices: tuple[MeasuredDevice, ...] = ()) -> Measurements:
    overlap = MeasuredOverlap(scope="inside", ranks=2, bytes=2**23, compute_s=0.06, communicate_s=0.05, both_s=0.08)
    return Measurements(
        date="2026-11-21 12:00",
        precision="float32",
        workers=2,
        fingerprint="f",
        devices=devices or (device(),),
        links=links or (link("all_reduce", point(1024, 1e-4), point(2**20, 1e-3)),),
        overlaps=(overlap,),
        complaints=(),
    )
