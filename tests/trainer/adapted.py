"""A tiny run that trains an adapter beside a model that transformers made and saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from plait.interop.base_fingerprint import base_fingerprint
from plait.interop.base_model import read_base_model
from plait.interop.config_out import config_of_shape
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import linear_layers
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from tests.interop.random_models import random_model
from tests.trainer.tiny import make_tiny, put

RANK = 4


def make_adapted(folder: Path, *overrides: str, **planned: Any) -> tuple[RunConfig, Plan, PreTrainedModel]:
    """The recipe and plan of `make_tiny` with an adapter beside every linear layer of a random model, and that model;
    `adapter=None` among the plan's fields trains all of it instead."""
    adapter = planned.pop("adapter", "all")
    config, plan = make_tiny(folder, *overrides, **planned)
    model = random_model(AutoConfig.for_model(**config_of_shape(plan.job.shape, "float32")))
    model.save_pretrained(folder / "base")
    base = read_base_model(folder / "base")
    shape = base.shape_for(plan.job.sequence)
    if adapter is not None:
        shape = replace(shape, adapter=AdapterShape(rank=RANK, alpha=8.0, targets=linear_layers(shape)))
    plan = replace(
        plan, job=replace(plan.job, shape=shape, base=str(folder / "base"), base_fingerprint=base_fingerprint(base))
    )
    put(folder, config, plan)
    return config, plan, model
