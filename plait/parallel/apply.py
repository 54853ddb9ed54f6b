"""Parallelizes a model: tensor, pipeline and the other parallelisms, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from plait.model.gpt import GPT
from plait.parallel.compile import compile_layers
from plait.parallel.context.attention import context
from plait.parallel.expert import hold_experts
from plait.parallel.frozen import quantize_frozen, round_frozen
from plait.parallel.materialize import materialize
from plait.parallel.pipeline import keep_at_one_end, pipeline
from plait.parallel.recompute import recompute
from plait.parallel.replicate import replicate
from plait.parallel.sharded_model import ShardedModel, unsharded
from plait.parallel.sharding import shard
from plait.parallel.tensor import tensor
from plait.partition.execution import Execution


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStage:
    """A step in parallelizing a model, the mesh axis that it works along, and the reason for its place in STAGES."""

    axis: str
    apply: Callable[[ShardedModel, DeviceMesh, Execution], ShardedModel]
    reason: str


STAGES: tuple[ParallelStage, ...] = (
    ParallelStage(axis="pipeline", apply=pipeline, reason="first: drops the layers of other ranks before work on them"),
    ParallelStage(axis="", apply=hold_experts, reason="drops the experts of other ranks, before others are cut"),
    ParallelStage(
        axis="tensor", apply=tensor, reason="cuts the weights that are left, before another stage reads their sizes"
    ),
    ParallelStage(axis="context", apply=context, reason="replaces attention's core, whatever heads are left to it"),
    ParallelStage(axis="", apply=recompute, reason="wraps layers with all communication that they repeat"),
    ParallelStage(axis="", apply=compile_layers, reason="sees the layers' final code"),
    ParallelStage(axis="", apply=quantize_frozen, reason="keeps the blocks of the part that the other axes leave"),
    ParallelStage(axis="", apply=round_frozen, reason="before parameters are split: their dtypes are fixed there"),
    ParallelStage(axis="shard", apply=shard, reason="splits parameters before they take memory"),
    ParallelStage(axis="", apply=materialize, reason="real memory for what this rank holds, and no more"),
    ParallelStage(axis="", apply=keep_at_one_end, reason="says which sums are not needed, before `replicate` runs"),
    ParallelStage(
        axis="replicate",
        apply=replicate,
        reason="last: its buckets hold what all other parallelisms leave",
    ),
)


def parallelize(
    model: GPT, mesh: DeviceMesh | None, execution: Execution, stages: Sequence[ParallelStage] = STAGES
) -> ShardedModel:
    """Apply the stages in order; without stages the model stays one process' own. Every rank must call it."""
    sharded = unsharded(model)
    for stage in stages:
        assert mesh is not None, "a stage needs a mesh"
        sharded = stage.apply(sharded, mesh, execution)
    return sharded
