"""What a run computes, independent of the layout and the machines; it stays the same when a run continues."""

from __future__ import annotations

from dataclasses import dataclass

from plait.model.shape import ModelShape, parameter_count
from plait.partition.execution import Precision, WorkerDevice
from plait.planner.derive.model_size import CorpusFacts, TrainingRate, assumed_rate, batch_sequences, derive_run_size
from plait.planner.derive.resources import Resources
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.units import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Model, batch, precision and budget of a run, independent of the layout and the machines."""

    budget: Amount
    shape: ModelShape
    flops: float
    """FLOPs of the whole run, about: 6 for each parameter and token."""
    batch_sequences: int
    precision: Precision


def new_job(
    config: RunConfig, corpus: CorpusFacts, resources: Resources, why: list[str], rate: TrainingRate | None = None
) -> TrainingJob:
    """What a recipe comes to on a machine, each choice with its reason; raises PlaitError for what cannot work.

    `rate` is how fast the machine trains such a job; None where no layout has been priced yet.
    """
    rate = rate or assumed_rate(resources.machine, resources.peak_flops)
    scale = derive_run_size(config, corpus, rate, why)
    return TrainingJob(
        budget=scale.budget,
        shape=scale.shape,
        flops=scale.flops,
        batch_sequences=batch_sequences(config, scale, why),
        precision=_precision(config, resources.machine.device, why),
    )


def job_of_plan(plan: Plan) -> TrainingJob:
    """What a run computes that was begun elsewhere, or with another budget, whatever would be chosen today."""
    return TrainingJob(
        budget=plan.budget,
        shape=plan.shape,
        flops=6.0 * parameter_count(plan.shape) * plan.steps * plan.batch_tokens,
        batch_sequences=plan.batch_sequences,
        precision=plan.precision,
    )


def precision_of(config: RunConfig, device: WorkerDevice) -> Precision:
    """The precision that a recipe names, else the fast one of the device. Every command uses this rule."""
    if config.train.precision != "auto":
        return config.train.precision
    return "bf16" if device == "cuda" else "float32"


def _precision(config: RunConfig, device: WorkerDevice, why: list[str]) -> Precision:
    chosen = precision_of(config, device)
    if config.train.precision == "auto":
        fast = {
            "bf16": "precision bf16 with float32 master weights: these devices' fast arithmetic",
            "float32": "precision float32: the fastest arithmetic of most processors",
        }
        why.append(fast[chosen])
    return chosen
