"""How far off the planner's model has been on published runs, by the kind of work: what it says of itself."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from plait.machines.cluster import Cluster
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_time import was_measured

RunFamily = Literal["dense-gpu", "moe", "tpu", "cpu"]
"""Dense models on GPUs, models with experts on GPUs, anything on TPUs, anything where a processor takes part."""
MEASURED_ERROR = 0.05
"""Tolerance between layouts on machines that were measured: a chosen value, not a fitted one."""
FAMILIES: tuple[RunFamily, ...] = get_args(RunFamily)
ERRORS_FILE = Path(__file__).parents[1] / "calibration" / "errors.toml"
"""Written by `python -m benchmarks.published --errors`, so that the figures are the scorer's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedErrors:
    """The errors of one family's published runs: |forecast / measured - 1|, no scalar fitted to their sources."""

    rows: int
    """Runs that were priced; 0 where none is published, and the errors are the worst of the other families."""
    median: float
    p90: float


def run_family(workload: Workload, cluster: Cluster) -> RunFamily:
    """The family of published runs that a forecast is like."""
    kinds = {island.device.kind for island in cluster.islands}
    if "cpu" in kinds:
        return "cpu"
    if "tpu" in kinds:
        return "tpu"
    return "moe" if workload.experts else "dense-gpu"


def published_errors(family: RunFamily) -> PublishedErrors:
    """Errors of forecasts for a family, from published runs."""
    return _known("time")[family]


def memory_error(workload: Workload, cluster: Cluster) -> float:
    """What memory may come to exceed its forecast by, which chosen layouts leave free: the median error of readings of
    such runs, the allocator's reserve already counted."""
    return _known("memory")[run_family(workload, cluster)].median


RangeKind = Literal["measured", "one card", "dense-gpu", "moe", "tpu", "cpu"]
"""Runs on machines that were measured; runs of plait on one card of a kind that it has run on; published runs of a
family."""
ASSUMED_RATE_DOUBT = 1.25
"""By how much a range is wider on each side where the rate of a device's products is assumed: among cards of one kind
the measured shares differ by as much (machines/catalog.toml)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRange:
    """The multiples of their forecasts between which nine of ten runs of a kind were; none of them had a constant
    fitted to it but those on one card."""

    low: float
    high: float
    kind: RangeKind
    rows: int
    """Runs of this kind; 0 where there are none, and the range holds those of all families."""
    assumed: tuple[str, ...] = ()
    """Devices whose rate is assumed, for which the range is wider."""


def expected_range(workload: Workload, cluster: Cluster) -> ExpectedRange:
    """The expected range of a step's time, as multiples of its forecast."""
    devices = [island.device for island in cluster.islands]
    kind: RangeKind = run_family(workload, cluster)
    if was_measured(workload, cluster):
        kind = "measured"
    elif cluster.n_devices == 1 and devices[0].clock_in_steps == "kept" and not workload.experts:
        kind = "one card"
    known = _ranges()
    found = known.get(kind)
    if found is None:
        low, high = min(one.low for one in known.values()), max(one.high for one in known.values())
        found = ExpectedRange(low=low, high=high, kind=kind, rows=0)
    guessed = {one.name for one in devices if one.achievable is None or one.achievable_of}
    if kind == "measured" or not guessed:
        return found
    low, high = found.low / ASSUMED_RATE_DOUBT, found.high * ASSUMED_RATE_DOUBT
    return replace(found, low=low, high=high, assumed=tuple(sorted(guessed)))


@cache
def _ranges() -> dict[RangeKind, ExpectedRange]:
    tables = tomllib.loads(ERRORS_FILE.read_text(encoding="utf-8"))["range"]
    kinds: tuple[RangeKind, ...] = get_args(RangeKind)
    found = [ExpectedRange(kind=kind, **tables[kind]) for kind in kinds if kind in tables]
    return {one.kind: replace(one, low=min(one.low, 1.0), high=max(one.high, 1.0)) for one in found}


def stated_error(workload: Workload, cluster: Cluster) -> float:
    """The difference up to which layouts count as equally fast.

    It is the model's own error, the median for runs like this one; less if the machines were measured.
    """
    if was_measured(workload, cluster):
        return MEASURED_ERROR
    return published_errors(run_family(workload, cluster)).median


@cache
def _known(what: Literal["time", "memory"]) -> dict[RunFamily, PublishedErrors]:
    tables = tomllib.loads(ERRORS_FILE.read_text(encoding="utf-8"))
    errors = {family: tables[family]["memory"] if what == "memory" else tables[family] for family in FAMILIES}
    known = {
        family: PublishedErrors(**{name: each[name] for name in ("rows", "median", "p90")})
        for family, each in errors.items()
        if each["rows"]
    }
    worst = PublishedErrors(
        rows=0, median=max(e.median for e in known.values()), p90=max(e.p90 for e in known.values())
    )
    return {family: known.get(family, worst) for family in FAMILIES}
