"""A checkpoint's model, and whether it matches a plan's; no torch."""

from __future__ import annotations

from plait.checkpoint.fitting import check_model, check_weights
from plait.checkpoint.manifest import Manifest
from plait.model.shape import weight_sizes
from plait.model.weights import kept_values, trained_weights
from plait.planner.plan import Plan
from plait.trainer.optimizer.moments import moment_names


def described_model(plan: Plan) -> dict[str, object]:
    """A checkpoint's model: the shape and, if it contains only an adapter, the base model."""
    base = {"base": plan.job.base_fingerprint} if plan.job.base and plan.job.shape.adapter else {}
    return {**plan.job.shape.to_dict(), **base}


def needed_tensors(plan: Plan) -> list[str]:
    """The names of the weights that learn, of their moments and of the kept values: no checkpoint may lack one."""
    shape = plan.job.shape
    names = [(name, ("model", *moment_names(plan.job.optimizer, name))) for name in trained_weights(shape)]
    return [*(f"{kind}/{name}" for name, kinds in names for kind in kinds), *(f"model/{n}" for n in kept_values(shape))]


def check_fits(manifest: Manifest, plan: Plan) -> None:
    """Raise PlaitError unless a checkpoint is of the plan's model and has each weight that learns in its whole size: to
    be asked before anybody takes memory for them."""
    check_model(manifest, described_model(plan))
    sizes = weight_sizes(plan.job.shape)
    kept = {name: plan.job.shape.sizes_of(name) for name in kept_values(plan.job.shape)}
    check_weights(manifest, {**{name: sizes[name] for name in trained_weights(plan.job.shape)}, **kept})
