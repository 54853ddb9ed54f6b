"""The page's sweep of bandwidth: which kind of layout wins on slower and on faster links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from plait.machines.catalog import Link
from plait.machines.cluster import Cluster, device_bytes_per_s
from plait.planner.explain.tipping_points import LARGEST_FACTOR_TRIED, MANY_LAYOUTS, representatives
from plait.planner.problem.candidates import Counts, Reals
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import filled_batches, step_seconds
from plait.planner.search.layout_kinds import CandidateRow, kind_text, kinds_of
from plait.planner.search.search import simplest
from plait.planner.step_time.step_time import estimate_step_time
from plait.units import plain_number

BANDWIDTH_FACTORS = 65
"""Bandwidths that are tried, in equal ratios."""
LINES_DRAWN = 6
"""Kinds that are drawn, unless more of them are chosen somewhere."""
LinkPlace = Literal["between the nodes", "inside the node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The fastest layout of one kind, over the sweep."""

    words: str
    step_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Neighbouring bandwidths at which the same line is chosen."""

    line: int
    first: float
    last: float
    """In the sweep's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Step times by bandwidth of a link, all else as it is."""

    where: LinkPlace
    unit: str
    """"Gbit/s a device" or the like; the bandwidths' unit."""
    present: float
    bandwidths: tuple[float, ...]
    lines: tuple[Line, ...]
    """The kinds that are chosen somewhere, then those that are fastest at present."""
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """What the sweep found: the least time of every kind at each factor, and which kind is chosen there."""

    names: Counts
    best_s: Reals
    """(kinds, factors)"""
    rows: Counts
    """Index of one layout per kind, for its text."""
    chosen: Counts
    """Index in `names` of the kind that is chosen, one per factor."""


def bandwidth_sweep(found: Search) -> Sweep | None:
    """Another bandwidth between the nodes, or inside where there is one node; None where nothing joins devices."""
    cluster = found.cluster
    if cluster.n_devices == 1:
        return None
    where: LinkPlace = "between the nodes" if cluster.n_nodes > 1 else "inside the node"
    factors = np.geomspace(1 / LARGEST_FACTOR_TRIED, LARGEST_FACTOR_TRIED, BANDWIDTH_FACTORS)
    tried = _try(found, [_altered(cluster, where, float(factor)) for factor in factors])
    present, unit = _present(cluster, where)
    kinds = list(dict.fromkeys(tried.chosen.tolist()))
    kinds += [k for k in tried.best_s[:, BANDWIDTH_FACTORS // 2].argsort().tolist() if k not in kinds][
        : max(LINES_DRAWN - len(kinds), 0)
    ]
    return Sweep(
        where=where,
        unit=unit,
        present=present,
        bandwidths=tuple(float(f * present) for f in factors),
        lines=tuple(_line(found, tried, k) for k in kinds),
        bands=_bands([kinds.index(k) for k in tried.chosen.tolist()], factors * present),
    )


def sweep_caption(sweep: Sweep | None) -> str:
    """What one sees, in words."""
    if sweep is None:
        return "There is one device, so that no link has a say."
    others = [band for band in sweep.bands if not band.first <= sweep.present <= band.last]
    words = (
        f"Suppose the links {sweep.where} were slower or faster, and all else stayed: each line is the best layout of "
        f"one kind. You have {plain_number(sweep.present)} {sweep.unit} (dashed). "
    )
    if not others:
        factor = f"{LARGEST_FACTOR_TRIED:.0f}"
        return f"{words}The same kind would be chosen everywhere from {factor} times slower to as much faster."
    changes = len(sweep.bands) - 1
    times = "once" if changes == 1 else f"{changes} times"
    return (
        f"{words}The background has the colour of the kind that would be chosen (thick lines), which changes {times}: "
        f"the simplest of those that are about as fast, and so not always the lowest line."
    )


def _try(found: Search, clusters: list[Cluster]) -> _Tried:
    """Choose again on each cluster: among all layouts, or among representatives where they are very many."""
    few = len(found.candidates) + found.n_refused < MANY_LAYOUTS
    rows = np.arange(len(found.candidates)) if few else representatives(found)
    correction = 0.0 if few else found.step_s[rows] - _closed_form_step_s(found, rows, found.cluster)
    names, place = np.unique(kinds_of(found.candidates)[rows], return_inverse=True)
    best_s, chosen = np.full((len(names), len(clusters)), np.inf), np.empty(len(clusters), dtype=np.int64)
    for number, cluster in enumerate(clusters):
        if few:
            step_s = step_seconds(replace(found.cost_inputs, cluster=cluster), n_microbatches=found.n_microbatches)
        else:
            step_s = _closed_form_step_s(found, rows, cluster) + correction
        np.minimum.at(best_s[:, number], place, step_s)
        chosen[number] = place[simplest(step_s, found.complexity[rows], found.tolerance)]
    speakers = np.array([rows[np.flatnonzero(place == kind)[0]] for kind in range(len(names))])
    return _Tried(names=names, best_s=best_s, rows=speakers, chosen=chosen)


def _closed_form_step_s(found: Search, rows: Counts, cluster: Cluster) -> Reals:
    step_s = np.empty(len(found.candidates))
    for some, inputs in filled_batches(replace(found.cost_inputs, cluster=cluster), rows):
        step_s[some] = estimate_step_time(inputs).step_s
    return step_s[rows]


def _altered(cluster: Cluster, where: LinkPlace, factor: float) -> Cluster:
    if where == "between the nodes":
        return replace(cluster, between=_faster(cluster.between, factor))
    islands = tuple(replace(island, inside=_faster(island.inside, factor)) for island in cluster.islands)
    return replace(cluster, islands=islands)


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)


def _present(cluster: Cluster, where: LinkPlace) -> tuple[float, str]:
    """Present bandwidth and its unit: a network's line rate in Gbit/s, or GB/s per device inside a node."""
    if where == "inside the node":
        island = cluster.islands[0]
        return device_bytes_per_s(island.inside, island.per_node) / 1e9, "GB/s a device"
    between = cluster.between
    wires = 2 * between.axes if between.shape == "torus" else 1
    whose = "a machine" if between.shape == "shared" else "a device"
    return between.bytes_per_s * wires * 8 / 1e9, f"Gbit/s {whose}"


def _line(found: Search, tried: _Tried, kind: int) -> Line:
    row: CandidateRow = found.candidates.row(int(tried.rows[kind]))
    return Line(words=kind_text(row), step_s=tuple(tried.best_s[kind].tolist()))


def _bands(chosen: list[int], bandwidths: Reals) -> tuple[Band, ...]:
    """Runs of the same choice; they meet half-way between two bandwidths that were tried."""
    starts = [0, *(place for place in range(1, len(chosen)) if chosen[place] != chosen[place - 1])]
    edges = [float(bandwidths[0])]
    edges += [float((bandwidths[place - 1] * bandwidths[place]) ** 0.5) for place in starts[1:]]
    edges.append(float(bandwidths[-1]))
    return tuple(
        Band(line=chosen[start], first=edges[number], last=edges[number + 1]) for number, start in enumerate(starts)
    )
