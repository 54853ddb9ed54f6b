"""Where heads in the middle stand among the stages of a pipeline, and what they cost there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plait.planner.problem.workload import Workload


def one_head_in_layers(workload: Workload) -> float:
    """Cost of one use of the output matrix in average layers, by the weights that a token is multiplied with."""
    w = workload
    return w.embedding_parameters * w.layers / (w.active_parameters - w.embedding_parameters)


def heads_of_stages(workload: Workload, stage_layers: Sequence[int]) -> tuple[int, ...]:
    """Uses of the output matrix on each stage: by heads in the middle, and on the last one by the model's own and by
    prediction ahead."""
    ends = np.cumsum(stage_layers)
    places = [int(np.searchsorted(ends, after)) for after in workload.heads_after]
    own = len(stage_layers) - 1
    return tuple(
        places.count(stage) + (stage == own) * (1 + workload.predict_ahead) for stage in range(len(stage_layers))
    )


def layers_behind_heads(workload: Workload, stage_layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each stage the heads in the middle on it, each by the layers of that stage behind it."""
    ends = np.cumsum(stage_layers)
    found: list[list[int]] = [[] for _ in stage_layers]
    for after in workload.heads_after:
        stage = int(np.searchsorted(ends, after))
        found[stage].append(int(ends[stage]) - after)
    return tuple(map(tuple, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlaces:
    """What each rank of a pipeline has of the vocabulary."""

    tables: tuple[int, ...]
    """Tables: the embedding on the first rank and where prediction ahead looks up tokens, and the output matrix, or a
    tied embedding in its place, wherever heads are; a rank has each once."""
    heads: tuple[int, ...]
    """Uses of the output matrix."""


def head_places(workload: Workload, stage_layers: Sequence[int], ranks: int) -> HeadPlaces:
    """The places of a workload's heads in a pipeline of this many ranks."""
    by_stage, stages = heads_of_stages(workload, stage_layers), len(stage_layers)
    heads = tuple(sum(by_stage[rank::ranks]) for rank in range(ranks))
    ahead = workload.predict_ahead > 0
    looks_up = [rank == 0 or (ahead and (stages - 1) % ranks == rank) for rank in range(ranks)]
    tables = (
        int(found or scores > 0) if workload.tied else found + (scores > 0)
        for found, scores in zip(looks_up, heads, strict=True)
    )
    return HeadPlaces(tables=tuple(tables), heads=heads)


@lru_cache(maxsize=4096)
def balanced_with_heads(costs: tuple[int, float, float], stages: int, heads_after: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each stage so that the most expensive one is as cheap as can be, with heads in the middle.

    `costs` are the number of layers, and in average layers the cost of a head in the middle and of what stands behind
    the last layer. Of equal cuts the one with the fuller first stages.
    """
    layers, head, end = costs
    assert stages <= layers, f"{layers} layers on {stages} stages"
    each = np.ones(layers)
    each[np.array(heads_after, dtype=np.int64) - 1] += head
    each[-1] += end
    until = np.concatenate([[0.0], each.cumsum()])
    # best[n]: the cheapest most expensive stage of the first this many, which hold n layers; one stage more at a time.
    best, cuts = np.where(np.arange(layers + 1) > 0, until, np.inf), []
    for _ in range(stages - 1):
        most = np.maximum(best[None, :], until[:, None] - until[None, :])
        most[np.triu_indices(layers + 1)] = np.inf  # each stage has a layer
        cuts.append(layers - most[:, ::-1].argmin(axis=1))
        best = most.min(axis=1)
    ends = [layers]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return tuple(int(n) for n in np.diff([0, *reversed(ends)]))
