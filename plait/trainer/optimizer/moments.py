"""The optimizer's state as a checkpoint names it; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plait.model.names import is_hidden_matrix
from plait.planner.plan import OptimizerPlan


def moment_names(plan: OptimizerPlan, name: str) -> Mapping[str, str]:
    """The names of a weight's moments in a checkpoint, each with its name in torch's optimizer."""
    if plan.kind == "muon" and is_hidden_matrix(name):
        return {"muon_momentum": "momentum_buffer"}
    if plan.kind != "sgd":
        return {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}
    return {"sgd_momentum": "momentum_buffer"} if plan.moments else {}


def all_moment_names(plan: OptimizerPlan, names: Iterable[str]) -> set[str]:
    """The names in a checkpoint of all moments that these weights have."""
    return {kind for name in names for kind in moment_names(plan, name)}


def counts_updates(plan: OptimizerPlan) -> bool:
    """Whether the optimizer counts its updates: AdamW does, also as part of Muon."""
    return plan.kind != "sgd"
