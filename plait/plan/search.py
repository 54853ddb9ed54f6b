"""The planner's choice: every layout listed, refused with a reason or priced, and of the fast ones the simplest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from plait.cluster.cluster import Cluster
from plait.errors import PlaitError
from plait.plan.candidates import Candidates, Counts, Reals
from plait.plan.collectives import roads
from plait.plan.complexity import complexity
from plait.plan.evidence import stated_error
from plait.plan.kinds import kinds
from plait.plan.listing import Pins, listed
from plait.plan.memory import RESERVED, memory
from plait.plan.retime import simulated_s
from plait.plan.stack import PLAIT, Stack
from plait.plan.timing import Timing, timing
from plait.plan.workload import Workload
from plait.units import format_bytes, format_count

NEAR = 0.15
"""Pipelines within this of the best are timed by their actual list of actions."""
PORTION = 4096
"""Candidates priced at once: as many as stay in a processor's cache."""

TOO_LARGE = "needs more memory than a device has"
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

    @property
    def n_refused(self) -> int:
        return sum(self.refused.values())

    def timing(self, index: int) -> Timing:
        """The items of one layout's time."""
        return price(self.workload, self.cluster, self.candidates.select(np.array([index])), self.stack)


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
    found = listed(workload, cluster.devices, pins or Pins())
    refused = Counter(found.refused)
    reserved = memory_of(workload, found.candidates, stack)
    kept = reserved <= _room(cluster, stack, pins)
    refused[TOO_LARGE] += int((~kept).sum())
    if not kept.any():
        raise DoesNotFit(workload, cluster, stack, float(reserved.min()))
    needed = ~_needless(found.candidates, kept)
    refused[NEEDLESS] += int((kept & ~needed).sum())
    candidates = found.candidates.select(kept & needed)
    step_s = step_seconds(workload, cluster, candidates, stack)
    points = complexity(candidates, roads(cluster))
    fastest = int(step_s.argmin())
    return Search(
        workload=workload,
        cluster=cluster,
        stack=stack,
        tolerance=enough,
        candidates=candidates,
        step_s=step_s,
        reserved=reserved[kept & needed],
        points=points,
        chosen=simplest(step_s, points, enough),
        fastest=fastest,
        refused={reason: count for reason, count in refused.items() if count},
        leanest=_leanest(found.candidates, reserved),
    )


def _room(cluster: Cluster, stack: Stack, pins: Pins | None) -> float:
    """What a layout may reserve of the smallest device.

    One that was asked for is refused only where it cannot run even if a GPU's allocator wastes nothing.
    """
    device = min((island.device for island in cluster.islands), key=lambda device: device.memory_bytes)
    asked = pins is not None and bool(pins.degrees) and device.kind != "cpu"
    return RESERVED * device.memory_bytes + stack.outside_bytes if asked else device.memory_bytes


def simplest(step_s: Reals, points: Counts, tolerance: float) -> int:
    """The place of the simplest within the tolerance of the fastest; of equally simple ones the fastest."""
    enough = np.flatnonzero(step_s <= step_s.min() * (1 + tolerance))
    return int(enough[np.lexsort((step_s[enough], points[enough]))[0]])


def step_seconds(workload: Workload, cluster: Cluster, candidates: Candidates, stack: Stack) -> Reals:
    """Seconds of a step: by the closed form, and near the best by simulation."""
    step_s = np.empty(len(candidates))
    for rows, whole in portions(workload, candidates):
        step_s[rows] = timing(whole, cluster, candidates.select(rows), stack).step_s
    closed = candidates.pipeline > 1
    # Simulated times are longer, so that others come near the best.
    while len(again := np.flatnonzero(closed & (step_s <= step_s.min() * (1 + NEAR)))):
        for rows, whole in portions(workload, candidates, again):
            few = candidates.select(rows)
            step_s[rows] = simulated_s(whole, cluster, few, stack, timing(whole, cluster, few, stack))
        closed[again] = False
    return step_s


def price(workload: Workload, cluster: Cluster, candidates: Candidates, stack: Stack) -> Timing:
    """The items of time of a few layouts that split the batch into equal numbers of micro-batches."""
    parts = [timing(whole, cluster, candidates.select(rows), stack) for rows, whole in portions(workload, candidates)]
    return Timing(**{field.name: np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(Timing)})


def memory_of(workload: Workload, candidates: Candidates, stack: Stack) -> Reals:
    """Bytes per device that each candidate needs."""
    reserved = np.empty(len(candidates))
    for rows, whole in portions(workload, candidates):
        reserved[rows] = memory(whole, candidates.select(rows), stack).reserved
    return reserved


def portions(
    workload: Workload, candidates: Candidates, among: Counts | None = None
) -> Iterator[tuple[Counts, Workload]]:
    """Places of candidates a few thousand at a time, with the batch that their fullest group of devices would make.

    A batch that does not divide leaves some groups with a sequence less, and they wait for the others.
    """
    rows = np.arange(len(candidates)) if among is None else among
    each = candidates.batch_parts[rows] * candidates.micro_sequences[rows]
    filled = -(-workload.batch_sequences // each) * each
    for batch in np.unique(filled):
        same, whole = rows[filled == batch], replace(workload, batch_sequences=int(batch))
        for first in range(0, len(same), PORTION):
            yield same[first : first + PORTION], whole


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
