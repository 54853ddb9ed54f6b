"""What each device of a layout does where devices are unequal: shares of the batch, layers of the pipeline's stages."""

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
    indices_of_equal_columns,
)
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import balanced_stages_by_speed
from plait.planner.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkAssignment:
    """Who does what in layouts of one weave: same pipeline, same parts of the batch, same devices in each of them."""

    stage_layers: tuple[int, ...]
    """Of each stage, in the model's order; all layers where there is no pipeline."""
    sequences_per_replica: tuple[int, ...]
    """Sequences of each part of the batch in a step."""
    relative_speed: Reals
    """(pipeline, parts): of the slowest device at each place, where 1 is what a device was priced with."""
    memory_bytes: Reals
    """(pipeline, parts): of the smallest device there."""
    embedding_cost_in_layers: float
    """What the embedding costs the first stage, in average layers, beyond what pricing knows of."""

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
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
        """Whether all devices are priced alike and all parts of the batch are as equal as can be."""
        count = sum(self.sequences_per_replica)
        return bool((self.relative_speed == 1).all()) and self.sequences_per_replica == equal_shares(
            count, len(self.sequences_per_replica)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroup:
    """Candidates of one deal and their places among all; without a deal devices are equal and nothing is named."""

    indices: Counts
    candidates: Candidates
    """Their `dealing` is the deal's."""
    assignment: WorkAssignment | None
    n_microbatches: Counts | None = None
    """Micro-batches that its parts of the batch take, where devices that hold little make it more."""

    @property
    def needs_memory_per_device(self) -> bool:
        """Whether its devices do or have so unlike things that memory is asked for one by one
        (micro_batch_limits.py)."""
        deal = self.assignment
        return deal is not None and not (deal.is_even and len(np.unique(deal.memory_bytes)) == 1)

    def select(self, chosen: np.ndarray) -> CandidateGroup:
        """Those where a mask over the group holds."""
        rows = np.flatnonzero(chosen)
        numbers = None if self.n_microbatches is None else self.n_microbatches[rows]
        return replace(
            self, indices=self.indices[rows], candidates=self.candidates.select(rows), n_microbatches=numbers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAssigner:
    """Deals a workload to the devices of a cluster, whatever the layout."""

    workload: Workload
    devices: DeviceSpeeds
    stack: SoftwareProfile
    named_shares: tuple[int, ...] = ()
    """Shares that a person has named."""

    def grouped(self, candidates: Candidates) -> list[CandidateGroup]:
        """All candidates with who does what, in groups of the same deal."""
        everyone = np.arange(len(candidates))
        devices, c = self.devices, candidates
        plain = devices.are_equal and devices.have_equal_memory and not self.named_shares
        if c.layer_split == "published" or (plain and not devices.is_measured):
            return [CandidateGroup(indices=everyone, candidates=c, assignment=None)]
        keys = np.stack([c.pipeline, c.virtual, c.data_parallel_degree, c.context * c.tensor])
        if plain:  # only stages are cut otherwise than by the weights of the head
            keys = np.where(c.pipeline > 1, keys, 0)
        found = []
        for rows in indices_of_equal_columns(keys):
            few = c.select(rows)
            if plain and int(few.pipeline[0]) == 1:
                found.append(CandidateGroup(indices=rows, candidates=few, assignment=None))
                continue
            for deal, own in self._deals(few):
                dealing = deal.stage_layers if deal.ranks > 1 else c.layer_split
                found.append(
                    CandidateGroup(
                        indices=rows[own], candidates=replace(few.select(own), layer_split=dealing), assignment=deal
                    )
                )
        return found

    def group_of(self, candidates: Candidates, index: int) -> CandidateGroup:
        """A single candidate, as it was priced: a deal does not hang on who else is looked at."""
        [group] = self.grouped(candidates.select(np.array([index])))
        return replace(group, indices=np.array([index]))

    def _deals(self, few: Candidates) -> list[tuple[WorkAssignment, Counts]]:
        """The deals of candidates of one shape, each with the places of those that it is for."""
        # What is kept decides how many layers a small device holds.
        knobs = np.stack([few.tensor, few.recompute, few.shard, few.shard_what, few.expert])
        if int(few.pipeline[0]) == 1 or self.devices.have_equal_memory:
            knobs = np.zeros_like(knobs)
        kinds = indices_of_equal_columns(knobs)
        once = np.ones(len(kinds), dtype=np.int64)
        lean = replace(
            few.select(np.array([rows[0] for rows in kinds])),
            micro_sequences=once,
            schedule=SCHEDULES.index("1f1b") * once,
        )
        places: dict[WorkAssignment, list[Counts]] = {}
        for deal, rows in zip(_dealt(self, CandidatesKey(lean)), kinds, strict=True):
            places.setdefault(deal, []).append(rows)
        return [(deal, np.sort(np.concatenate(rows))) for deal, rows in places.items()]


@lru_cache(maxsize=4096)
def _dealt(dealer: WorkAssigner, lean: CandidatesKey) -> tuple[WorkAssignment, ...]:
    """The deal of each of some candidates of one shape, which take one sequence at a time; equal deals are one object.
    Searches that differ in links alone ask for the same ones again."""
    c, devices = lean.candidates, dealer.devices
    pipeline, virtual, parts = int(c.pipeline[0]), int(c.virtual[0]), int(c.data_parallel_degree[0])
    place = pipeline, parts, -1
    speeds = np.array(devices.speeds).reshape(place).min(axis=2)
    memory_bytes = np.array(devices.memory_bytes, dtype=np.float64).reshape(place).min(axis=2)
    by_stage, lookup = speeds.sum(axis=1).tolist() * virtual, devices.embedding_cost_in_layers if pipeline > 1 else 0.0
    cut = pipeline > 1 and not isinstance(c.layer_split, tuple)
    limits: list[tuple[int, ...]] = [()] * len(c)
    if cut and not devices.have_equal_memory:
        limits = _most(dealer, c, memory_bytes.min(axis=1))
    made: dict[tuple[int, ...], WorkAssignment] = {}
    found = []
    for most in limits:
        layers = c.layer_split if isinstance(c.layer_split, tuple) else (dealer.workload.layers,)
        if cut:
            layers = balanced_stages_by_speed(
                dealer.workload.layers, by_stage, devices.head_cost_in_layers, lookup, most * virtual
            )
        if layers not in made:
            deal = WorkAssignment(
                stage_layers=layers,
                sequences_per_replica=(),
                relative_speed=speeds,
                memory_bytes=memory_bytes,
                embedding_cost_in_layers=lookup,
            )
            sequences = dealer.named_shares or shares_if_worthwhile(
                dealer.workload.batch_sequences, _parts(dealer, deal)
            )
            made[layers] = replace(deal, sequences_per_replica=sequences)
        found.append(made[layers])
    return tuple(found)


def _parts(dealer: WorkAssigner, deal: WorkAssignment) -> list[float]:
    """The speed of each part of the batch: that of its slowest stage."""
    costs = deal.layers_per_rank.copy()
    costs[0] += deal.embedding_cost_in_layers
    costs[-1] += dealer.devices.head_cost_in_layers
    return [float(speed) for speed in 1 / (costs[:, None] / deal.relative_speed).max(axis=0)]


def _most(dealer: WorkAssigner, lean: Candidates, memory_bytes: Reals) -> list[tuple[int, ...]]:
    """For each candidate the layers that each stage of a rank can hold, one sequence at a time."""
    ranks, virtual = int(lean.pipeline[0]), int(lean.virtual[0])
    once, twice = (bytes_per_rank(dealer.workload, lean, dealer.stack, [(n,) * virtual] * ranks) for n in (1, 2))
    each = np.maximum((twice - once) / virtual, 1.0)
    most = virtual + np.floor((memory_bytes[:, None] - once) / each)
    return [tuple(max(1, int(layers) // virtual) for layers in ranks_most) for ranks_most in most.T]


def bytes_per_rank(
    workload: Workload, candidates: Candidates, stack: SoftwareProfile, chunks: Sequence[tuple[int, ...]]
) -> Reals:
    """Bytes of a device on each rank of pipelines of one shape whose stages hold so many layers: (ranks, candidates).

    Asked of estimate.py rank by rank: as a pipeline whose other ranks hold as little as can be. Ranks in the middle
    count as the first one, which keeps most micro-batches.
    """
    asked = [(layers, rank == len(chunks) - 1) for rank, layers in enumerate(chunks)]
    answers = {
        (layers, last): estimate_memory(
            *workload_of_one_rank(workload, candidates, layers, last=last), stack, end="last" if last else "first"
        ).reserved
        for layers, last in dict.fromkeys(asked)
    }
    return np.stack([answers[each] for each in asked])


def workload_of_one_rank(
    workload: Workload, candidates: Candidates, chunks: tuple[int, ...], *, last: bool
) -> tuple[Workload, Candidates]:
    """Such a pipeline with stages of so many layers on the first or the last rank, and one layer in all others."""
    ranks = int(candidates.pipeline[0])
    stages = [1] * ranks * len(chunks)
    stages[ranks - 1 if last else 0 :: ranks] = chunks
    return replace(workload, layers=sum(stages)), replace(candidates, layer_split=tuple(stages))
