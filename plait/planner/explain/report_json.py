"""The planner's report as plain values: what `plait plan --json` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.layout import AXES
from plait.planner.explain.compared_layouts import why_not
from plait.planner.explain.left_out import left_out_text
from plait.planner.explain.report import PlanSection, runners_up
from plait.planner.explain.unequal_devices import micro_sequences_values, unequal_shares_of
from plait.planner.search.cost_breakdown import memory_items, model_flops_utilisation, time_items
from plait.planner.search.found import Search


def plan_json(found: Search, sections: Sequence[PlanSection], top: int) -> dict[str, Any]:
    """The answer as plain values, for plan's --json."""
    row, (full, causal) = found.candidates.row(found.chosen), model_flops_utilisation(found, found.chosen)
    axes = (*AXES, "expert") if found.workload.experts else AXES
    said = {section.title: section.lines for section in sections}
    return {
        "cluster": found.cluster.name,
        "layout": {axis: row[axis] for axis in axes},
        "shard_what": row["shard_what"],
        "virtual_stages": row["virtual"],
        **micro_sequences_values(found, found.chosen),
        "recompute": row["recompute"],
        "schedule": row["schedule"],
        "stage_layers": found.stage_layers(found.chosen) if int(row["pipeline"]) > 1 else (),
        "shares": unequal_shares_of(found, found.chosen),
        "order": found.hosts_in_rank_order,
        "n_devices": found.cluster.n_devices,
        "left_out": left_out_text(found),
        "step_s": float(found.step_s[found.chosen]),
        "mfu": full,
        "mfu_causal": causal,
        "bytes_per_device": found.bytes_per_device(found.chosen),
        "n_priced": len(found.candidates),
        "n_refused": found.n_refused,
        "refused": dict(found.refused),
        "error": found.tolerance,
        "complexity": int(found.complexity[found.chosen]),
        "time": time_items(found, found.chosen),
        "memory": memory_items(found, found.chosen),
        "why": [line.removeprefix("· ") for title in ("why", "binds", "changes", "sure") for line in said[title]],
        **({"experts": [line.removeprefix("· ") for line in said["experts"]]} if "experts" in said else {}),
        "runners_up": [_runner(found, index) for index in runners_up(found, top)],
    }


def _runner(found: Search, index: int) -> dict[str, Any]:
    row = found.candidates.row(index)
    return {
        "layout": {axis: row[axis] for axis in AXES},
        **{name: row[name] for name in ("expert", "shard_what", "virtual", "recompute", "schedule")},
        **micro_sequences_values(found, index),
        "step_s": float(found.step_s[index]),
        "bytes_per_device": found.bytes_per_device(index),
        "complexity": int(found.complexity[index]),
        "why_not": why_not(found, index),
    }
