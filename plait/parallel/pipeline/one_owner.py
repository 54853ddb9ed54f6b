"""The stage that leaves a tied embedding to one end of the pipeline; what travels instead is in tied_embedding.py."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from plait.model.weights import is_trained
from plait.parallel.gradients.shared_weights import shared_weights
from plait.parallel.mesh import make_groups
from plait.parallel.pipeline.stage import StagePipe
from plait.parallel.pipeline.tied_embedding import TIED_WEIGHT, TiedEmbeddingEnd
from plait.parallel.sharded_model import ShardedModel, UpdatedBy
from plait.partition.boxes import cut_box, ranks_sharing
from plait.partition.execution import Execution


def keep_at_one_end(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Let the rank with the head alone keep a tied weight. Every rank must call it."""
    if not is_kept_at_one_end(execution):
        return sharded
    shape, layout, tensors = execution.shape, execution.layout, range(execution.layout.tensor)
    cuts = [cut_box(TIED_WEIGHT, shape, layout.tensor, index) for index in tensors]
    groups = make_groups(sorted({ranks_sharing(shape, layout, TIED_WEIGHT, box, 0) for box in cuts}))
    owner: dict[str, UpdatedBy] = {}
    for weight in shared_weights(sharded, execution):
        if weight.name == TIED_WEIGHT:
            assert isinstance(sharded.pipe, StagePipe)
            embeds = sharded.chunks[weight.chunk].part.embeds
            sharded.pipe.ends = TiedEmbeddingEnd(weight, groups[weight.ranks], embeds=embeds)
            owner[TIED_WEIGHT] = "another rank" if embeds else "this rank"
    return replace(sharded, single_owner=owner)


def is_kept_at_one_end(execution: Execution) -> bool:
    """Whether there is a tied weight at both ends of a pipeline that learns, on processors, and nobody else holds it.

    A GPU's links are fast, and where there are more copies, or heads in the middle, one sum for all of them is simpler.
    """
    layout = execution.layout
    at_both_ends = execution.shape.tied and layout.pipeline > 1 and is_trained(TIED_WEIGHT, execution.shape)
    nobody_else = layout.data_parallel_degree * layout.context == 1 and not execution.shape.objectives.heads
    return at_both_ends and nobody_else and execution.device == "cpu" and execution.gradient_transfer == "float32"
