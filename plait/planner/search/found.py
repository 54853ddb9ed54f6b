"""What a search has found: every layout that fits with its cost, and the one that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from plait.cluster.cluster import Cluster
from plait.planner.heterogeneous.assignment import Deal, Dealer, Group
from plait.planner.heterogeneous.host_permutations import HostOrder
from plait.planner.heterogeneous.micro_batch_limits import Portion, Room, memory_on, portions_of, tightest
from plait.planner.memory.estimate import Memory, memory
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import Stack
from plait.planner.problem.stage_partition import dealt, head_layers
from plait.planner.problem.workload import Workload
from plait.planner.search.constraints import Constraints
from plait.planner.search.layout_cost import closed_form, portions
from plait.planner.step_time.step_time import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """All layouts of a workload on a cluster with their prices; arrays over those that were priced."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    constraints: Constraints
    """What a person has settled."""
    tolerance: float
    candidates: Candidates
    step_s: Reals
    judged: Reals
    """Bytes by which its fit was judged, on the device that has least room left: where devices are unlike, with shares
    that have grown."""
    numbers: Counts
    """Micro-batches of the part of the batch that takes most."""
    points: Counts
    """Complexity."""
    chosen: int
    """The simplest within the tolerance of the fastest, the fastest of those."""
    fastest: int
    refused: Mapping[str, int]
    """How many layouts were not priced, by reason."""
    leanest: Mapping[int, float]
    """Bytes per device of the leanest layout of every kind (layout_kinds.py), priced or not, judged as above."""
    too_large: frozenset[int]
    """The kinds of which none fits."""
    dealer: Dealer
    room: Room
    turned: HostOrder | None = None
    """Where `cluster` has the machines in a better order than they came in (host_order.py)."""

    @property
    def n_refused(self) -> int:
        return sum(self.refused.values())

    def with_layout(self, other: Search, index: int) -> Search:
        """This search with one layout of another, of the same job on the same devices, as the chosen one."""
        if other is self:
            return replace(self, chosen=index)
        if (same := self.candidates.equal_to(other.candidates, index)).any():
            return replace(self, chosen=int(same.argmax()), room=other.room)
        one = {name: getattr(other, name)[[index]] for name in ("step_s", "judged", "numbers", "points")}
        step_s = np.append(self.step_s, one["step_s"])
        return replace(
            self,
            candidates=self.candidates.with_row(other.candidates, index),
            step_s=step_s,
            judged=np.append(self.judged, one["judged"]),
            numbers=np.append(self.numbers, one["numbers"]),
            points=np.append(self.points, one["points"]),
            chosen=len(self.step_s),
            fastest=int(step_s.argmin()),
            room=other.room,
        )

    def deal(self, index: int) -> Deal | None:
        """Who does what in one layout; None where all devices are alike and nothing is named."""
        return self.dealer.one(self.candidates, index).deal

    def stage_layers(self, index: int) -> tuple[int, ...]:
        """Layers of each stage of one layout's pipeline."""
        one = self.dealer.one(self.candidates, index).candidates
        stages = int(one.pipeline[0]) * int(one.virtual[0])
        return dealt(self.workload.layers, stages, head_layers(self.workload), one.dealing)

    def timing(self, index: int) -> Timing:
        """The items of one layout's time."""
        one = replace(self.dealer.one(self.candidates, index), numbers=self.numbers[[index]])
        return closed_form(self.workload, self.cluster, self.stack, one)

    def reserved(self, index: int) -> float:
        """Bytes of one layout on the device that has least room left."""
        held = self._held(index)[1]
        if not held:
            return float(self.judged[index])
        [part], [rank] = tightest(held)
        return float(held[part].needed[rank, 0])

    def memory(self, index: int) -> Memory:
        """The items of one layout's memory on the device that has least room left."""
        one, held = self._held(index)
        if not held:
            [(_, whole)] = portions(self.workload, one.candidates)
            return memory(whole, one.candidates, self.stack)
        assert one.deal is not None
        [part], [rank] = tightest(held)
        return memory_on(self.workload, one.candidates, self.stack, one.deal, held[part], int(rank))

    def capacity(self, index: int) -> float:
        """Bytes of that device."""
        one, held = self._held(index)
        if not held:
            return min(self.dealer.devices.memory_bytes)
        assert one.deal is not None
        [part], [rank] = tightest(held)
        return float(one.deal.memory_bytes[rank, held[part].parts[0]])

    def fullest(self, index: int) -> Memory:
        """The items on the device that holds most, which need not be the one that has least room left."""
        one, held = self._held(index)
        if not held:
            return self.memory(index)
        places = [(portion, rank) for portion in held for rank in range(len(portion.have))]
        portion, rank = max(places, key=lambda place: place[0].needed[place[1], 0])
        assert one.deal is not None
        return memory_on(self.workload, one.candidates, self.stack, one.deal, portion, rank)

    def at_once(self, index: int) -> tuple[int, ...]:
        """Sequences that each part of the batch takes at a time at most; a single number where all take as many."""
        held = self._held(index)[1]
        by_part = {int(part): int(portion.limit[0]) for portion in held for part in portion.parts}
        limits = tuple(by_part[part] for part in sorted(by_part)) or (int(self.candidates.micro_sequences[index]),)
        return limits if len(set(limits)) > 1 else limits[:1]

    def _held(self, index: int) -> tuple[Group, list[Portion]]:
        """One layout, and what its parts of the batch hold where devices are unlike."""
        one = self.dealer.one(self.candidates, index)
        if not one.unlike:
            return one, []
        return one, portions_of(self.workload, one, self.stack, self.room)
