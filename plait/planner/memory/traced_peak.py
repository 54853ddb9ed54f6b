"""Peak memory of plait's ranks on processors, found by tracing their lists of actions tensor by tensor.

The peak counts live tensors, in a step after the optimizer's state exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.layout import Schedule
from plait.partition.pipeline_schedule import Action, ActionLists, schedule_actions
from plait.planner.calibration.constants import constant
from plait.planner.memory.activations import FLOAT32_BYTES, LAYER_INPUT_BYTES
from plait.planner.memory.rank_loads import grouped_loads
from plait.planner.memory.schedule_walk import TENSOR_SIZES, PipelineStages, fullest_moments
from plait.planner.memory.tensor_sizes import TensorSizes, tensor_sizes
from plait.planner.memory.update_buffers import update_bytes
from plait.planner.problem.candidates import (
    RECOMPUTE_MODES,
    SCHEDULES,
    Candidates,
    CandidatesKey,
    Counts,
    Reals,
    group_equal_columns,
)
from plait.planner.problem.stage_partition import head_places, layers_behind_heads, micro_batches_per_step, stages_of
from plait.planner.problem.workload import Workload, expected_distinct_tokens
from plait.planner.step_time.roofline import local_tokens

ROUNDS_WALKED = 3
"""Rounds of micro-batches through all ranks that are traced; for every schedule but gpipe the peak is within these."""
GPIPE_MICROS_WALKED = 1024
"""Micro-batches of a gpipe step that are traced: what it keeps of each is the same, so that more of them keep as many
times as much."""
LAYERS_GATHERED_AT_ONCE = 2
"""Layers whose sharded parameters are gathered at a time: the current one and the next."""
HELD_BACK, HELD_BACK_AGAIN = constant("held_back"), constant("held_back_again")
"""Heap memory of the C library over tensor bytes: the heap reuses gaps late and returns little. The second factor is
for runs that allocate lasting tensors between the temporary ones of two micro-batches or recomputed layers. Readings:
runs of 1, 11 and 50 million parameters with glibc, on one host and on two."""
COMPILER_BYTES, SYMBOLIC_SHAPES_BYTES = constant("compiler_bytes"), constant("symbolic_shapes_bytes")
ALLOCATOR_GAP_STREAMS = constant("allocator_gap_streams")
"""Streams (all rows of a micro-batch) per layer whose memory is not found again with tensor parallelism: buffers lie
between tensors that stay."""
MEMORY_ITEMS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "fixed")
_FOUND = (*MEMORY_ITEMS, "gaps", "rank")


def can_trace(workload: Workload) -> bool:
    """Whether traced_peak supports the workload: dense, and in float32 or 16 bits."""
    return workload.precision in ("float32", "bf16", "fp16") and not workload.experts


def traced_peak(
    workload: Workload, candidates: Candidates, *, keeps_ends: bool = True, rank: int | Literal["fullest"] = "fullest"
) -> dict[str, Reals]:
    """The items of estimate.MemoryEstimate, arrays over candidates, of one rank of the pipeline or of the fullest, and
    "rank": which one that is; "gaps": bytes on it that are not found again.

    The arrays are cached and shared between callers that pass equal arguments, as searches for tipping points do many
    times; nobody may write into them. For `keeps_ends` see software_profile.py.
    """
    return _traced(workload, CandidatesKey(candidates), keeps_ends, rank)


def traced_ranks(workload: Workload, candidates: Candidates, *, keeps_ends: bool = True) -> list[dict[str, Reals]]:
    """What traced_peak finds on each rank of pipelines of one degree."""
    ranks = int(candidates.pipeline[0])
    return [traced_peak(workload, candidates, keeps_ends=keeps_ends, rank=rank) for rank in range(ranks)]


@lru_cache(maxsize=256)
def _traced(
    workload: Workload, key: CandidatesKey, keeps_ends: bool, rank: int | Literal["fullest"]
) -> dict[str, Reals]:
    candidates = key.candidates
    found = {name: np.zeros(len(candidates)) for name in _FOUND}
    for are_equal in _groups_with_equal_actions(workload, candidates):
        few = candidates.select(are_equal)
        sizes = tensor_sizes(workload, few)
        ranks = _ranks_to_walk(workload, few) if rank == "fullest" else (rank,)
        each = [_items(workload, few, sizes, one, keeps_ends) for one in ranks]
        most = np.stack([_resident(workload, few, one) for one in each]).argmax(axis=0)
        for name in _FOUND:
            found[name][are_equal] = np.stack([one[name] for one in each])[most, np.arange(len(most))]
    return found


def tensor_bytes(found: Mapping[str, Reals]) -> Reals:
    """Bytes of live tensors, from what traced_peak found."""
    return np.add.reduce([found[name] for name in MEMORY_ITEMS])


def resident_bytes(
    workload: Workload, candidates: Candidates, found: Mapping[str, Reals], process_bytes: float
) -> Reals:
    """Bytes of a worker's whole process at their highest as its operating system counts them, from what traced_peak
    found."""
    return _resident(workload, candidates, found) + process_bytes + imported_bytes(workload, candidates)


def imported_bytes(workload: Workload, c: Candidates) -> Reals:
    """Parts of torch that a worker imports for its layout; `modules_needed` in commands/planning/workers.py has them
    imported once, before workers are forked."""
    compiler = c.gathers_weights | (c.recompute != RECOMPUTE_MODES.index("none")) | (workload.experts > 0)
    return np.where(compiler, COMPILER_BYTES, (c.pipeline > 1) * SYMBOLIC_SHAPES_BYTES)


def _resident(workload: Workload, c: Candidates, found: Mapping[str, Reals]) -> Reals:
    again = c.recompute == RECOMPUTE_MODES.index("full")
    again |= (micro_batches_per_step(workload, c) > 1) & (c.pipeline == 1)
    return np.where(again, HELD_BACK_AGAIN, HELD_BACK) * tensor_bytes(found) + found["gaps"]


def _ranks_to_walk(workload: Workload, alike: Candidates) -> tuple[int, ...]:
    """The pipeline ranks that may be the fullest of candidates that `_groups_with_equal_actions` has put together."""
    [(_, loads)] = grouped_loads(workload, alike.select(np.array([0])))
    return loads.ranks_that_may_be_fullest


def _groups_with_equal_actions(workload: Workload, c: Candidates) -> list[Counts]:
    """Indices of candidates whose ranks carry out the same list of actions and sum gradients over ranks in the same
    way, together."""
    split = np.where(c.gathers_weights, c.shard_what, 0)
    columns = (c.pipeline, c.virtual, c.schedule, _micros(workload, c), c.weight_copies > 1, split)
    return group_equal_columns(np.stack([np.asarray(column, dtype=np.int64) for column in columns]))


def _items(w: Workload, c: Candidates, p: TensorSizes, rank: int, keeps_ends: bool) -> dict[str, Reals]:
    """What is found on a pipeline's rank, for candidates that `_groups_with_equal_actions` has put together."""
    pipeline, virtual, fully = int(c.pipeline[0]), int(c.virtual[0]), bool(c.gathers_weights[0])
    flat = int(c.weight_copies[0]) > 1 and not fully
    unreplicated_tied_ends = w.tied and pipeline > 1 and not flat and not fully and w.embedding_learns
    keeps_ends = keeps_ends and not w.heads_after
    each = stages_of(w, pipeline * virtual, c.layer_split)
    layers_of = (*each[:-1], each[-1] + w.layers_and_depths - w.layers)
    layers = sum(layers_of[rank::pipeline])
    lasts = pipeline > 1 or not c.is_fully_sharded[0]  # parallel/fully_sharded.py
    gathered = layers if lasts else min(LAYERS_GATHERED_AT_ONCE, layers)
    stages = PipelineStages(
        layers=layers_of,
        tied=w.tied,
        flat_layers=flat,
        flat_tables=flat or (unreplicated_tied_ends and not keeps_ends),
        middle_heads=layers_behind_heads(w, each) if w.heads_after else (),
        ahead=w.predict_ahead,
        gathered=gathered * fully,
        keeps_gathered=lasts,
        embedding_learns=w.embedding_learns,
        head_learns=w.head_learns,
    )
    schedule, micros = SCHEDULES[int(c.schedule[0])], int(_micros(w, c)[0])
    held = _fullest(_moments(schedule, pipeline, virtual, micros, rank, stages), p)
    beyond = micro_batches_per_step(w, c) / micros if schedule == "gpipe" and micros == GPIPE_MICROS_WALKED else 1.0
    own_stages = range(rank, pipeline * virtual, pipeline)
    n_tables = head_places(w, each, pipeline).tables[rank]
    has_head = stages.last in own_stages and not (w.tied and 0 in own_stages)
    tables = (n_tables - has_head) * p.table_weights + has_head * p.head_weights
    learning_tables = stages.learning_tables(*own_stages) * p.table
    inputs = FLOAT32_BYTES * w.input_table_parameters / c.tensor
    learning_inputs = 0.0 * inputs if w.is_frozen else inputs
    tables, learning_tables = tables + inputs, learning_tables + learning_inputs
    gathered_tables = tables - (has_head and w.rounds_gathered_head and w.head_learns) * p.head_weights / 2
    weights = layers * p.layer_weights + tables
    own = (layers * p.layer_trained + learning_tables) / c.shard
    moments = (w.layer_moments * layers * p.layer_trained + w.moments * learning_tables) / c.shard
    in_buckets = stages.flat_layers * layers * p.layer_trained + stages.flat_tables * learning_tables
    if fully:  # torch sums over `shard`, flat buckets over those who keep the same part
        in_buckets = np.where(c.weight_copies > c.shard, own, 0.0)
    kept, travelling = np.zeros(len(c)), np.zeros(len(c))
    if unreplicated_tied_ends and keeps_ends and rank in (0, pipeline - 1):
        # The last one keeps the table, and each holds what rows travel.
        kept = p.table * (rank == 0)
        rows = p.table * expected_distinct_tokens(w.batch_sequences * w.sequence, w.vocabulary) / w.vocabulary
        travelling = rows if rank == 0 else 2 * rows
    # Split buckets: what the others send of the own part waits beside it until it is added.
    received = 0.0 if fully else (c.shard - 1) * own
    found = {
        "parameters": weights / c.shard if fully else weights,
        # Of the layers' inputs the gradient is made in one piece, before it is added to those before.
        "gradients": held[0] + in_buckets + received + travelling + learning_inputs / (c.shard if fully else 1),
        "optimizer": moments - w.moments * kept,
        "gathered": fully * gathered_tables + held[4],
        "activations": held[1] * beyond + LAYER_INPUT_BYTES * local_tokens(w, c) * w.layer_inputs / c.tensor,
        "logits": held[2],
        "fixed": held[3],
        "gaps": ALLOCATOR_GAP_STREAMS * layers * (c.recompute != RECOMPUTE_MODES.index("full")) * p.gathered,
        "rank": np.full(len(c), float(rank)),
    }
    if w.orthogonalization is not None:
        gradients = own if fully else layers * p.layer_trained + learning_tables + received
        updating = found["parameters"] + gradients + found["optimizer"] + update_bytes(w, c)
        found["activations"] += np.maximum(updating - tensor_bytes(found), 0.0)
    return found


def _fullest(found: NDArray[np.float64], p: TensorSizes) -> Reals:
    """[items, candidates] at each candidate's fullest moment."""
    sizes = np.empty((len(TENSOR_SIZES), len(p.stream)))
    for row, name in zip(sizes, TENSOR_SIZES, strict=True):
        row[:] = getattr(p, name)
    held = found @ sizes
    return np.take_along_axis(held, held.sum(axis=1).argmax(axis=0)[None, None], axis=0)[0]


@lru_cache(maxsize=4096)
def _moments(
    schedule: Schedule, pipeline: int, virtual: int, micros: int, rank: int, stages: PipelineStages
) -> NDArray[np.float64]:
    if pipeline > 1:
        return fullest_moments(_actions(schedule, pipeline, virtual, micros)[rank], stages)
    in_turn = product(range(micros), ("forward", "backward"))
    return fullest_moments([Action(kind=kind, stage=0, micro=micro) for micro, kind in in_turn], stages)


@lru_cache(maxsize=64)
def _actions(schedule: Schedule, pipeline: int, virtual: int, micros: int) -> ActionLists:
    return schedule_actions(schedule, ranks=pipeline, virtual=virtual, micros=micros)


def _micros(workload: Workload, c: Candidates) -> NDArray[np.int64]:
    """Number of micro-batches to trace: all of a step, or as many as reach the peak."""
    micros = np.ceil(micro_batches_per_step(workload, c)).astype(np.int64)
    enough = np.where(c.pipeline > 1, ROUNDS_WALKED * c.pipeline + micros % c.pipeline, 2)
    enough = np.where(c.schedule == SCHEDULES.index("gpipe"), GPIPE_MICROS_WALKED, enough)
    return np.minimum(micros, enough)
