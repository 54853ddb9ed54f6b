"""The page's map of layouts: how long each takes against how complicated it is, and why it lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.planner.explain.compared_layouts import (
    SAME_TIME,
    best_of_kinds,
    complexity_compared,
    runners_up,
    slower_than_fastest,
)
from plait.planner.problem.candidates import Counts, Reals
from plait.planner.report.figures import (
    COLOURS,
    GREY,
    Drawing,
    LegendKey,
    area_html,
    chart_html,
    dot_html,
    even_axis,
    ratio_axis,
    seconds_unit,
    star_html,
    time_words,
)
from plait.planner.search.cost_breakdown import TIME_NAMES
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import filled_batches
from plait.planner.search.layout_kinds import kinds_of, layout_text
from plait.planner.step_time.step_time import estimate_step_time

DOTS_DRAWN = 500
SLOWEST_DRAWN = 8.0
"""Times the fastest beyond which layouts are not drawn."""
CUT_TEXTS = {
    1: "matrices cut (tensor)",
    2: "sequences cut (context)",
    4: "layers in stages (pipeline)",
    8: "experts divided (expert)",
}
"""The effect of each axis that cuts the model, by its bit in a kind's number."""
UNCUT_TEXT = "nothing cut: only copies and shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One layout."""

    step_s: float
    points: int
    family: str
    """The axes that cut the model."""
    words: str
    why: str
    """Why it was not chosen: its time and complexity compared with the chosen layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMap:
    """Layouts by time and complexity; the chosen one is the simplest between `fastest_s` and `enough_s`."""

    dots: tuple[Dot, ...]
    chosen: Dot
    fastest: Dot
    enough_s: float
    """The end of the tolerance: what is faster than this counts as equally fast."""
    tolerance: float
    n_layouts: int
    n_beyond: int
    """Layouts too slow to be drawn."""


def layout_map(found: Search) -> LayoutMap:
    """Every layout that fits, or an even sample with the best of each kind where they are many."""
    fastest_s = float(found.step_s[found.fastest])
    within = np.flatnonzero(found.step_s <= max(SLOWEST_DRAWN * fastest_s, float(found.step_s[found.chosen])))
    rows = _sample(found, within)
    spent = _items(found, np.append(rows, found.chosen))
    dots = [_dot(found, int(row), spent[:, place], spent[:, -1]) for place, row in enumerate(rows)]
    by_row = dict(zip(rows.tolist(), dots, strict=True))
    return LayoutMap(
        dots=tuple(dots),
        chosen=by_row[found.chosen],
        fastest=by_row[found.fastest],
        enough_s=fastest_s * (1 + found.tolerance),
        tolerance=found.tolerance,
        n_layouts=len(found.candidates),
        n_beyond=len(found.candidates) - len(within),
    )


def map_caption(layout_map: LayoutMap) -> str:
    """The picture in words."""
    some = "an even sample of " if len(layout_map.dots) < layout_map.n_layouts - layout_map.n_beyond else ""
    words = (
        f"Each dot is a layout ({some}{layout_map.n_layouts:,} that fit): to the left the fast ones, at the bottom the "
        f"simple ones. The shaded band holds those within {layout_map.tolerance:.0%} of the fastest, which this "
        f"forecast cannot tell apart; the star is the lowest in it, and so the plan."
    )
    if layout_map.n_beyond:
        beyond = f"{SLOWEST_DRAWN:.0f} times as long ({layout_map.n_beyond:,})"
        words += f" Those that take more than {beyond} lie off to the right."
    return f"{words} Point at a dot to read what it is and why it lost."


def _sample(found: Search, within: Counts) -> Counts:
    always = [found.chosen, found.fastest, *runners_up(found, 10)]
    always += [int(row) for row in best_of_kinds(found)]
    always = np.intersect1d(np.array(always), within)
    rest = np.setdiff1d(within, always)
    # Even along the layouts' order of time: as dense in the picture as in truth.
    order = rest[np.argsort(found.step_s[rest], kind="stable")]
    even = np.unique(np.linspace(0, len(order) - 1, min(DOTS_DRAWN, len(order))).round().astype(np.int64))
    return np.union1d(always, order[even] if len(order) else order)


def _items(found: Search, rows: Counts) -> Reals:
    """Seconds of each item of time, shape [items, rows]; simulated pipelines differ in their bubble."""
    distinct, place = np.unique(rows, return_inverse=True)
    spent = np.empty((len(TIME_NAMES), len(found.candidates)))
    for some, inputs in filled_batches(found.cost_inputs, distinct):
        priced = estimate_step_time(inputs)
        spent[:, some] = [getattr(priced, name) for name in TIME_NAMES]
    own = spent[:, distinct]
    own[list(TIME_NAMES).index("bubble")] += found.step_s[distinct] - own.sum(axis=0)
    return own[:, place]


def _dot(found: Search, row: int, spent: Reals, chosen_spent: Reals) -> Dot:
    step_s, points = float(found.step_s[row]), int(found.complexity[row])
    return Dot(
        step_s=step_s,
        points=points,
        family=_family(int(kinds_of(found.candidates.select(np.array([row])))[0])),
        words=layout_text(found.candidates.row(row)),
        why=_why(found, row, spent - chosen_spent),
    )


def _why(found: Search, row: int, more_s: Reals) -> str:
    step_s, chosen_s = float(found.step_s[row]), found.chosen_step_s
    if step_s == found.best_step_s:
        time = "the fastest"
    elif step_s < (1 + SAME_TIME) * found.best_step_s:
        time = "as fast as the fastest"
    else:
        time = slower_than_fastest(found, row)
    if row == found.chosen:
        return f"chosen: the simplest of those that are fast enough; {time}"
    harder = f"{complexity_compared(found, row)} the chosen layout"
    if step_s < (1 + SAME_TIME) * chosen_s:
        return f"{time}, {harder}"
    worst = int(more_s.argmax())
    name = list(TIME_NAMES.values())[worst]
    return f"{time}, with {time_words(float(more_s[worst]))} more for {name} than the chosen one, {harder}"


def _family(kind: int) -> str:
    return " + ".join(words for bit, words in CUT_TEXTS.items() if kind // 8 & bit) or UNCUT_TEXT


def draw_map(layout_map: LayoutMap) -> Drawing:
    """Dots by time and points, a colour for what cuts the model, the tolerance as a band."""
    families = sorted(
        {dot.family for dot in layout_map.dots}, key=lambda family: (family != UNCUT_TEXT, len(family), family)
    )
    colours = {family: COLOURS[place % len(COLOURS)] for place, family in enumerate(families)}
    times = [dot.step_s for dot in layout_map.dots]
    factor, unit = seconds_unit(max(times))
    x = ratio_axis(f"{unit} a step", min(times) * factor / 1.04, max(times) * factor * 1.04)
    y = even_axis("points of complexity", -1, max(4, *(dot.points for dot in layout_map.dots)) + 1)
    # Points are whole numbers: a little scatter lets one see many dots on one line. The same at each writing.
    scatter = np.random.default_rng(1).uniform(-0.28, 0.28, len(times)).tolist()
    dots = [
        dot_html(x.share(dot.step_s * factor), y.share(dot.points + shift), colours[dot.family], _dot_words(dot))
        for dot, shift in zip(layout_map.dots, scatter, strict=True)
        if dot is not layout_map.chosen
    ]
    chosen = layout_map.chosen
    place = x.share(chosen.step_s * factor), y.share(chosen.points)
    star = star_html(*place, colours[chosen.family], _dot_words(chosen))
    enough = min(layout_map.enough_s * factor, x.most)
    band = area_html(x.share(layout_map.fastest.step_s * factor), x.share(enough), GREY)
    return Drawing(
        html=chart_html(x, y, f"{band}{''.join(dots)}{star}"),
        legend=tuple(LegendKey(colour=colours[family], words=family) for family in families),
    )


def _dot_words(dot: Dot) -> str:
    return f"{time_words(dot.step_s)}, {dot.points} points\n{dot.words}\n{dot.why}"
