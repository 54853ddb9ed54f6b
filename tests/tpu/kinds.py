"""Runs of every kind of layer, each in miniature, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from plait.data.preparation.synthetic import write_synthetic
from plait.data.samples.opening import all_pairs
from plait.model.adapter_shape import AdapterShape
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape, linear_layers
from plait.parallel.communicator import ONE_PROCESS
from plait.partition.execution import Precision
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.state import TrainState
from tests.trainer.tiny import make_tiny

Change = Callable[[ModelShape], ModelShape]
KINDS: dict[str, Change] = {
    "dense": lambda shape: replace(shape, windows=(4, 0)),
    "GPT-2's": lambda shape: replace(
        shape, norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True
    ),
    "experts": lambda shape: replace(
        shape,
        mixture=MixtureShape(
            experts=4,
            experts_per_token=2,
            expert_ffn=32,
            shared_experts=1,
            balance=("bias", "sequence"),
            balance_weights=(0.01,),
        ),
    ),
    "experts with a capacity": lambda shape: replace(
        shape, mixture=MixtureShape(experts=4, experts_per_token=2, expert_ffn=32, capacity=1.0)
    ),
    "latent attention": lambda shape: replace(
        shape,
        kv_heads=shape.heads,
        latent=LatentAttentionShape(key_value_rank=16, query_rank=24, rope_width=4, value_width=8),
    ),
    "gpt-oss's": lambda shape: replace(
        shape,
        windows=(4, 0),
        bias="attention",
        attention_sinks=True,
        activation="clamped swiglu",
        mixture=MixtureShape(
            experts=4, experts_per_token=2, expert_ffn=32, bias=True, balance=("sequence",), balance_weights=(0.01,)
        ),
    ),
    "Gemma 2's": lambda shape: replace(
        shape,
        windows=(4, 0),
        norm_places="both",
        norm_weight="one plus",
        activation="geglu",
        attention_cap=0.4,
        logit_cap=0.8,
        tied=True,
    ),
    "DeepSeek-V2's": lambda shape: replace(
        shape,
        kv_heads=shape.heads,
        latent=LatentAttentionShape(key_value_rank=16, rope_width=4, value_width=8),
        mixture=MixtureShape(
            experts=4,
            experts_per_token=2,
            expert_ffn=32,
            shared_experts=1,
            dense_layers=1,
            groups=2,
            groups_chosen=1,
            group_score="best",
            normalize=False,
            balance=("sequence",),
            balance_weights=(0.01,),
        ),
    ),
    "LoRA": lambda shape: replace(shape, adapter=AdapterShape(rank=4, alpha=8.0, targets=linear_layers(shape))),
    "DPO": lambda shape: shape,
}
RECIPE = ("model.width=32", "model.heads=4", "model.vocabulary=300", "layout.replicate=1", "optimizer.lr=0.003")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsTaken:
    """What some steps came to."""

    gradients: dict[str, Tensor]
    """Of the first step's micro-batches, before the update."""
    losses: list[float]
    norms: list[float]
    compilations: list[int]
    """Programs compiled so far, after each step."""


def assembled(kind: str, folder: Path, device: str, precision: Precision, *keys: str) -> Assembly:
    """A run of this kind as one plain process."""
    folder.mkdir(parents=True, exist_ok=True)
    config, plan = make_tiny(folder, *RECIPE, *keys, device=device, precision=precision)
    job = replace(plan.job, shape=KINDS[kind](plan.job.shape))
    if kind == "DPO":
        (folder / "pairs").mkdir(exist_ok=True)
        prepared = write_synthetic(
            folder / "pairs", vocabulary=job.shape.vocabulary, sequence=job.sequence, seed=5, layout="pairs"
        )
        config = config.model_copy(update={"finetune": config.finetune.model_copy(update={"objective": "dpo"})})
        job = replace(job, corpus=str(prepared))
    assembly = assemble(config, replace(plan, job=job), sums=ONE_PROCESS, stages=())
    if assembly.pairs is not None:
        generator = torch.Generator().manual_seed(3)
        table = -20 * torch.rand(all_pairs(assembly.corpus), 2, dtype=torch.float64, generator=generator)
        assembly.pairs.set_reference(table.to(assembly.device))
    return assembly


def take_steps(
    kind: str,
    folder: Path,
    device: str,
    precision: Precision,
    *,
    count: int = 4,
    compilations: Callable[[], int] = lambda: 0,
) -> StepsTaken:
    """The gradients of a run's first step, and its first steps."""
    assembly = assembled(kind, folder, device, precision)
    try:
        assembly.run_micros(assembly.loader.micros(0))
        gradients = {
            unit.parts[0].name: unit.parameter.grad.cpu().clone()
            for unit in assembly.model.units
            if unit.parameter.grad is not None
        }
        state, losses, norms, compiled = TrainState(), list[float](), list[float](), list[int]()
        for _ in range(count):
            state, scalars = assembly.step(state)
            losses.append(float(scalars.totals[0] / scalars.totals[1]))
            norms.append(float(scalars.norm))
            compiled.append(compilations())
        return StepsTaken(gradients=gradients, losses=losses, norms=norms, compilations=compiled)
    finally:
        assembly.loader.close()
