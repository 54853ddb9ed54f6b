"""The load of each pipeline rank at the moments when its memory may peak, counted in layers and tables.

The orders are those of partition/pipeline_schedule.py. This sums up what schedule_walk.py follows action by action: a
search weighs every rank of a hundred thousand pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from plait.layout import Schedule
from plait.partition.pipeline_schedule import forwards_ahead, micro_rounds
from plait.planner.problem.candidates import SCHEDULES, Candidates, Counts, Reals, group_equal_columns
from plait.planner.problem.stage_partition import HeadPlaces, head_places, micro_batches_per_step, stages_of
from plait.planner.problem.workload import Workload

LOADS = ("layers", "kept", "split", "tables", "head", "once")
"""What is counted: the model's layers on the rank; layers times the micro-batches of which they keep what backward
needs, and the same between the two halves of a split backward pass; vocabulary tables; 1 where heads and losses
stand; and 1."""
ROUNDS_COUNTED = 3
"""Rounds of micro-batches through all stages that show all that a schedule other than gpipe ever holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankLoads:
    """The moments of one pipeline at which one of its ranks may hold most, in the order of the ranks."""

    rank: Counts
    """Shape [moments]: whose moment it is."""
    amounts: Reals
    """Shape [moments, loads], loads in the order of LOADS."""

    def of_rank(self, rank: int) -> RankLoads:
        """The moments of one rank."""
        return RankLoads(rank=self.rank[self.rank == rank], amounts=self.amounts[self.rank == rank])

    @property
    def ranks_that_may_be_fullest(self) -> tuple[int, ...]:
        """The ranks but those that another one exceeds or equals in everything at once, a rank before all."""
        ends = self.rank[0], self.rank[-1]
        kept = [int(rank) for rank in np.unique(self.rank) if rank in ends or not self._is_exceeded(rank)]
        return tuple(kept)

    def _is_exceeded(self, rank: int) -> bool:
        """Whether for each moment of a rank in the middle an earlier one has a moment with no less of anything."""
        others = self.amounts[self.rank < rank]
        own = self.amounts[self.rank == rank]
        return bool((others[None] >= own[:, None]).all(axis=2).any(axis=-1).all())


def grouped_loads(workload: Workload, candidates: Candidates) -> list[tuple[Counts, RankLoads]]:
    """Indices of the candidates whose pipelines hold the same, and what that is."""
    c = candidates
    micros = np.ceil(micro_batches_per_step(workload, c)).astype(np.int64)
    in_turn = (c.virtual == 1) & (c.schedule != SCHEDULES.index("gpipe"))
    micros = np.where(in_turn, np.minimum(micros, ROUNDS_COUNTED * c.pipeline), micros)
    micros = np.where(c.pipeline == 1, 1, micros)
    found = []
    for rows in group_equal_columns(np.stack([c.pipeline, c.virtual, c.schedule, micros])):
        one = int(rows[0])
        stages = int(c.pipeline[one] * c.virtual[one])
        layers = stages_of(workload, stages, c.layer_split)
        schedule, places = SCHEDULES[int(c.schedule[one])], head_places(workload, layers, int(c.pipeline[one]))
        held = (*layers[:-1], layers[-1] + workload.layers_and_depths - workload.layers)
        found.append((rows, rank_loads(schedule, int(c.virtual[one]), int(micros[one]), held, places)))
    return found


@lru_cache(maxsize=4096)
def rank_loads(
    schedule: Schedule, virtual: int, micros: int, stage_layers: tuple[float, ...], places: HeadPlaces
) -> RankLoads:
    """The loads of every rank of a pipeline with this many layers on each stage and `virtual` stages on each rank."""
    layers = np.array(stage_layers, dtype=np.float64).reshape(virtual, -1).T
    ranks, held = len(layers), _kept_and_split(schedule, micros, layers)
    rank = np.repeat(np.arange(ranks), [len(moments) for moments in held])
    tables, heads = np.array(places.tables, dtype=np.float64), np.array(places.heads) > 0
    kept, split = np.concatenate(held).T
    columns = {
        "layers": layers.sum(axis=1)[rank],
        "kept": kept,
        "split": split,
        "tables": tables[rank],
        "head": heads[rank],
        "once": np.ones(len(rank)),
    }
    return RankLoads(rank=rank, amounts=np.stack([columns[load] for load in LOADS], axis=1).astype(np.float64))


def _kept_and_split(schedule: Schedule, micros: int, layers: Reals) -> list[Reals]:
    """For each rank, shape [moments, 2]: layers times micro-batches that wait for their backward pass, and for its
    second half; `layers` has the shape [ranks, stages on each].

    Most waits before a backward pass, and, where it is split, behind its first half.
    """
    ranks, virtual = layers.shape
    if schedule == "gpipe":
        return [np.array([[micros * own, 0.0]]) for own in layers.sum(axis=1)]
    rounds = [len(some) for some in islice(micro_rounds(schedule, ranks, micros), ROUNDS_COUNTED)]
    chunks = np.concatenate([np.repeat(np.arange(virtual), count) for count in rounds])
    count, nothing = len(chunks), np.zeros((ranks, 1))
    forwards = np.hstack([nothing, layers[:, chunks].cumsum(axis=1)])
    backwards = np.hstack([nothing, layers[:, ::-1][:, chunks].cumsum(axis=1)])
    number, ahead = np.arange(count), np.array(forwards_ahead(schedule, ranks, virtual, rounds[0]))
    begun = np.take_along_axis(forwards, np.minimum(ahead[:, None] + number + 1, count), axis=1)
    if schedule != "zero-bubble":
        return [np.array([[kept, 0.0]]) for kept in (begun - backwards[:, :-1]).max(axis=1)]
    # The gradients of its weights follow a backward pass by as many others as there are ranks before this one.
    settled = np.take_along_axis(backwards, np.maximum(number - np.arange(ranks)[:, None], 0), axis=1)
    moments = [np.stack([begun - done, done - settled], axis=2) for done in (backwards[:, :-1], backwards[:, 1:])]
    return [_fullest_moments(own) for own in np.concatenate(moments, axis=1)]


def _fullest_moments(moments: Reals) -> Reals:
    """The moments of a rank, as pairs of counts, that no other moment exceeds in both."""
    ordered = moments[np.lexsort((moments[:, 1], moments[:, 0]))[::-1]]
    most_so_far = np.maximum.accumulate(ordered[:, 1])
    return ordered[np.r_[True, ordered[1:, 1] > most_so_far[:-1]]]
