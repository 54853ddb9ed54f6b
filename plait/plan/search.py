"""The planner's choice: every layout listed, refused with a reason or priced, and of the fast ones the simplest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.cluster.cluster import Cluster
from plait.errors import PlaitError
from plait.layout import Layout
from plait.plan.candidates import Candidates, Counts, Reals
from plait.plan.collectives import roads
from plait.plan.complexity import complexity
from plait.plan.deal import Deal, Dealer, lone_stage, stage_bytes
from plait.plan.evidence import stated_error
from plait.plan.fit import UNCUT, check_shares
from plait.plan.kinds import kinds
from plait.plan.listing import Pins, listed
from plait.plan.memory import RESERVED, Memory, memory
from plait.plan.pricing import bytes_by_rank, closed_form, memory_of, portions, step_seconds
from plait.plan.seats import torn
from plait.plan.speeds import devices_of
from plait.plan.stack import PLAIT, Stack
from plait.plan.stages import dealt, head_layers
from plait.plan.timing import Timing
from plait.plan.workload import Workload
from plait.units import format_bytes, format_count

TOO_LARGE = "needs more memory than a device has"
TORN = "a group that cuts matrices or sequences would straddle two machines"
NEEDLESS = "computes again what fits in memory anyway"


class DoesNotFit(PlaitError):
    """No layout fits the devices; with what is needed to find out what would."""

    def __init__(self, workload: Workload, cluster: Cluster, stack: Stack, least_bytes: float) -> None:
        have = min(island.device.memory_bytes for island in cluster.islands)
        super().__init__(
            f"a model of {format_count(workload.parameters)} parameters fits no layout of {cluster.name}: the "
            f"leanest needs {format_bytes(least_bytes)} a device, and the smallest device has {format_bytes(have)}"
        )
        self.workload, self.cluster, self.stack, self.least_bytes = workload, cluster, stack, least_bytes


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
    reserved: Reals
    """Bytes per device."""
    points: Counts
    """Complexity."""
    chosen: int
    """The simplest within the tolerance of the fastest, the fastest of those."""
    fastest: int
    refused: Mapping[str, int]
    """How many layouts were not priced, by reason."""
    leanest: Mapping[int, float]
    """Bytes per device of the leanest layout of every kind (kinds.py), priced or not."""
    dealer: Dealer

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
        return closed_form(self.workload, self.cluster, self.stack, self.dealer.one(self.candidates, index))

    def memory(self, index: int) -> Memory:
        """The items of one layout's memory on the fullest device."""
        one = self.dealer.one(self.candidates, index)
        [(_, whole)] = portions(self.workload, one.candidates)
        if one.by_rank:
            assert one.deal is not None
            held = one.deal.held
            rank = int(stage_bytes(whole, one.candidates, self.stack, held)[:, 0].argmax())
            end = -1 if rank == len(held) - 1 else 0
            return memory(*lone_stage(whole, one.candidates, int(held[rank]), end), self.stack)
        return memory(whole, one.candidates, self.stack)

    def capacity(self, index: int) -> float:
        """Bytes of the smallest device that a layout must fit, of those that hold most of it."""
        one = self.dealer.one(self.candidates, index)
        if not one.by_rank:
            return min(self.dealer.devices.memory_bytes)
        assert one.deal is not None
        [(_, whole)] = portions(self.workload, one.candidates)
        needed = stage_bytes(whole, one.candidates, self.stack, one.deal.held)[:, 0]
        return float(one.deal.memory_bytes.min(axis=1)[needed.argmax()])


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
    reserved, fits = _held(dealer, cluster, found.candidates, "free")
    if pins.degrees and not (seated & fits).any():
        reserved, fits = _held(dealer, cluster, found.candidates, "asked")
    kept = seated & fits
    refused[TOO_LARGE] += int((seated & ~fits).sum())
    if not kept.any():
        raise DoesNotFit(workload, cluster, stack, float(reserved.min()))
    needed = ~_needless(found.candidates, kept)
    refused[NEEDLESS] += int((kept & ~needed).sum())
    candidates = found.candidates.select(kept & needed)
    step_s = step_seconds(workload, cluster, candidates, stack, dealer)
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
        reserved=reserved[kept & needed],
        points=points,
        chosen=simplest(step_s, points, enough),
        fastest=fastest,
        refused={reason: count for reason, count in refused.items() if count},
        leanest=_leanest(found.candidates, reserved),
        dealer=dealer,
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


def _held(
    dealer: Dealer, cluster: Cluster, candidates: Candidates, layout: Literal["asked", "free"]
) -> tuple[Reals, NDArray[np.bool_]]:
    """Bytes on the fullest device of every candidate, and whether each of its devices holds what falls to it."""
    stack, workload = dealer.stack, dealer.workload
    reserved, fits = np.empty(len(candidates)), np.empty(len(candidates), dtype=bool)
    gpus = any(island.device.kind != "cpu" for island in cluster.islands)

    def room(memory_bytes: Reals) -> Reals:
        """One that was asked for is refused only where it cannot run even if a GPU's allocator wastes nothing."""
        return RESERVED * memory_bytes + stack.outside_bytes if gpus and layout == "asked" else memory_bytes

    for group in dealer.groups(candidates):
        if group.by_rank:
            assert group.deal is not None
            needed = bytes_by_rank(workload, group, stack)
            have = group.deal.memory_bytes.min(axis=1)
        else:
            needed = memory_of(workload, group.candidates, stack)[None]
            have = np.array([min(dealer.devices.memory_bytes)], dtype=np.float64)
        reserved[group.places] = needed.max(axis=0)
        fits[group.places] = (needed <= room(have)[:, None]).all(axis=0)
    return reserved, fits


def simplest(step_s: Reals, points: Counts, tolerance: float) -> int:
    """The place of the simplest within the tolerance of the fastest; of equally simple ones the fastest."""
    enough = np.flatnonzero(step_s <= step_s.min() * (1 + tolerance))
    return int(enough[np.lexsort((step_s[enough], points[enough]))[0]])


def _leanest(candidates: Candidates, reserved: Reals) -> dict[int, float]:
    names, place = np.unique(kinds(candidates), return_inverse=True)
    least = np.full(len(names), np.inf)
    np.minimum.at(least, place, reserved)
    return {int(name): float(value) for name, value in zip(names, least, strict=True)}


def _needless(candidates: Candidates, kept: np.ndarray) -> np.ndarray:
    """Where more is computed again than in the row before, though that fits and differs in nothing else."""
    first = candidates.recompute[0]
    if len(np.unique(candidates.recompute)) == 1:
        return np.zeros(len(candidates), dtype=bool)
    assert first == 0
    triples = kept.reshape(-1, 3)
    return np.stack([np.zeros(len(triples), dtype=bool), triples[:, 0], triples[:, :2].any(axis=1)], axis=1).ravel()
