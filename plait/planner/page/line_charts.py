"""The page's pictures made of dots and lines, as figures: the map of layouts, the sweep of bandwidth."""

from __future__ import annotations

from math import log10

import numpy as np

from plait.planner.page.bandwidth import Band, Sweep
from plait.planner.page.layout_map import UNCUT_TEXT, Dot, LayoutMap
from plait.report.figures import (
    ABOVE,
    COLOURS,
    GREY,
    GUIDED,
    Drawing,
    LegendKey,
    Values,
    chart_layout,
    five_digits,
    ratio_axis,
    seconds_unit,
    time_words,
    title,
    wrapped_text,
)


def draw_map(layout_map: LayoutMap) -> Drawing:
    """Dots by time and points, a colour for what cuts the model, the tolerance as a band."""
    families = sorted(
        {dot.family for dot in layout_map.dots}, key=lambda family: (family != UNCUT_TEXT, len(family), family)
    )
    colours = {family: COLOURS[place % len(COLOURS)] for place, family in enumerate(families)}
    times = [dot.step_s for dot in layout_map.dots]
    factor, unit = seconds_unit(max(times))
    least, most = min(times) * factor / 1.04, max(times) * factor * 1.04
    # Points are whole numbers: a little scatter lets one see many dots on one line. The same at each writing.
    shift = dict(zip(map(id, layout_map.dots), np.random.default_rng(1).uniform(-0.28, 0.28, len(times)), strict=True))
    data = []
    for family in families:
        if own := [dot for dot in layout_map.dots if dot.family == family and dot is not layout_map.chosen]:
            round_ = {"color": colours[family], "size": 7, "opacity": 0.6}
            heights = [dot.points + float(shift[id(dot)]) for dot in own]
            data.append(_dots(own, factor, heights) | {"marker": round_})
    edge = {"width": 1.5, "color": "black"}
    star = {"symbol": "star", "size": 20, "color": colours[layout_map.chosen.family], "line": edge}
    data.append(_dots([layout_map.chosen], factor, [float(layout_map.chosen.points)]) | {"marker": star})
    band = {
        "type": "rect",
        "x0": layout_map.fastest.step_s * factor,
        "x1": layout_map.enough_s * factor,
        "y0": 0,
        "y1": 1,
    }
    layout = chart_layout(
        460,
        ratio_axis(f"{unit} a step", least, most),
        {"title": title("points of complexity"), "range": [-1, max(dot.points for dot in layout_map.dots) + 1]},
        shapes=[band | {"yref": "paper", "line": {"width": 0}, "fillcolor": GREY, "opacity": 0.25, "layer": "below"}],
    )
    legend = tuple(LegendKey(colour=colours[family], words=family) for family in families)
    return Drawing(data=tuple(data), layout=layout, legend=legend)


def _dots(dots: list[Dot], factor: float, heights: list[float]) -> Values:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": five_digits([dot.step_s * factor for dot in dots]),
        "y": five_digits(heights),
        "hovertext": [
            f"<b>{time_words(dot.step_s)}, {dot.points} points</b><br>{wrapped_text(dot.words, 60)}<br>"
            f"<i>{wrapped_text(dot.why, 60)}</i>"
            for dot in dots
        ],
        "hoverinfo": "text",
    }


def draw_sweep(sweep: Sweep) -> Drawing:
    """A line for each kind of layout over bandwidth, and behind it the colour of the chosen one."""
    best_s = min(min(line.step_s) for line in sweep.lines)
    factor, unit = seconds_unit(best_s * 4)
    slowest_s = min(line.step_s[0] for line in sweep.lines)
    here = {"type": "line", "x0": sweep.present, "x1": sweep.present, "y0": 0, "y1": 1, "yref": "paper"} | GUIDED
    # Words are placed by the logarithm, lines and areas by the value itself: so plotly wants it.
    note = {"x": log10(sweep.present), "y": 1, "yref": "paper", "text": "you are here"} | ABOVE
    layout = chart_layout(
        440,
        ratio_axis(f"{sweep.unit} {sweep.where}", sweep.bandwidths[0], sweep.bandwidths[-1]),
        ratio_axis(f"{unit} a step", best_s * factor / 1.15, slowest_s * factor * 1.5),
        shapes=[*(_area(band) for band in sweep.bands), here],
        annotations=[note],
    )
    chosen = {band.line for band in sweep.bands}
    legend = tuple(
        LegendKey(colour=COLOURS[place % len(COLOURS)], words=line.words + (": chosen" if place in chosen else ""))
        for place, line in enumerate(sweep.lines)
    )
    # In this order thin lines are drawn over thick ones, where two kinds take the same time.
    data = tuple(_curve(sweep, place, factor, unit) for place in range(len(sweep.lines)))
    return Drawing(data=data, layout=layout, legend=legend)


def _area(band: Band) -> Values:
    """The background of the bandwidths at which a line is chosen."""
    colour = COLOURS[band.line % len(COLOURS)]
    box = {"type": "rect", "x0": band.first, "x1": band.last, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    return box | {"line": {"width": 0}, "fillcolor": colour, "opacity": 0.18}


def _curve(sweep: Sweep, place: int, factor: float, unit: str) -> Values:
    line, chosen = sweep.lines[place], any(band.line == place for band in sweep.bands)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": five_digits(sweep.bandwidths),
        "y": five_digits([step_s * factor for step_s in line.step_s]),
        "line": {"color": COLOURS[place % len(COLOURS)]} | ({"width": 4} if chosen else {"width": 1.5, "dash": "dot"}),
        "hovertemplate": f"{wrapped_text(line.words, 60)}<br>%{{y:.3g}} {unit} a step at %{{x:.3g}} {sweep.unit}"
        "<extra></extra>",
    }
