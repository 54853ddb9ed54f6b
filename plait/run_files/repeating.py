"""The values that a recipe leaves to plait, as one run had them: settings with which the recipe repeats that run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.model.shape import ModelShape
from plait.model.sizes import MODEL_SIZES, named_shape
from plait.planner.plan import Plan


def settings_to_repeat(recipe: Mapping[str, Any], plan: Plan) -> tuple[str, ...]:
    """KEY=VALUE arguments for `plait train`, from a recipe's values and the plan made from it: lengths, sizes and rates
    that another machine or budget might change if the recipe leaves them open."""
    job, optimizer = plan.job, plan.job.optimizer
    is_open = recipe["model.size"] == "auto" and not job.base
    sized = all(recipe[key] == "auto" for key in ("model.layers", "model.width", "model.heads"))
    settings: dict[str, object] = {
        **(_model_settings(job.shape, _named_size(job.shape) if sized else "") if is_open else {}),
        "train.budget": f"{job.steps} steps",
        "train.sequence": job.sequence,
        "train.batch_tokens": job.batch_tokens,
        "train.precision": plan.arithmetic.precision,
        "optimizer.lr": optimizer.lr,
        "optimizer.adamw_lr": optimizer.adamw_lr,
        "optimizer.warmup_steps": optimizer.warmup_steps,
        "optimizer.weight_decay": optimizer.weight_decay,
    }
    return tuple(f"{key}={value}" for key, value in settings.items() if value is not None)


def _model_settings(shape: ModelShape, size: str) -> dict[str, object]:
    if size:
        return {"model.size": size}
    return {"model.layers": shape.layers, "model.width": shape.width, "model.heads": shape.heads}


def _named_size(shape: ModelShape) -> str:
    """The name of the size with these layers and widths; empty if there is none."""
    for name in MODEL_SIZES:
        other = named_shape(name, vocabulary=shape.vocabulary, sequence=shape.sequence)
        if all(getattr(other, key) == getattr(shape, key) for key in ("layers", "width", "heads", "kv_heads", "ffn")):
            return name
    return ""
