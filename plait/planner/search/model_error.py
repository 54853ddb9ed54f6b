"""How far off the planner's model has been on published runs, by the kind of work: what it says of itself."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
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
    """What published runs say of forecasts of a family."""
    return _known("time")[family]


def memory_error(workload: Workload, cluster: Cluster) -> float:
    """What memory may come to exceed its forecast by, which chosen layouts leave free: the median error of readings of
    such runs, the allocator's reserve already counted."""
    return _known("memory")[run_family(workload, cluster)].median


def stated_error(workload: Workload, cluster: Cluster) -> float:
    """What layouts may differ by and count as equally fast.

    The model's own error, which half of the runs like this one were closer than; where the machines were measured less.
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
