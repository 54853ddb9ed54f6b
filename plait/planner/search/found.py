"""What a search has found: every layout that fits with its cost, and the one that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.planner.heterogeneous.assignment import CandidateGroup, WorkAssigner, WorkAssignment
from plait.planner.heterogeneous.host_permutations import HostOrder
from plait.planner.heterogeneous.micro_batch_limits import replica_memory_of, tightest_replica
from plait.planner.heterogeneous.replica_memory import MemoryBudget, ReplicaMemory, memory_of_rank
from plait.planner.memory.estimate import MemoryEstimate, estimate_memory
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import stages_of
from plait.planner.problem.workload import Workload
from plait.planner.search.enumeration import Constraints
from plait.planner.search.feasibility import sparing_budget
from plait.planner.search.layout_cost import batches_of_candidates, closed_form_step_time
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The devices of a cluster that a layout does not use, seen from the cluster."""

    cluster: Cluster
    """All devices."""
    nodes: tuple[int, ...]
    """Numbers of the nodes that are used, in the cluster's order."""
    whole: Search
    """The search over all devices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Search:
    """All layouts of a workload on a cluster with their costs; arrays have one entry per priced layout.

    Equal to itself alone, and so a key by which what follows from it is kept.
    """

    workload: Workload
    cluster: Cluster
    profile: SoftwareProfile
    constraints: Constraints
    """Values that the user has given."""
    tolerance: float
    """Layouts whose step time differs by less than this share count as equally fast."""
    candidates: Candidates
    step_s: Reals
    """Seconds of a step."""
    judged_bytes: Reals
    """Bytes on the device with least room left, by which a layout was found to fit; on unequal devices with shares
    that have grown."""
    n_microbatches: Counts
    """Micro-batches per step of the data-parallel rank that has most."""
    complexity: Counts
    """Points of complexity (complexity.py)."""
    chosen: int
    """Index of the simplest layout within the tolerance of the fastest; of equally simple ones the fastest."""
    fastest: int
    """Index of the fastest layout."""
    refused: Mapping[str, int]
    """How many layouts were not priced, by reason."""
    leanest_bytes: Mapping[int, float]
    """Bytes per device of the leanest layout of every kind (layout_kinds.py), priced or not."""
    kinds_too_large: frozenset[int]
    """The kinds of which no layout fits."""
    assigner: WorkAssigner
    memory_budget: MemoryBudget
    host_order: HostOrder | None = None
    """The permutation of hosts where `cluster` has them in a better order than they were given in; else None."""
    with_layout_open: Search | PlaitError | None = None
    """Where the recipe names a part of the layout: what the planner would choose for this job on all devices if it
    named nothing, or why it would find nothing."""
    left_out: LeftOut | None = None
    """Where `cluster` is only a part of the machines: the rest, which would not make a step shorter; else None."""

    @property
    def chosen_step_s(self) -> float:
        """Seconds of a step with the chosen layout."""
        return float(self.step_s[self.chosen])

    @property
    def best_step_s(self) -> float:
        """Seconds of a step with the fastest layout."""
        return float(self.step_s[self.fastest])

    @property
    def hosts_in_rank_order(self) -> tuple[int, ...]:
        """For each place in the order of ranks the number of the host that takes it, those left out not among them;
        empty where all hosts stand in the order that they were given in."""
        order = self.host_order.hosts if self.host_order else ()
        if self.left_out is None or len(self.left_out.nodes) == self.left_out.cluster.n_nodes:
            return order
        return tuple(self.left_out.nodes[at] for at in order) or self.left_out.nodes

    @property
    def n_refused(self) -> int:
        return sum(self.refused.values())

    def with_layout(self, other: Search, index: int) -> Search:
        """This search with one layout of another, of the same job on the same devices, as the chosen one."""
        if other is self:
            return self if index == self.chosen else replace(self, chosen=index)
        if (same := self.candidates.is_equal_to(other.candidates, index)).any():
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

    @property
    def cost_inputs(self) -> CostInputs:
        """The inputs of the step times of all priced layouts."""
        return CostInputs(
            workload=self.workload, cluster=self.cluster, candidates=self.candidates, profile=self.profile
        )

    def assignment(self, index: int) -> WorkAssignment | None:
        """Layers and sequences of each rank in one layout; None where all devices are equal and nothing is named."""
        return self.assigner.group_of(self.candidates, index).assignment

    def stage_layers(self, index: int) -> tuple[int, ...]:
        """Layers of each stage of one layout's pipeline."""
        one = self.assigner.group_of(self.candidates, index).candidates
        stages = int(one.pipeline[0]) * int(one.virtual[0])
        return stages_of(self.workload, stages, one.layer_split)

    def step_time(self, index: int) -> StepTime:
        """The items of one layout's step time, in seconds."""
        one = replace(self.assigner.group_of(self.candidates, index), n_microbatches=self.n_microbatches[[index]])
        return closed_form_step_time(self.cost_inputs, one)

    def bytes_per_device(self, index: int) -> float:
        """Bytes that one layout needs on the device with least room left."""
        held = self._held(index)[1]
        if not held:
            return float(self.judged_bytes[index])
        [part], [rank] = tightest_replica(held)
        return float(held[part].needed_bytes[rank, 0])

    def fits_sparingly(self, index: int) -> bool:
        """Whether one layout leaves the memory forecast's own error free on the device with least room left."""
        usable = sparing_budget(self.workload, self.cluster).usable_bytes(np.array(self.capacity_bytes(index)))
        return self.bytes_per_device(index) <= float(usable)

    def memory(self, index: int) -> MemoryEstimate:
        """The items of one layout's memory on the device with least room left."""
        one, held = self._held(index)
        if not held:
            [(_, whole)] = batches_of_candidates(self.workload, one.candidates)
            return estimate_memory(whole, one.candidates, self.profile)
        [part], [rank] = tightest_replica(held)
        return memory_of_rank(self.workload, one.candidates, self.profile, held[part], int(rank))

    def capacity_bytes(self, index: int) -> float:
        """Memory of the device with least room left."""
        one, held = self._held(index)
        if not held:
            return min(self.assigner.devices.memory_bytes)
        assert one.assignment is not None
        [part], [rank] = tightest_replica(held)
        return float(one.assignment.memory_bytes[rank, held[part].replicas[0]])

    def memory_of_fullest(self, index: int) -> MemoryEstimate:
        """The items of memory on the device that needs most, which need not be the one with least room left."""
        one, held = self._held(index)
        if not held:
            return self.memory(index)
        places = [(replica, rank) for replica in held for rank in range(len(replica.capacity_bytes))]
        replica, rank = max(places, key=lambda place: place[0].needed_bytes[place[1], 0])
        return memory_of_rank(self.workload, one.candidates, self.profile, replica, rank)

    def micro_sequences(self, index: int) -> tuple[int, ...]:
        """Sequences of a micro-batch of each data-parallel rank, at most; a single number where all ranks have the
        same."""
        held = self._held(index)[1]
        by_part = {int(part): int(replica.limit[0]) for replica in held for part in replica.replicas}
        limits = tuple(by_part[part] for part in sorted(by_part)) or (int(self.candidates.micro_sequences[index]),)
        return limits if len(set(limits)) > 1 else limits[:1]

    def _held(self, index: int) -> tuple[CandidateGroup, list[ReplicaMemory]]:
        """One layout, and what its data-parallel ranks need where devices are unequal."""
        one = self.assigner.group_of(self.candidates, index)
        if not one.needs_memory_per_device:
            return one, []
        return one, replica_memory_of(self.workload, one, self.profile, self.memory_budget)
