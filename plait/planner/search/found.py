"""What a search has found: every layout that fits with its cost, and the one that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from plait.cluster.cluster import Cluster
from plait.planner.heterogeneous.assignment import CandidateGroup, WorkAssigner, WorkAssignment
from plait.planner.heterogeneous.host_permutations import HostOrder
from plait.planner.heterogeneous.micro_batch_limits import (
    MemoryBudget,
    ReplicaMemory,
    memory_of_rank,
    replica_memory_of,
    tightest,
)
from plait.planner.memory.estimate import MemoryEstimate, estimate_memory
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import head_cost_in_layers, layers_of_stages
from plait.planner.problem.workload import Workload
from plait.planner.search.constraints import Constraints
from plait.planner.search.layout_cost import batches_of_candidates, closed_form_step_time
from plait.planner.step_time.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """All layouts of a workload on a cluster with their prices; arrays over those that were priced."""

    workload: Workload
    cluster: Cluster
    stack: SoftwareProfile
    constraints: Constraints
    """What a person has settled."""
    tolerance: float
    candidates: Candidates
    step_s: Reals
    judged_bytes: Reals
    """Bytes by which its fit was judged, on the device that has least room left: where devices are unlike, with shares
    that have grown."""
    n_microbatches: Counts
    """Micro-batches of the part of the batch that takes most."""
    complexity: Counts
    """Complexity."""
    chosen: int
    """The simplest within the tolerance of the fastest, the fastest of those."""
    fastest: int
    refused: Mapping[str, int]
    """How many layouts were not priced, by reason."""
    leanest_bytes: Mapping[int, float]
    """Bytes per device of the leanest layout of every kind (layout_kinds.py), priced or not, judged as above."""
    kinds_too_large: frozenset[int]
    """The kinds of which none fits."""
    assigner: WorkAssigner
    memory_budget: MemoryBudget
    host_order: HostOrder | None = None
    """Where `cluster` has the machines in a better order than they came in (host_order.py)."""

    @property
    def n_refused(self) -> int:
        return sum(self.refused.values())

    def with_layout(self, other: Search, index: int) -> Search:
        """This search with one layout of another, of the same job on the same devices, as the chosen one."""
        if other is self:
            return replace(self, chosen=index)
        if (same := self.candidates.equal_to(other.candidates, index)).any():
            return replace(self, chosen=int(same.argmax()), memory_budget=other.memory_budget)
        one = {
            name: getattr(other, name)[[index]] for name in ("step_s", "judged_bytes", "n_microbatches", "complexity")
        }
        step_s = np.append(self.step_s, one["step_s"])
        return replace(
            self,
            candidates=self.candidates.with_row(other.candidates, index),
            step_s=step_s,
            judged_bytes=np.append(self.judged_bytes, other.judged_bytes[index]),
            n_microbatches=np.append(self.n_microbatches, other.n_microbatches[index]),
            complexity=np.append(self.complexity, other.complexity[index]),
            chosen=len(self.step_s),
            fastest=int(step_s.argmin()),
            memory_budget=other.memory_budget,
        )

    def assignment(self, index: int) -> WorkAssignment | None:
        """Who does what in one layout; None where all devices are alike and nothing is named."""
        return self.assigner.group_of(self.candidates, index).assignment

    def stage_layers(self, index: int) -> tuple[int, ...]:
        """Layers of each stage of one layout's pipeline."""
        one = self.assigner.group_of(self.candidates, index).candidates
        stages = int(one.pipeline[0]) * int(one.virtual[0])
        return layers_of_stages(self.workload.layers, stages, head_cost_in_layers(self.workload), one.layer_split)

    def step_time(self, index: int) -> StepTime:
        """The items of one layout's time."""
        one = replace(self.assigner.group_of(self.candidates, index), n_microbatches=self.n_microbatches[[index]])
        return closed_form_step_time(self.workload, self.cluster, self.stack, one)

    def bytes_per_device(self, index: int) -> float:
        """Bytes of one layout on the device that has least room left."""
        held = self._held(index)[1]
        if not held:
            return float(self.judged_bytes[index])
        [part], [rank] = tightest(held)
        return float(held[part].needed[rank, 0])

    def memory(self, index: int) -> MemoryEstimate:
        """The items of one layout's memory on the device that has least room left."""
        one, held = self._held(index)
        if not held:
            [(_, whole)] = batches_of_candidates(self.workload, one.candidates)
            return estimate_memory(whole, one.candidates, self.stack)
        assert one.assignment is not None
        [part], [rank] = tightest(held)
        return memory_of_rank(self.workload, one.candidates, self.stack, one.assignment, held[part], int(rank))

    def capacity_bytes(self, index: int) -> float:
        """Bytes of that device."""
        one, held = self._held(index)
        if not held:
            return min(self.assigner.devices.memory_bytes)
        assert one.assignment is not None
        [part], [rank] = tightest(held)
        return float(one.assignment.memory_bytes[rank, held[part].parts[0]])

    def memory_of_fullest(self, index: int) -> MemoryEstimate:
        """The items on the device that holds most, which need not be the one that has least room left."""
        one, held = self._held(index)
        if not held:
            return self.memory(index)
        places = [(portion, rank) for portion in held for rank in range(len(portion.capacity_bytes))]
        portion, rank = max(places, key=lambda place: place[0].needed_bytes[place[1], 0])
        assert one.assignment is not None
        return memory_of_rank(self.workload, one.candidates, self.stack, one.assignment, portion, rank)

    def micro_sequences(self, index: int) -> tuple[int, ...]:
        """Sequences that each part of the batch takes at a time at most; a single number where all take as many."""
        held = self._held(index)[1]
        by_part = {int(part): int(portion.limit[0]) for portion in held for part in portion.replicas}
        limits = tuple(by_part[part] for part in sorted(by_part)) or (int(self.candidates.micro_sequences[index]),)
        return limits if len(set(limits)) > 1 else limits[:1]

    def _held(self, index: int) -> tuple[CandidateGroup, list[ReplicaMemory]]:
        """One layout, and what its parts of the batch hold where devices are unlike."""
        one = self.assigner.group_of(self.candidates, index)
        if not one.needs_memory_per_device:
            return one, []
        return one, replica_memory_of(self.workload, one, self.stack, self.memory_budget)
