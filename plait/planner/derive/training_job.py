"""What a run computes: the same whoever does it, and the same for a run that goes on."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.topology import Machine
from plait.model.shape import ModelShape, parameter_count
from plait.partition.execution import Precision
from plait.planner.derive.model_size import CorpusFacts, batch_sequences, size_up
from plait.planner.derive.resources import Grounds
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.units import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run computes, whoever does it."""

    budget: Amount
    shape: ModelShape
    flops: float
    """Of the whole run, about."""
    batch_sequences: int
    precision: Precision


def new_work(config: RunConfig, corpus: CorpusFacts, grounds: Grounds, why: list[str]) -> Work:
    """What a recipe comes to on a machine, each choice with its reason; raises PlaitError for what cannot work."""
    scale = size_up(config, corpus, grounds.machine, grounds.peak_flops, why)
    return Work(
        budget=scale.budget,
        shape=scale.shape,
        flops=scale.flops,
        batch_sequences=batch_sequences(config, scale, why),
        precision=_precision(config, grounds.machine, why),
    )


def begun_work(plan: Plan) -> Work:
    """What a run computes that was begun elsewhere, or with another budget, whatever would be chosen today."""
    return Work(
        budget=plan.budget,
        shape=plan.shape,
        flops=6.0 * parameter_count(plan.shape) * plan.steps * plan.batch_tokens,
        batch_sequences=plan.batch_sequences,
        precision=plan.precision,
    )


def _precision(config: RunConfig, machine: Machine, why: list[str]) -> Precision:
    asked = config.train.precision
    if asked != "auto":
        return asked
    if machine.device == "cuda":
        why.append("precision bf16 with float32 master weights: the GPUs' fast arithmetic")
        return "bf16"
    why.append("precision float32: the fastest arithmetic of most processors")
    return "float32"
