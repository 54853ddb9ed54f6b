"""Peak memory of plait's ranks on processors, found by tracing their lists of actions tensor by tensor.

The peak counts live float32 tensors, in a step after the optimizer's state exists.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.layout import Schedule
from plait.partition.pipeline_schedule import Action, schedule_actions
from plait.planner.calibration.constants import constant
from plait.planner.memory.schedule_walk import TENSOR_SIZES, PipelineStages, fullest_moments
from plait.planner.memory.tensor_sizes import TensorSizes, tensor_sizes
from plait.planner.problem.candidates import (
    RECOMPUTE_MODES,
    SCHEDULES,
    SHARDED_STATES,
    Candidates,
    CandidatesKey,
    Counts,
    Reals,
    group_equal_columns,
)
from plait.planner.problem.stage_partition import head_cost_in_layers, layers_of_stages, micro_batches_per_step
from plait.planner.problem.workload import Workload, expected_distinct_tokens

ROUNDS_WALKED = 3
"""Rounds of micro-batches through all ranks that are traced; for every schedule but gpipe the peak is within these."""
LAYERS_GATHERED_AT_ONCE = 2
"""Layers whose sharded parameters are gathered at a time: the current one and the next."""
HELD_BACK, HELD_BACK_AGAIN = constant("held_back"), constant("held_back_again")
"""Heap memory of the C library over tensor bytes: the heap reuses gaps late and returns little. The second factor is
for runs that allocate lasting tensors between the temporary ones of two micro-batches or recomputed layers. Readings:
runs of 1, 11 and 50 million parameters with glibc, on one host and on two."""
ALLOCATOR_GAP_STREAMS = constant("allocator_gap_streams")
"""Memory that the heap cannot reuse with tensor parallelism, per layer, in units of the residual stream of a
micro-batch: buffers were allocated between lasting tensors."""
PipelineEnd = Literal["first", "last", "fuller"]
MEMORY_ITEMS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "fixed")


def can_trace(workload: Workload) -> bool:
    """Whether traced_peak supports the workload: dense and in float32."""
    return workload.precision == "float32" and not workload.experts


def traced_peak(
    workload: Workload, candidates: Candidates, *, keeps_ends: bool = True, end: PipelineEnd = "fuller"
) -> dict[str, Reals]:
    """The items of estimate.MemoryEstimate, arrays over candidates, of the first or the last pipeline rank.

    The arrays are cached and shared between callers that pass equal arguments, as searches for tipping points do many
    times; nobody may write into them. For `keeps_ends` see software_profile.py.
    """
    return _followed(workload, CandidatesKey(candidates), keeps_ends, end)


@lru_cache(maxsize=256)
def _followed(workload: Workload, key: CandidatesKey, keeps_ends: bool, end: PipelineEnd) -> dict[str, Reals]:
    candidates = key.candidates
    found = {name: np.zeros(len(candidates)) for name in (*MEMORY_ITEMS, "stage")}
    for are_equal in _groups_with_equal_actions(workload, candidates):
        few = candidates.select(are_equal)
        sizes = tensor_sizes(workload, few)
        first, last = (_items(workload, few, sizes, rank, keeps_ends) for rank in ("first", "last"))
        fuller = _fuller(first, last, end)
        for name in MEMORY_ITEMS:
            found[name][are_equal] = np.where(fuller, last[name], first[name])
        found["stage"][are_equal] = fuller
    return found


def _fuller(first: dict[str, Reals], last: dict[str, Reals], end: PipelineEnd) -> NDArray[np.bool_]:
    """Mask of candidates whose last rank needs more than its first."""
    if end == "fuller":
        return np.add.reduce(list(last.values())) > np.add.reduce(list(first.values()))
    return np.full(np.shape(first["parameters"]), end == "last")


def resident_bytes(workload: Workload, candidates: Candidates, tensor_bytes: Reals, process_bytes: float) -> Reals:
    """Bytes of a worker's whole process at their highest as its operating system counts them."""
    keeps = candidates.recompute != RECOMPUTE_MODES.index("full")
    gaps = (
        ALLOCATOR_GAP_STREAMS
        * workload.layers
        / candidates.pipeline
        * keeps
        * tensor_sizes(workload, candidates).gathered
    )
    again = ~keeps | ((micro_batches_per_step(workload, candidates) > 1) & (candidates.pipeline == 1))
    return np.where(again, HELD_BACK_AGAIN, HELD_BACK) * tensor_bytes + gaps + process_bytes


def _groups_with_equal_actions(workload: Workload, c: Candidates) -> list[Counts]:
    """Indices of candidates whose ranks carry out the same list of actions and sum gradients over ranks in the same
    way, together."""
    columns = (c.pipeline, c.virtual, c.schedule, _micros(workload, c), _copies(c) > 1, _is_fully_sharded(c))
    return group_equal_columns(np.stack([np.asarray(column, dtype=np.int64) for column in columns]))


def _items(w: Workload, c: Candidates, p: TensorSizes, end: PipelineEnd, keeps_ends: bool) -> dict[str, Reals]:
    """The items on the first or the last rank, for candidates that carry out equal lists of actions."""
    pipeline, virtual, fully = int(c.pipeline[0]), int(c.virtual[0]), bool(_is_fully_sharded(c)[0])
    flat = int(_copies(c)[0]) > 1 and not fully
    unreplicated_tied_ends = w.tied and pipeline > 1 and not flat and not fully
    stages = PipelineStages(
        layers=layers_of_stages(w.layers, pipeline * virtual, head_cost_in_layers(w), c.layer_split),
        tied=w.tied,
        flat_layers=flat,
        flat_tables=flat or (unreplicated_tied_ends and not keeps_ends),
    )
    rank, schedule, micros = 0 if end == "first" else pipeline - 1, SCHEDULES[int(c.schedule[0])], int(_micros(w, c)[0])
    held = _fullest(_moments(schedule, pipeline, virtual, micros, rank, stages), p)
    layers = sum(stages.layers[rank::pipeline])
    tables = sum(stages.tables(stage) for stage in range(rank, pipeline * virtual, pipeline)) * p.table
    weights = layers * p.layer_weights + tables
    own = weights / c.shard
    in_buckets = stages.flat_layers * layers * p.layer_weights + stages.flat_tables * tables
    if fully:  # torch sums over `shard`, flat buckets over those who keep the same part
        in_buckets = np.where(_copies(c) > c.shard, own, 0.0)
    gathered = (
        min(LAYERS_GATHERED_AT_ONCE, layers) if pipeline == 1 else layers
    )  # a pipeline would gather for each micro-batch
    kept, travelling = np.zeros(len(c)), np.zeros(len(c))
    if unreplicated_tied_ends and keeps_ends:  # the last rank keeps the table; both ranks hold the rows that are sent
        kept = p.table * (end == "first")
        rows = p.table * expected_distinct_tokens(w.batch_sequences * w.sequence, w.vocabulary) / w.vocabulary
        travelling = rows if end == "first" else 2 * rows
    # Sharded buckets: contributions of other ranks to the own shard are buffered until they are added.
    received = 0.0 if fully else (c.shard - 1) * own
    return {
        "parameters": own if fully else weights,
        "gradients": held[0] + in_buckets + received + travelling,
        "optimizer": 2 * (own - kept),
        "gathered": fully * (tables + gathered * p.layer_weights),
        "activations": held[1],
        "logits": held[2],
        "fixed": held[3],
    }


def _fullest(found: NDArray[np.float64], p: TensorSizes) -> Reals:
    """[items, candidates] at each candidate's fullest moment."""
    sizes = np.stack([np.broadcast_to(getattr(p, name), p.stream.shape) for name in TENSOR_SIZES])
    held = found @ sizes
    return np.take_along_axis(held, held.sum(axis=1).argmax(axis=0)[None, None], axis=0)[0]


@lru_cache(maxsize=4096)
def _moments(
    schedule: Schedule, pipeline: int, virtual: int, micros: int, rank: int, stages: PipelineStages
) -> NDArray[np.float64]:
    if pipeline > 1:
        return fullest_moments(schedule_actions(schedule, ranks=pipeline, virtual=virtual, micros=micros)[rank], stages)
    in_turn = product(range(micros), ("forward", "backward"))
    return fullest_moments([Action(kind=kind, stage=0, micro=micro) for micro, kind in in_turn], stages)


def _micros(workload: Workload, c: Candidates) -> NDArray[np.int64]:
    """Number of micro-batches to trace: all of a step, or as many as reach the peak."""
    micros = np.ceil(micro_batches_per_step(workload, c)).astype(np.int64)
    enough = np.where(c.pipeline > 1, ROUNDS_WALKED * c.pipeline + micros % c.pipeline, 2)
    return np.where(c.schedule == SCHEDULES.index("gpipe"), micros, np.minimum(micros, enough))


def _copies(c: Candidates) -> NDArray[np.int64]:
    """Ranks that hold the same weights and see other tokens."""
    return c.data_parallel_degree * c.context


def _is_fully_sharded(c: Candidates) -> NDArray[np.bool_]:
    return (c.shard > 1) & (c.shard_what == SHARDED_STATES.index("parameters"))
