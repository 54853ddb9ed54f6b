"""The planner's choice: every layout listed, refused with a reason or priced, and of the fast ones the simplest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.cluster.cluster import Cluster
from plait.errors import PlaitError
from plait.layout import Layout
from plait.planner.heterogeneous.assignment import Deal, Dealer, Group
from plait.planner.heterogeneous.device_speeds import devices_of
from plait.planner.heterogeneous.host_permutations import Turned, torn
from plait.planner.heterogeneous.micro_batch_limits import Portion, Room, memory_on, portions_of, tightest, weighed
from plait.planner.memory.estimate import Memory, memory
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import PLAIT, Stack
from plait.planner.problem.stage_partition import dealt, head_layers
from plait.planner.problem.workload import Workload
from plait.planner.search.complexity import complexity
from plait.planner.search.enumeration import Pins, listed
from plait.planner.search.layout_cost import closed_form, memory_of, portions, step_seconds
from plait.planner.search.layout_kinds import kinds_without, leanest
from plait.planner.search.model_error import stated_error
from plait.planner.search.validity import UNCUT, check_shares
from plait.planner.step_time.network_model import roads
from plait.planner.step_time.step_time import Timing
from plait.units import format_bytes, format_count

TOO_LARGE = "needs more memory than a device has"
TORN = "a group that cuts matrices or sequences would straddle two machines"
NEEDLESS = "computes again what fits in memory anyway"


class DoesNotFit(PlaitError):
    """No layout fits the devices; with what is needed to find out what would."""

    def __init__(self, workload: Workload, cluster: Cluster, dealer: Dealer, least_bytes: float) -> None:
        have = format_bytes(min(island.device.memory_bytes for island in cluster.islands))
        super().__init__(
            f"a model of {format_count(workload.parameters)} parameters fits no layout of {cluster.name}: the "
            f"leanest needs {format_bytes(least_bytes)} a device, and {dealer.devices.smallest} has {have}"
        )
        self.workload, self.cluster, self.least_bytes = workload, cluster, least_bytes
        self.stack, self.smallest = dealer.stack, dealer.devices.smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """All layouts of a workload on a cluster with their prices; arrays over those that were priced."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    pins: Pins
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
    turned: Turned | None = None
    """Where `cluster` has the machines in a better order than they came in (host_order.py)."""

    @property
    def n_refused(self) -> int:
        return sum(self.refused.values())

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


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    stack: Stack = PLAIT,
    pins: Pins | None = None,
    tolerance: float | Literal["stated"] = "stated",
) -> Search:
    """The simplest layout within `tolerance` of the fastest; raises PlaitError where none can be or none fits.

    "stated" is the model's own error where nothing was measured: less is no evidence.
    """
    enough = stated_error(workload, cluster) if tolerance == "stated" else tolerance
    stack = stack.on(cluster)
    pins = pins or Pins()
    _check_pins(workload, pins)
    dealer = Dealer(workload=workload, devices=devices_of(workload, cluster, stack), stack=stack, named=pins.shares)
    found = listed(workload, cluster.devices, pins, stack.sends)
    refused = Counter(found.refused)
    seated = ~torn(cluster, found.candidates) if not pins.degrees else np.ones(len(found.candidates), dtype=bool)
    refused[TORN] += int((~seated).sum())
    room = Room()
    judged, fits, numbers = _held(dealer, found.candidates, room)
    if pins.degrees and not (seated & fits).any():
        room = Room.of_asked(cluster, stack)
        judged, fits, numbers = _held(dealer, found.candidates, room)
    refused[TOO_LARGE] += int((seated & ~fits).sum())
    if not (kept := seated & fits).any():
        raise DoesNotFit(workload, cluster, dealer, float(judged[seated].min() if seated.any() else judged.min()))
    needed = ~_needless(found.candidates, kept, numbers)
    refused[NEEDLESS] += int((kept & ~needed).sum())
    candidates, numbers = found.candidates.select(kept & needed), numbers[kept & needed]
    step_s = step_seconds(workload, cluster, candidates, stack, dealer, numbers)
    points = complexity(candidates, roads(cluster))
    fastest = int(step_s.argmin())
    return Search(
        workload=workload,
        cluster=cluster,
        stack=stack,
        pins=pins,
        tolerance=enough,
        candidates=candidates,
        step_s=step_s,
        judged=judged[kept & needed],
        numbers=numbers,
        points=points,
        chosen=simplest(step_s, points, enough),
        fastest=fastest,
        refused={reason: count for reason, count in refused.items() if count},
        leanest=leanest(found.candidates, judged),
        too_large=kinds_without(found.candidates, fits),
        dealer=dealer,
        room=room,
    )


def _check_pins(workload: Workload, pins: Pins) -> None:
    """Raise PlaitError, with the mend, where named stages or shares do not go with the named degrees and the batch."""
    if pins.stage_layers and pins.degrees.get("pipeline", 1) == 1:
        raise PlaitError(UNCUT)
    if pins.shares and not pins.degrees:
        raise PlaitError(
            f"layout.shares = {list(pins.shares)} deals batches out to copies or shards that nobody named; name "
            "layout.replicate or layout.shard, too, or leave the shares out"
        )
    parts = Layout(replicate=pins.degrees.get("replicate", 1), shard=pins.degrees.get("shard", 1))
    check_shares(pins.shares, parts, workload.batch_sequences)


def _held(dealer: Dealer, candidates: Candidates, room: Room) -> tuple[Reals, NDArray[np.bool_], Counts]:
    """Bytes on the tightest device of every candidate when shares grow, whether each of its devices holds what falls
    to it, and the micro-batches that this makes."""
    stack, workload = dealer.stack, dealer.workload
    judged, fits = np.empty(len(candidates)), np.empty(len(candidates), dtype=bool)
    numbers = -(-workload.batch_sequences // (candidates.batch_parts * candidates.micro_sequences))
    for group in dealer.groups(candidates):
        if not group.unlike:
            needed = memory_of(workload, group.candidates, stack)
            have = room.on(np.array(min(dealer.devices.memory_bytes), dtype=np.float64))
            judged[group.places], fits[group.places] = needed, needed <= have
            continue
        held = weighed(workload, group, stack, room)
        judged[group.places], fits[group.places], numbers[group.places] = held.most, held.fits, held.numbers
    return judged, fits, numbers


def simplest(step_s: Reals, points: Counts, tolerance: float) -> int:
    """The place of the simplest within the tolerance of the fastest; of equally simple ones the fastest."""
    enough = np.flatnonzero(step_s <= step_s.min() * (1 + tolerance))
    return int(enough[np.lexsort((step_s[enough], points[enough]))[0]])


def _needless(candidates: Candidates, kept: np.ndarray, numbers: Counts) -> np.ndarray:
    """Where more is computed again than in the row before, though that fits, in no more micro-batches, and differs in
    nothing else."""
    first = candidates.recompute[0]
    if len(np.unique(candidates.recompute)) == 1:
        return np.zeros(len(candidates), dtype=bool)
    assert first == 0
    own = numbers.reshape(-1, 3)
    before = np.minimum.accumulate(np.where(kept, numbers, np.iinfo(np.int64).max).reshape(-1, 3), axis=1)
    none = np.zeros(len(own), dtype=bool)
    return np.stack([none, before[:, 0] <= own[:, 1], before[:, 1] <= own[:, 2]], axis=1).ravel()
