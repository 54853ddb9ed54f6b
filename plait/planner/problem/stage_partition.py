"""How layers, weights and heads are divided among pipeline stages, for the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heapreplace

import numpy as np

from plait.planner.problem.candidates import Candidates, Counts, LayerSplit, Reals
from plait.planner.problem.other_programs import published_stages
from plait.planner.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayers:
    """Layers on a pipeline's first, last and fullest rank, those for prediction ahead included; arrays over
    candidates."""

    first: Reals
    last: Reals
    fullest: Reals
    ranks_after_fullest: Reals
    """Number of ranks after the last rank that has `fullest` layers."""
    fullest_after: Reals
    """Layers on the fullest of these ranks, the last rank excluded; 0 where there is none."""
    last_heads: Reals
    """Uses of the output matrix on the last rank."""
    middle: Reals
    """Layers on the rank with heads in the middle that costs most, the last rank excluded; 0 where there is none."""
    middle_heads: Reals
    """Heads on that rank."""


def rank_layers(workload: Workload, candidates: Candidates) -> RankLayers:
    """Layers by pipeline rank, from what `layers_of_stages` gives to each of its stages."""
    shapes, place = np.unique(candidates.pipeline * STAGE_KEY_RADIX + candidates.virtual, return_inverse=True)
    sums = [_rank_counts(workload, *divmod(int(s), STAGE_KEY_RADIX), candidates.layer_split) for s in shapes]
    columns = np.array(sums, dtype=np.float64).reshape(-1, 8)[place].T
    first, last, most, behind, later, last_heads, middle, middle_heads = columns
    return RankLayers(
        first=first,
        last=last,
        fullest=most,
        ranks_after_fullest=behind,
        fullest_after=later,
        last_heads=last_heads,
        middle=middle,
        middle_heads=middle_heads,
    )


STAGE_KEY_RADIX = 1 << 20
"""More than any number of stages on a rank."""


@lru_cache(maxsize=4096)
def _rank_counts(workload: Workload, pipeline: int, virtual: int, layer_split: LayerSplit) -> tuple[float, ...]:
    """The fields of RankLayers for one pipeline."""
    each = stages_of(workload, pipeline * virtual, layer_split)
    ranks = [float(sum(each[rank::pipeline])) for rank in range(pipeline)]
    ranks[-1] += workload.layers_and_depths - workload.layers
    heads = heads_of_stages(workload, each)
    on_ranks = [sum(heads[rank::pipeline]) for rank in range(pipeline)]
    cost = one_head_in_layers(workload)
    some = [(ranks[rank] + on_ranks[rank] * cost, rank) for rank in range(pipeline - 1) if on_ranks[rank]]
    middle = (ranks[max(some)[1]], on_ranks[max(some)[1]]) if some else (0, 0)
    behind = ranks[::-1].index(max(ranks))
    later = max(ranks[pipeline - behind : -1], default=0)
    return ranks[0], ranks[-1], max(ranks), behind, later, on_ranks[-1], *middle


def stages_of(workload: Workload, stages: int, layer_split: LayerSplit) -> tuple[int, ...]:
    """Layers of each stage of a workload, in the model's order."""
    if layer_split != "balanced" or not workload.heads_after:
        return layers_of_stages(workload.layers, stages, head_cost_in_layers(workload), layer_split)
    costs = (workload.layers, one_head_in_layers(workload), head_cost_in_layers(workload))
    return balanced_with_heads(costs, stages, workload.heads_after)


def layers_of_stages(layers: int, stages: int, head_cost: float, layer_split: LayerSplit) -> tuple[int, ...]:
    """Layers of each stage, in the model's order; `head_cost` is the cost of the head in average layers."""
    if layer_split == "balanced":
        return balanced_stages_by_cost(layers, stages, head_cost)
    if layer_split == "published":
        return published_stages(layers, stages)
    assert (len(layer_split), sum(layer_split)) == (stages, layers), (
        f"{layers} layers on {stages} stages: {layer_split}"
    )
    return layer_split


@lru_cache(maxsize=4096)
def balanced_stages_by_cost(layers: int, stages: int, head_cost: float) -> tuple[int, ...]:
    """Layers of each stage so that the most expensive stage is as cheap as can be, the head counted with the last
    stage: what plait runs on equal devices."""
    return balanced_stages_by_speed(layers, (1.0,) * stages, head_cost)


def balanced_stages_by_speed(
    layers: int, speeds: Sequence[float], head_cost: float, embedding_cost: float = 0.0, max_layers: Sequence[int] = ()
) -> tuple[int, ...]:
    """Layers of stages of these speeds so that the slowest stage is done as early as possible.

    The embedding costs as much as `embedding_cost` layers and stands with the first stage, the head as much as
    `head_cost` layers and stands with the last. No stage gets more than its `max_layers`, provided that they can hold
    all layers together.
    """
    stages = len(speeds)
    assert stages <= layers
    limits = max_layers if sum(max_layers) >= layers and all(max_layers) else (layers,) * stages
    costs = [1.0] * stages
    costs[0] += embedding_cost
    costs[-1] += head_cost
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


def head_cost_in_layers(workload: Workload) -> float:
    """Cost of the head in average layers, by the weights that a token is multiplied with; with prediction ahead, which
    stands behind it, that of all of it."""
    return one_head_in_layers(workload) * (1 + workload.predict_ahead) + workload.layers_and_depths - workload.layers


def micro_batches_per_step(workload: Workload, candidates: Candidates) -> Reals:
    """Micro-batches of one step on each rank; not whole where the batch does not split evenly."""
    return np.maximum(workload.batch_sequences / (candidates.data_parallel_degree * candidates.micro_sequences), 1.0)


def layer_parameters(workload: Workload, candidates: Candidates) -> tuple[Reals, Reals]:
    """Weights of an average layer on one rank before sharding: (those that expert groups copy, the experts')."""
    w = workload
    sparse = w.moe_layers / w.layers
    common = (
        w.attention_parameters + (1 - sparse) * w.dense_feedforward_parameters + sparse * w.shared_expert_parameters
    )
    across = ranks_of_an_expert(w, candidates)
    experts = sparse * w.experts * w.expert_parameters / candidates.expert / across
    whole = w.latent.whole_weights if w.latent else 0
    return (common - whole) / candidates.tensor + whole, experts * np.ones(len(candidates))


def ranks_of_an_expert(workload: Workload, candidates: Candidates) -> Counts:
    """Ranks that have a part each of one expert: those of the tensor axis, unless experts lie whole on its ranks."""
    return np.where((candidates.expert > 1) & (workload.expert_ranks == "any"), 1, candidates.tensor)


def fewer_expert_copies(workload: Workload, candidates: Candidates) -> Reals:
    """How many times fewer ranks hold the same expert than hold the same part of all else. Experts that lie on any
    ranks take those of the tensor axis first, which see the same tokens."""
    e = candidates.expert
    return np.asarray(e / np.minimum(candidates.tensor, e) if workload.expert_ranks == "any" else e, dtype=np.float64)


def data_ranks_of_expert_group(workload: Workload, candidates: Candidates) -> Reals:
    """Data-parallel ranks that hold all experts of a layer together: those of Layout.expert_replicas, whose groups take
    ranks of the context axis first."""
    if workload.expert_ranks == "any":
        return fewer_expert_copies(workload, candidates)
    return np.asarray(candidates.expert // np.gcd(candidates.expert, candidates.context), dtype=np.float64)


def expert_shard_ranks(workload: Workload, candidates: Candidates, ranks: Counts | Reals) -> Reals:
    """Ranks that share the shards of one expert's weights, of `ranks` that share those of all else."""
    return np.maximum(ranks / data_ranks_of_expert_group(workload, candidates), 1.0)


def messages_each_way(ranks: Counts | int, virtual: Counts | int) -> Counts:
    """Messages per micro-batch in one direction between two neighbouring pipeline ranks.

    With two ranks the same wire carries results of some chunks and gradients of others; in a ring of more ranks each
    direction carries either results or gradients.
    """
    return np.where(np.equal(ranks, 2), 2 * np.asarray(virtual) - 1, virtual)


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
    """Each pipeline rank's part of the vocabulary."""

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
