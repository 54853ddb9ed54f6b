"""A run's settings as flat words and numbers, for tools that list and compare runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.model.shape import parameter_count
from plait.planner.plan import Plan

_NO_SETTING = ("run.name", "report.")
"""Keys that say where a run writes, and nothing about what it computes."""


def run_settings(recipe: Mapping[str, Any], plan: Plan) -> Mapping[str, float | str | bool]:
    """A recipe's values by key, with what plait chose where they are "auto", and the plan's main figures."""
    asked = {key: value for key, value in recipe.items() if not key.startswith(_NO_SETTING)}
    known = {key: value for key, value in (asked | _chosen(plan)).items() if value is not None and value != "auto"}
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in known.items()}


def _chosen(plan: Plan) -> dict[str, Any]:
    job, optimizer, layout = plan.job, plan.job.optimizer, plan.placement.layout
    return {
        "parameters": parameter_count(job.shape),
        "steps": job.steps,
        "workers": plan.world_size,
        "devices": plan.devices,
        "model.layers": job.shape.layers,
        "model.width": job.shape.width,
        "model.heads": job.shape.heads,
        "model.vocabulary": job.shape.vocabulary,
        "train.budget": str(job.budget),
        "train.sequence": job.sequence,
        "train.batch_tokens": job.batch_tokens,
        "train.precision": plan.arithmetic.precision,
        "optimizer.kind": optimizer.kind,
        "optimizer.lr": optimizer.lr,
        "optimizer.adamw_lr": optimizer.adamw_lr,
        "optimizer.warmup_steps": optimizer.warmup_steps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.momentum": optimizer.momentum,
        "optimizer.clip": optimizer.clip,
        "optimizer.schedule": optimizer.schedule,
        **{f"layout.{axis}": degree for axis, degree in layout.degrees.items()},
        "layout.micro_sequences": plan.placement.micro_sequences,
    }
