"""The report as plain values: what `plait plan --json` writes, and what Python is given."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from plait.layout import AXES
from plait.planner.explain.choice import left_out_text
from plait.planner.explain.unequal_devices import unequal_shares_of
from plait.planner.report.report import LayoutFigures, PlanReport, expected_range_s
from plait.planner.search.model_error import expected_range

KNOBS = ("expert", "shard_what", "virtual", "recompute", "schedule")


def report_values(report: PlanReport) -> dict[str, Any]:
    """All keys of `plait plan --json`."""
    found, chosen, row = report.search, report.chosen, report.chosen.row
    axes = (*AXES, "expert") if found.workload.experts else AXES
    values = {
        "cluster": report.cluster,
        "layout": {axis: row[axis] for axis in axes},
        "shard_what": row["shard_what"],
        "virtual_stages": row["virtual"],
        "micro_sequences": chosen.micro_sequences,
        "micro_limits": chosen.micro_limits,
        "recompute": row["recompute"],
        "schedule": row["schedule"],
        "stage_layers": found.stage_layers(found.chosen) if int(row["pipeline"]) > 1 else (),
        "shares": unequal_shares_of(found, found.chosen),
        "order": found.hosts_in_rank_order,
        "n_devices": found.cluster.n_devices,
        "left_out": left_out_text(found),
        "step_s": chosen.step_s,
        "run": asdict(report.run),
        "mfu": report.mfu,
        "mfu_causal": report.mfu_causal,
        "bytes_per_device": chosen.bytes_per_device,
        "n_priced": len(found.candidates),
        "n_refused": found.n_refused,
        "refused": dict(found.refused),
        "error": found.tolerance,
        "expected_range_s": expected_range_s(found),
        "range_basis": asdict(expected_range(found.workload, found.cluster)),
        "complexity": chosen.complexity,
        "time": dict(report.time),
        "memory": dict(report.memory),
        "why": report.sentences("why", "binds", "changes", "sure"),
    }
    if found.workload.experts:
        values["experts"] = report.sentences("experts")
    values["runners_up"] = [_runner_up(one) for one in report.runners_up]
    if report.measured:
        values["measured"] = {**asdict(report.measured), "factor": report.measured.factor}
    return values


def _runner_up(one: LayoutFigures) -> dict[str, Any]:
    return {
        "layout": {axis: one.row[axis] for axis in AXES},
        **{name: one.row[name] for name in KNOBS},
        "micro_sequences": one.micro_sequences,
        "micro_limits": one.micro_limits,
        "step_s": one.step_s,
        "bytes_per_device": one.bytes_per_device,
        "complexity": one.complexity,
        "why_not": one.compared,
    }
