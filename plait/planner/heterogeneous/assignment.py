"""Who does what on unequal devices: layers of each pipeline stage, sequences of each data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from plait.planner.heterogeneous.batch_shares import equal_shares, shares_if_worthwhile
from plait.planner.heterogeneous.device_speeds import DeviceSpeeds
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import (
    SCHEDULES,
    Candidates,
    CandidatesKey,
    Counts,
    Reals,
    group_equal_columns,
)
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import balanced_stages_by_speed
from plait.planner.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkAssignment:
    """Layers of each pipeline stage and sequences of each data-parallel rank, for layouts that share one pipeline
    degree, one data-parallel degree and one order of devices."""

    stage_layers: tuple[int, ...]
    """Layers of each stage, in the model's order; a single entry with all layers where there is no pipeline."""
    sequences_per_replica: tuple[int, ...]
    """Shape [data-parallel degree]; sums to the sequences of a step."""
    relative_speed: Reals
    """Shape [pipeline, data-parallel degree]: speed of the slowest device at that mesh coordinate, relative to the
    reference device that the step-time model prices (1.0)."""
    memory_bytes: Reals
    """Shape [pipeline, data-parallel degree]: memory of the smallest device at that mesh coordinate."""
    embedding_cost_in_layers: float
    """Time of the embedding on stage 0, in units of an average layer; not in the step-time model."""

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.relative_speed)

    @property
    def layers_per_rank(self) -> Reals:
        """Layers on each rank of the pipeline."""
        return np.array([sum(self.stage_layers[rank :: self.ranks]) for rank in range(self.ranks)], dtype=np.float64)

    @property
    def stages_per_rank(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage on each rank of the pipeline."""
        return tuple(self.stage_layers[rank :: self.ranks] for rank in range(self.ranks))

    @property
    def is_even(self) -> bool:
        """Whether all devices are as fast as the reference and sequences are divided as equally as can be."""
        count = sum(self.sequences_per_replica)
        return bool((self.relative_speed == 1).all()) and self.sequences_per_replica == equal_shares(
            count, len(self.sequences_per_replica)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroup:
    """Candidates with one work assignment, and where they stand among all candidates."""

    indices: Counts
    """Positions of these candidates among all that were asked about."""
    candidates: Candidates
    """Their `layer_split` is the assignment's."""
    assignment: WorkAssignment | None
    """None where all devices are equal and nothing is named: then the step-time model needs no correction."""
    n_microbatches: Counts | None = None
    """Micro-batches per step, one entry per candidate, where devices with little memory make them more than an equal
    division would."""

    @property
    def needs_memory_per_device(self) -> bool:
        """Whether devices differ in memory or in work, so that each must be checked by itself
        (micro_batch_limits.py)."""
        assignment = self.assignment
        return assignment is not None and not (assignment.is_even and len(np.unique(assignment.memory_bytes)) == 1)

    def select(self, chosen: np.ndarray) -> CandidateGroup:
        """The candidates of the group where a mask holds."""
        rows = np.flatnonzero(chosen)
        numbers = None if self.n_microbatches is None else self.n_microbatches[rows]
        return replace(
            self, indices=self.indices[rows], candidates=self.candidates.select(rows), n_microbatches=numbers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAssigner:
    """Assigns the work of any layout to the devices of one cluster."""

    workload: Workload
    devices: DeviceSpeeds
    profile: SoftwareProfile
    named_shares: tuple[int, ...] = ()
    """Sequences per data-parallel rank that a person has named; empty where they are open."""

    def grouped(self, candidates: Candidates) -> list[CandidateGroup]:
        """All candidates, grouped by their work assignment."""
        everyone = np.arange(len(candidates))
        devices, c = self.devices, candidates
        plain = devices.are_equal and devices.have_equal_memory and not self.named_shares
        if c.layer_split == "published" or (plain and not devices.is_measured):
            return [CandidateGroup(indices=everyone, candidates=c, assignment=None)]
        keys = np.stack([c.pipeline, c.virtual, c.data_parallel_degree, c.context * c.tensor])
        if plain:  # the assignment differs only in how many layers each stage has
            keys = np.where(c.pipeline > 1, keys, 0)
        found = []
        for rows in group_equal_columns(keys):
            few = c.select(rows)
            if plain and int(few.pipeline[0]) == 1:
                found.append(CandidateGroup(indices=rows, candidates=few, assignment=None))
                continue
            for assignment, own in self._assignments(few):
                dealing = assignment.stage_layers if assignment.ranks > 1 else c.layer_split
                found.append(
                    CandidateGroup(
                        indices=rows[own],
                        candidates=replace(few.select(own), layer_split=dealing),
                        assignment=assignment,
                    )
                )
        return found

    def group_of(self, candidates: Candidates, index: int) -> CandidateGroup:
        """A single candidate with its assignment, which does not depend on the candidates beside it."""
        [group] = self.grouped(candidates.select(np.array([index])))
        return replace(group, indices=np.array([index]))

    def _assignments(self, few: Candidates) -> list[tuple[WorkAssignment, Counts]]:
        """The assignments of candidates of one shape, each with the positions of the candidates that it is for."""
        # Recomputation and the schedule decide how many layers a small device holds.
        knobs = np.stack([few.tensor, few.recompute, few.shard, few.shard_what, few.expert])
        if int(few.pipeline[0]) == 1 or self.devices.have_equal_memory:
            knobs = np.zeros_like(knobs)
        kinds = group_equal_columns(knobs)
        once = np.ones(len(kinds), dtype=np.int64)
        lean = replace(
            few.select(np.array([rows[0] for rows in kinds])),
            micro_sequences=once,
            schedule=SCHEDULES.index("1f1b") * once,
        )
        places: dict[WorkAssignment, list[Counts]] = {}
        for assignment, rows in zip(_assignments_of_shape(self, CandidatesKey(lean)), kinds, strict=True):
            places.setdefault(assignment, []).append(rows)
        return [(assignment, np.sort(np.concatenate(rows))) for assignment, rows in places.items()]


@lru_cache(maxsize=4096)
def _assignments_of_shape(assigner: WorkAssigner, lean: CandidatesKey) -> tuple[WorkAssignment, ...]:
    """The assignment of each candidate of one shape, with micro-batches of one sequence; equal assignments are one
    object. Cached: searches that differ in links alone ask for the same ones again."""
    c, devices = lean.candidates, assigner.devices
    pipeline, virtual, parts = int(c.pipeline[0]), int(c.virtual[0]), int(c.data_parallel_degree[0])
    place = pipeline, parts, -1
    speeds = np.array(devices.speeds).reshape(place).min(axis=2)
    memory_bytes = np.array(devices.memory_bytes, dtype=np.float64).reshape(place).min(axis=2)
    by_stage, lookup = speeds.sum(axis=1).tolist() * virtual, devices.embedding_cost_in_layers if pipeline > 1 else 0.0
    cut = pipeline > 1 and not isinstance(c.layer_split, tuple)
    limits: list[tuple[int, ...]] = [()] * len(c)
    if cut and not devices.have_equal_memory:
        limits = _most_layers_that_fit(assigner, c, memory_bytes.min(axis=1))
    made: dict[tuple[int, ...], WorkAssignment] = {}
    found = []
    for most in limits:
        layers = c.layer_split if isinstance(c.layer_split, tuple) else (assigner.workload.layers,)
        if cut:
            layers = balanced_stages_by_speed(
                assigner.workload.layers, by_stage, devices.head_cost_in_layers, lookup, most * virtual
            )
        if layers not in made:
            assignment = WorkAssignment(
                stage_layers=layers,
                sequences_per_replica=(),
                relative_speed=speeds,
                memory_bytes=memory_bytes,
                embedding_cost_in_layers=lookup,
            )
            sequences = assigner.named_shares or shares_if_worthwhile(
                assigner.workload.batch_sequences, _replica_speeds(assigner, assignment)
            )
            made[layers] = replace(assignment, sequences_per_replica=sequences)
        found.append(made[layers])
    return tuple(found)


def _replica_speeds(assigner: WorkAssigner, assignment: WorkAssignment) -> list[float]:
    """Speed of each data-parallel rank: that of its slowest pipeline stage."""
    costs = assignment.layers_per_rank.copy()
    costs[0] += assignment.embedding_cost_in_layers
    costs[-1] += assigner.devices.head_cost_in_layers
    return [float(speed) for speed in 1 / (costs[:, None] / assignment.relative_speed).max(axis=0)]


def _most_layers_that_fit(assigner: WorkAssigner, lean: Candidates, memory_bytes: Reals) -> list[tuple[int, ...]]:
    """For each candidate the layers that each stage of a rank can hold with micro-batches of one sequence."""
    ranks, virtual = int(lean.pipeline[0]), int(lean.virtual[0])
    once, twice = (bytes_per_rank(assigner.workload, lean, assigner.profile, [(n,) * virtual] * ranks) for n in (1, 2))
    each = np.maximum((twice - once) / virtual, 1.0)
    most = virtual + np.floor((memory_bytes[:, None] - once) / each)
    return [tuple(max(1, int(layers) // virtual) for layers in ranks_most) for ranks_most in most.T]


def bytes_per_rank(
    workload: Workload, candidates: Candidates, profile: SoftwareProfile, chunks: Sequence[tuple[int, ...]]
) -> Reals:
    """Bytes of a device on each pipeline rank whose stages hold so many layers: shape [ranks, candidates].

    Each rank is estimated as the first or last rank of a pipeline whose other ranks hold one layer per stage. Ranks in
    the middle count as the first one, which keeps the most micro-batches in flight.
    """
    requested = [(layers, rank == len(chunks) - 1) for rank, layers in enumerate(chunks)]
    answers = {
        (layers, last): estimate_memory(
            *workload_of_one_rank(workload, candidates, layers, last=last), profile, end="last" if last else "first"
        ).reserved
        for layers, last in dict.fromkeys(requested)
    }
    return np.stack([answers[each] for each in requested])


def workload_of_one_rank(
    workload: Workload, candidates: Candidates, chunks: tuple[int, ...], *, last: bool
) -> tuple[Workload, Candidates]:
    """The workload and candidates of a pipeline with so many layers per stage on its first or last rank, and one
    layer per stage on all others."""
    ranks = int(candidates.pipeline[0])
    stages = [1] * ranks * len(chunks)
    stages[ranks - 1 if last else 0 :: ranks] = chunks
    return replace(workload, layers=sum(stages)), replace(candidates, layer_split=tuple(stages))
