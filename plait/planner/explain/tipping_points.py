"""At what bandwidth, memory or batch another kind of layout would be chosen: by choosing again on altered clusters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from plait.errors import PlaitError
from plait.machines.catalog import Link
from plait.machines.cluster import Cluster
from plait.planner.problem.candidates import Counts, Reals
from plait.planner.problem.workload import Workload
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import filled_batches
from plait.planner.search.layout_kinds import CandidateRow, kinds_of
from plait.planner.search.search import search, simplest
from plait.planner.step_time.step_time import estimate_step_time

TippingQuantity = Literal["between", "inside", "memory", "batch"]
LARGEST_FACTOR_TRIED = 256.0
"""How many times slower or faster a link is tried."""
FINE_STEPS = 1.03
MANY_LAYOUTS = 12_000
"""Number of layouts beyond which link thresholds are found with representatives, and fewer memory sizes and batches are
tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TippingPoint:
    """The change of a quantity from which on another kind of layout wins: `factor` times its present value."""

    what: TippingQuantity
    factor: float
    winner: CandidateRow


@lru_cache(maxsize=1)
def tipping_points(found: Search) -> tuple[TippingPoint, ...]:
    """Where another kind of layout would be chosen, the nearest change first; for a layout that nobody named.

    Kept for the last search: the head of a plan and its report both ask, and it takes dozens of searches.
    """
    lines: list[TippingPoint] = []
    if found.cluster.n_nodes > 1:
        lines += _of_link(found, "between", with_faster_network)
    if max(island.per_node for island in found.cluster.islands) > 1:
        lines += _of_link(found, "inside", with_faster_nodes)
    lines += _of_memory(found)
    lines += _of_batch(found)
    return tuple(sorted(lines, key=lambda flip: abs(np.log(flip.factor))))


AlteredCluster = Callable[[Cluster, float], Cluster]


def _of_link(found: Search, what: TippingQuantity, altered: AlteredCluster) -> list[TippingPoint]:
    """Tipping points for slower and for faster links: found among representatives, then refined by full searches if
    that is quick."""
    quick = _among_representatives(found, altered)

    def whole(factor: float) -> tuple[int, CandidateRow] | None:
        return _winner(lambda f: search_again(found, found.workload, altered(found.cluster, f)), factor)

    lines = []
    for step in (0.5, 2.0):
        limits = crossing(_differs(found, quick), (1.0, step), step)
        if limits and number_of_layouts(found) < MANY_LAYOUTS:
            same, other = limits
            limits = crossing(_differs(found, whole), (same**0.7, other), step**0.5)
        if limits and (winner := (quick if number_of_layouts(found) >= MANY_LAYOUTS else whole)(limits[1])):
            lines.append(TippingPoint(what=what, factor=limits[1], winner=winner[1]))
    return lines


ChooseAt = Callable[[float], tuple[int, CandidateRow] | None]
"""From a factor to the (kind, layout) chosen at that multiple of the present value; None where nothing fits."""


def _among_representatives(found: Search, altered: AlteredCluster) -> ChooseAt:
    rows = representatives(found)
    names, step_s_on = kinds_of(found.candidates), step_s_elsewhere(found, rows)

    def winner(factor: float) -> tuple[int, CandidateRow]:
        step_s = step_s_on(altered(found.cluster, factor))
        index = int(rows[simplest(step_s, found.complexity[rows], found.tolerance)])
        return int(names[index]), found.candidates.row(index)

    return winner


def _differs(found: Search, chooses: ChooseAt) -> Callable[[float], bool]:
    """Whether another kind than the present one would be chosen at a factor."""
    here = int(kinds_of(found.candidates)[found.chosen])

    def differs(factor: float) -> bool:
        other = chooses(factor)
        return other is not None and other[0] != here

    return differs


def crossing(differs: Callable[[float], bool], between: tuple[float, float], step: float) -> tuple[float, float] | None:
    """The last factor at which an answer is the present one and, close to it, the first at which it `differs`; None
    where there is none."""
    same, other = between
    if differs(same):
        same, other = 1.0, same
    while not differs(other):
        same, other = other, other * step
        if not 1 / LARGEST_FACTOR_TRIED <= other <= LARGEST_FACTOR_TRIED:
            return None
    while max(same / other, other / same) > FINE_STEPS:
        middle = (same * other) ** 0.5
        same, other = (same, middle) if differs(middle) else (middle, other)
    return same, other


def representatives(found: Search) -> Counts:
    """Indices of the fastest layout of each combination of degrees and of each way to place shards on near or far
    ranks."""
    c = found.candidates
    near = c.tensor * c.context * c.shard <= found.cost_inputs.network.devices_per_node
    keys = np.stack([c.pipeline, c.tensor, c.context, c.expert, c.shard_what, c.schedule, c.recompute, near])
    order = np.lexsort([found.step_s, *keys])
    sorted_keys = keys[:, order]
    first = np.concatenate([[True], (np.diff(sorted_keys, axis=1) != 0).any(axis=0)])
    return np.unique(np.concatenate([[found.chosen, found.fastest], order[first]]))


def step_s_elsewhere(found: Search, rows: Counts) -> Callable[[Cluster], Reals]:
    """From an altered cluster to the seconds of a step of some layouts: what the search found, and by how much the
    closed form changes."""
    beyond = found.step_s[rows] - _closed_form_step_s(found, rows, found.cluster)
    return lambda cluster: _closed_form_step_s(found, rows, cluster) + beyond


def _closed_form_step_s(found: Search, rows: Counts, cluster: Cluster) -> Reals:
    step_s = np.empty(len(found.candidates))
    for some, inputs in filled_batches(replace(found.cost_inputs, cluster=cluster), rows):
        step_s[some] = estimate_step_time(inputs).step_s
    return step_s[rows]


def with_faster_network(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with this many times the bandwidth between its machines."""
    return replace(cluster, between=_faster(cluster.between, factor))


def with_faster_nodes(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with this many times the bandwidth between the devices of a node."""
    islands = tuple(replace(island, inside=_faster(island.inside, factor)) for island in cluster.islands)
    return replace(cluster, islands=islands)


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)


def search_again(found: Search, workload: Workload, cluster: Cluster) -> Search:
    """The same search of another workload or cluster."""
    return search(workload, cluster, profile=found.profile, tolerance=found.tolerance)


def _of_memory(found: Search) -> list[TippingPoint]:
    def again(factor: float) -> Search:
        return search_again(found, found.workload, with_memory(found.cluster, factor))

    tried = ((0.8, 0.6), (1.5, 2.0, 4.0)) if number_of_layouts(found) < MANY_LAYOUTS else ((0.7,), (2.0,))
    return [flip for factors in tried for flip in _first(found, "memory", factors, again)]


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with devices of more or less memory."""
    return replace(
        cluster,
        islands=tuple(
            replace(island, device=replace(island.device, memory_bytes=int(island.device.memory_bytes * factor)))
            for island in cluster.islands
        ),
    )


def _of_batch(found: Search) -> list[TippingPoint]:
    def again(factor: float) -> Search:
        batch = round(found.workload.batch_sequences * factor)
        if batch < 1:
            raise PlaitError("a batch needs at least one sequence")
        return search_again(found, replace(found.workload, batch_sequences=batch), found.cluster)

    tried = ((0.5, 0.25), (2.0, 4.0, 8.0)) if number_of_layouts(found) < MANY_LAYOUTS else ((0.5,), (4.0,))
    return [flip for factors in tried for flip in _first(found, "batch", factors, again)]


def number_of_layouts(found: Search) -> int:
    """All that a search looked at, priced or refused."""
    return len(found.candidates) + found.n_refused


def _first(
    found: Search, what: TippingQuantity, factors: tuple[float, ...], again: Callable[[float], Search]
) -> list[TippingPoint]:
    """The first of the factors, going away from 1, at which another kind wins; for memory narrowed down to where one
    wins from there on, not at a single size with the present kind beyond it."""
    here, same = kinds_of(found.candidates)[found.chosen], 1.0
    narrow = what == "memory" and number_of_layouts(found) < MANY_LAYOUTS
    for factor in factors:
        if not (other := _winner(again, factor)) or other[0] == here:
            same = factor
            continue
        while narrow and max(same / factor, factor / same) > FINE_STEPS:
            middle = (same * factor) ** 0.5
            between, beyond = _winner(again, middle), _winner(again, middle * FINE_STEPS ** (1 if factor > 1 else -1))
            if between and between[0] != here and beyond and beyond[0] != here:
                factor, other = middle, between
            else:
                same = middle
        return [TippingPoint(what=what, factor=factor, winner=other[1])]
    return []


def _winner(again: Callable[[float], Search], factor: float) -> tuple[int, CandidateRow] | None:
    """The kind and the row that would be chosen; None where nothing fits."""
    try:
        other = again(factor)
    except PlaitError:
        return None
    return int(kinds_of(other.candidates)[other.chosen]), other.candidates.row(other.chosen)
