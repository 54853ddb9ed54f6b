"""How layers and weights fall to the pipeline's stages, for pricing: the widest stage, the first and the last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.plan.candidates import SCHEDULES, Candidates, Reals
from plait.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Layers on the ranks of a pipeline that hold its first, its last and its fullest stage; arrays over candidates."""

    first: Reals
    last: Reals
    most: Reals


def stage_layers(workload: Workload, candidates: Candidates) -> StageLayers:
    """Layers by rank of the pipeline.

    Where the layers do not divide, but would with the embedding and the head counted as one layer each, they are dealt
    so (Llama 3's 126 layers over 8 × 8 chunks, BLOOM's 70 over 12); else some stages hold one layer more than others,
    the first and the last not among them if that can be helped.
    """
    layers, virtual = workload.layers, candidates.virtual
    chunks = candidates.pipeline * virtual
    even = layers % chunks == 0
    counted = ~even & ((layers + 2) % chunks == 0) & (candidates.pipeline > 1)
    per_chunk = np.where(even, layers / chunks, np.where(counted, (layers + 2) / chunks, np.ceil(layers / chunks)))
    most = np.minimum(per_chunk * virtual, layers)
    least = np.where(even, most, np.where(counted, most - 1, np.maximum(np.floor(layers / chunks) * virtual, 1)))
    return StageLayers(
        first=least, last=least, most=np.where(candidates.pipeline == 2, np.where(even, most, least), most)
    )


def kept_micros(candidates: Candidates, micros: Reals) -> Reals:
    """Micro-batches whose activations the first stage keeps at once, in units of all its layers."""
    p, v = candidates.pipeline, candidates.virtual
    interleaved = p * (1 + (p - 1) / (p * v))
    kept = np.where(v > 1, interleaved, p)
    return np.minimum(np.where(candidates.schedule == SCHEDULES.index("gpipe"), micros, kept), micros)


def micro_batches(workload: Workload, candidates: Candidates) -> Reals:
    """Micro-batches of one step on each rank; not whole where the batch does not split evenly."""
    return np.maximum(workload.batch_sequences / (candidates.batch_parts * candidates.micro_sequences), 1.0)


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
    alone = candidates.pipeline == 1
    tables = np.where(alone, 1 if workload.tied else 2, 1) * table
    end = layers.first * common + tables
    middle = layers.most * common
    return np.maximum(end, np.where(alone, end, middle)), layers.most * experts
