"""How layers and weights are divided among pipeline stages, for the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heapreplace

import numpy as np

from plait.planner.problem.candidates import SCHEDULES, Candidates, Counts, LayerSplit, Reals
from plait.planner.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Layers on a pipeline's first, last and fullest rank; arrays over candidates."""

    first: Reals
    last: Reals
    most: Reals
    before_last: Reals
    """How many ranks stand behind the last of the fullest."""
    later: Reals
    """Layers on the fullest of those, the last rank aside; 0 where there is none."""


def stage_layers(workload: Workload, candidates: Candidates) -> StageLayers:
    """Layers by pipeline rank, from what `layers_of_stages` gives to each of its stages."""
    shapes, place = np.unique(candidates.pipeline * MANY_STAGES + candidates.virtual, return_inverse=True)
    sums = [
        _sums(workload.layers, *divmod(int(s), MANY_STAGES), head_cost_in_layers(workload), candidates.layer_split)
        for s in shapes
    ]
    first, last, most, behind, later = np.array(sums, dtype=np.float64).reshape(-1, 5)[place].T
    return StageLayers(first=first, last=last, most=most, before_last=behind, later=later)


MANY_STAGES = 1 << 20
"""More than any number of stages on a rank."""


@lru_cache(maxsize=4096)
def _sums(layers: int, pipeline: int, virtual: int, head: float, dealing: LayerSplit) -> tuple[int, ...]:
    """The fields of StageLayers for one pipeline."""
    each = layers_of_stages(layers, pipeline * virtual, head, dealing)
    ranks = [sum(each[rank::pipeline]) for rank in range(pipeline)]
    behind = ranks[::-1].index(max(ranks))
    return ranks[0], ranks[-1], max(ranks), behind, max(ranks[pipeline - behind : -1], default=0)


def layers_of_stages(layers: int, stages: int, head: float, dealing: LayerSplit) -> tuple[int, ...]:
    """Layers of each stage, in the model's order; `head` is the cost of the head in average layers."""
    if dealing == "balanced":
        return balanced_stages_by_cost(layers, stages, head)
    if dealing == "published":
        return published_stages(layers, stages)
    assert (len(dealing), sum(dealing)) == (stages, layers), f"{layers} layers on {stages} stages: {dealing}"
    return dealing


def balanced_stages_by_cost(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Layers of each stage so that the most expensive stage is as cheap as can be, the head counted with the last
    stage: what plait runs on equal devices."""
    return balanced_stages_by_speed(layers, (1.0,) * stages, head)


def balanced_stages_by_speed(
    layers: int, speeds: Sequence[float], head: float, lookup: float = 0.0, most: Sequence[int] = ()
) -> tuple[int, ...]:
    """Layers of stages of these speeds so that the slowest is done as early as can be.

    The embedding costs as much as `lookup` layers and stands with the first, the head as `head` and stands with the
    last. No stage gets more than `most` says, if they can hold all layers together.
    """
    stages = len(speeds)
    assert stages <= layers
    limits = most if sum(most) >= layers and all(most) else (layers,) * stages
    costs = [1.0] * stages
    costs[0] += lookup
    costs[-1] += head
    each = [1] * stages
    queue = [((costs[stage] + 1) / speeds[stage], stage) for stage in range(stages) if limits[stage] > 1]
    heapify(queue)
    for _ in range(layers - stages):
        stage = queue[0][1]
        each[stage] += 1
        if each[stage] == limits[stage]:
            heappop(queue)
        else:
            heapreplace(queue, ((costs[stage] + each[stage]) / speeds[stage], stage))
    return tuple(each)


def published_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage as published programs divide them.

    Where the layers do not divide, but would with the embedding and the head counted as one layer each, they are
    divided so (Llama 3's 126 layers over 8 × 8 stages, BLOOM's 70 over 12); else some stages hold one layer more than
    others, the first and the last not among them if that can be helped.
    """
    each, more = divmod(layers, stages)
    if stages > 1 and more and (layers + 2) % stages == 0:
        each, more = (layers + 2) // stages - 1, stages - 2
    favoured = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), -stage))[:more]
    return tuple(each + (stage in favoured) for stage in range(stages))


def head_cost_in_layers(workload: Workload) -> float:
    """Cost of the head in average layers, by the weights that a token is multiplied with."""
    w = workload
    return w.embedding_weights * w.layers / (w.active_parameters - w.embedding_weights)


def micro_batches_in_flight(candidates: Candidates, micros: Reals) -> Reals:
    """Micro-batches whose activations the first stage keeps at once, in units of all its layers."""
    p, v = candidates.pipeline, candidates.virtual
    interleaved = p * (1 + (p - 1) / (p * v))
    kept = np.where(v > 1, interleaved, p)
    return np.minimum(np.where(candidates.schedule == SCHEDULES.index("gpipe"), micros, kept), micros)


def micro_batches(workload: Workload, candidates: Candidates) -> Reals:
    """Micro-batches of one step on each rank; not whole where the batch does not split evenly."""
    return np.maximum(workload.batch_sequences / (candidates.data_parallel_degree * candidates.micro_sequences), 1.0)


def layer_weights(workload: Workload, candidates: Candidates) -> tuple[Reals, Reals]:
    """Weights of an average layer on one rank before sharding: (those that expert groups copy, the experts')."""
    w = workload
    sparse = w.sparse_layers / w.layers
    common = w.attention_weights + (1 - sparse) * w.dense_feedforward_weights + sparse * w.shared_weights
    across = np.where(candidates.expert > 1, 1, candidates.tensor)
    experts = sparse * w.experts * w.expert_weights / candidates.expert / across
    return common / candidates.tensor, experts * np.ones(len(candidates))


def fullest_weights(workload: Workload, candidates: Candidates) -> tuple[Reals, Reals]:
    """Weights on the rank of a pipeline that holds most of them before sharding: (common, experts')."""
    common, experts = layer_weights(workload, candidates)
    layers = stage_layers(workload, candidates)
    table = workload.embedding_weights / candidates.tensor
    tables = np.where(candidates.pipeline == 1, 1 if workload.tied else 2, 1) * table
    ends = np.maximum(layers.first, layers.last) * common + tables
    return np.maximum(ends, layers.most * common), layers.most * experts


def messages_each_way(ranks: Counts | int, virtual: Counts | int) -> Counts:
    """Of one micro-batch, over the wire between two neighbours of a pipeline: two ranks have one for all their chunks'
    results and gradients, in a ring of more ranks each way has either."""
    return np.where(np.equal(ranks, 2), 2 * np.asarray(virtual) - 1, virtual)
