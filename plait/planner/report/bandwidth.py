"""The page's sweep of bandwidth: which kind of layout wins on slower and on faster links."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from plait.planner.explain.changes import (
    LARGEST_FACTOR_TRIED,
    LinkPlace,
    is_quick,
    link_rate,
    rate_unit,
    representatives,
    step_s_elsewhere,
    with_faster_links,
)
from plait.planner.problem.candidates import Counts, Reals
from plait.planner.report.figures import (
    COLOURS,
    Drawing,
    LegendKey,
    area_html,
    chart_html,
    curve_html,
    curves_html,
    line_html,
    ratio_axis,
    seconds_unit,
)
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import step_seconds
from plait.planner.search.layout_kinds import kind_text, kinds_of
from plait.planner.search.search import simplest
from plait.units import plain_number

BANDWIDTH_FACTORS = 65
"""Bandwidths that are tried, in equal ratios."""
LINES_DRAWN = 6
"""Kinds that are drawn, unless more of them are chosen somewhere."""


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

    where: str
    """The links in words: "between the nodes", "inside the node"."""
    unit: str
    """"Gbit/s a device" or the like; the bandwidths' unit."""
    present: float
    bandwidths: tuple[float, ...]
    lines: tuple[Line, ...]
    """The kinds that are chosen somewhere, then those that are fastest at present."""
    bands: tuple[Band, ...]


def bandwidth_sweep(found: Search) -> Sweep | None:
    """Another bandwidth between the nodes, or inside where there is one node; None where nothing joins devices."""
    cluster = found.cluster
    if cluster.n_devices == 1:
        return None
    link: LinkPlace = "between" if cluster.n_nodes > 1 else "inside"
    factors = np.geomspace(1 / LARGEST_FACTOR_TRIED, LARGEST_FACTOR_TRIED, BANDWIDTH_FACTORS)
    step_s, rows = _step_s_by_factor(found, link, factors)
    names, place = np.unique(kinds_of(found.candidates)[rows], return_inverse=True)
    best_s = np.full((len(names), len(factors)), np.inf)
    np.minimum.at(best_s, place, step_s.T)
    winners = [int(place[simplest(one, found.complexity[rows], found.tolerance)]) for one in step_s]
    kinds = list(dict.fromkeys(winners))
    kinds += [k for k in best_s[:, BANDWIDTH_FACTORS // 2].argsort().tolist() if k not in kinds][
        : max(LINES_DRAWN - len(kinds), 0)
    ]
    present = link_rate(cluster, link)
    lines = []
    for kind in kinds:
        row = found.candidates.row(int(rows[np.flatnonzero(place == kind)[0]]))
        lines.append(Line(words=kind_text(row), step_s=tuple(best_s[kind].tolist())))
    return Sweep(
        where="between the nodes" if link == "between" else "inside the node",
        unit=rate_unit(cluster, link) + ("" if link == "between" else " a device"),
        present=present,
        bandwidths=tuple(float(f * present) for f in factors),
        lines=tuple(lines),
        bands=_bands([kinds.index(k) for k in winners], factors * present),
    )


def _step_s_by_factor(found: Search, link: LinkPlace, factors: Reals) -> tuple[Reals, Counts]:
    """Seconds of a step, shape [factors, layouts], and which layouts: all, or representatives where they are very
    many."""
    clusters = [with_faster_links(found.cluster, link, float(factor)) for factor in factors]
    if is_quick(found):
        inputs = [replace(found.cost_inputs, cluster=cluster) for cluster in clusters]
        steps = [step_seconds(one, n_microbatches=found.n_microbatches) for one in inputs]
        return np.stack(steps), np.arange(len(found.candidates))
    rows = representatives(found)
    step_s_on = step_s_elsewhere(found, rows)
    return np.stack([step_s_on(cluster) for cluster in clusters]), rows


def _bands(chosen: list[int], bandwidths: Reals) -> tuple[Band, ...]:
    """Runs of the same choice; they meet half-way between two bandwidths that were tried."""
    starts = [0, *(place for place in range(1, len(chosen)) if chosen[place] != chosen[place - 1])]
    inner = [float((bandwidths[place - 1] * bandwidths[place]) ** 0.5) for place in starts[1:]]
    edges = [float(bandwidths[0]), *inner, float(bandwidths[-1])]
    return tuple(
        Band(line=chosen[start], first=edges[number], last=edges[number + 1]) for number, start in enumerate(starts)
    )


def sweep_caption(sweep: Sweep | None) -> str:
    """The picture in words."""
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


def draw_sweep(sweep: Sweep) -> Drawing:
    """A line for each kind of layout over bandwidth, and behind it the colour of the chosen one."""
    best_s = min(min(line.step_s) for line in sweep.lines)
    factor, unit = seconds_unit(best_s * 4)
    slowest_s = min(line.step_s[0] for line in sweep.lines)
    x = ratio_axis(f"{sweep.unit} {sweep.where}", sweep.bandwidths[0], sweep.bandwidths[-1])
    y = ratio_axis(f"{unit} a step", best_s * factor / 1.15, slowest_s * factor * 1.5)
    chosen = {band.line for band in sweep.bands}
    areas = [area_html(x.share(band.first), x.share(band.last), _colour(band.line)) for band in sweep.bands]
    curves = []
    for place, line in enumerate(sweep.lines):  # thin lines over thick ones, where two kinds take the same time
        points = [(x.share(at), y.share(s * factor)) for at, s in zip(sweep.bandwidths, line.step_s, strict=True)]
        drawn = curve_html(
            points, _colour(place), width=4 if place in chosen else 1.5, dashes="" if place in chosen else "2 3"
        )
        curves.append(drawn)
    here = line_html(x.share(sweep.present), "you are here")
    return Drawing(
        html=chart_html(x, y, f"{''.join(areas)}{curves_html(curves)}{here}"),
        legend=tuple(
            LegendKey(colour=_colour(place), words=line.words + (": chosen" if place in chosen else ""))
            for place, line in enumerate(sweep.lines)
        ),
    )


def _colour(line: int) -> str:
    return COLOURS[line % len(COLOURS)]
