"""Figures for plotly's script as plain values: what all of the page's pictures share."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log10
from textwrap import wrap
from typing import Any

from plait.units import format_duration

BLUE, ORANGE, RED, TEAL, GREEN = "#4e79a7", "#f28e2b", "#e15759", "#59b3ad", "#59a14f"
YELLOW, PURPLE, PINK, BROWN, GREY = "#d9b13b", "#b07aa1", "#f0829a", "#9c755f", "#8f8a87"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, YELLOW, PINK, BROWN, GREY)
"""Colours that are readable on white and on dark (after Tableau's ten)."""

Values = dict[str, Any]
GUIDED: Values = {"line": {"color": GREY, "width": 2, "dash": "dash"}}
"""Style of a line that bars or curves are compared with."""
ABOVE: Values = {"yanchor": "bottom", "showarrow": False}
"""Style of words above a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendKey:
    """A line of a picture's legend."""

    colour: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure: plotly's traces and layout, and a legend that stands beneath. Text and grid have the page's colours."""

    data: tuple[Values, ...]
    layout: Values
    legend: tuple[LegendKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with its title, what one sees in words, and the drawing where there is something to draw."""

    title: str
    caption: str
    drawing: Drawing | None


def chart_layout(height_px: int, x: Values, y: Values, **more: Any) -> Values:
    """The layout that all pictures have; `x` and `y` are what their axes have of their own."""
    margin = {"l": 10, "r": 20, "t": 30, "b": 45}
    common = {"automargin": True, "zeroline": False, "fixedrange": True}
    return {
        "height": height_px,
        "margin": margin,
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "bargap": 0.25,
        "barmode": "overlay",
        "xaxis": {**common, **x},
        "yaxis": {**common, **y},
        **more,
    }


def horizontal_bars(rows: Sequence[int], lengths: Sequence[float], starts: Sequence[float] = ()) -> Values:
    """A trace of bars that lie, each in its row, from `starts` or from 0 on."""
    base = {"base": five_digits(starts)} if starts else {}
    return {"type": "bar", "orientation": "h", "y": list(rows), **base, "x": five_digits(lengths)}


def title(words: str) -> Values:
    """An axis' title."""
    return {"text": words, "standoff": 8}


NARROW = 4.0
WIDE = 200.0


def ratio_axis(words: str, least: float, most: float) -> Values:
    """An axis from `least` to `most`, of equal ratios unless these are near each other; plain numbers at its ticks."""
    if most / least < NARROW:
        return {"type": "linear", "title": title(words), "range": [least, most]}
    marks = (1,) if most / least > WIDE else (1, 2, 5) if most / least > 3 * NARROW else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [float(f"{mark}e{power}") for power in range(-9, 13) for mark in marks]
    shown = [tick for tick in ticks if least <= tick <= most]
    return {
        "type": "log",
        "title": title(words),
        "range": [log10(least), log10(most)],
        "tickvals": shown,
        "ticktext": [number_text(tick) for tick in shown],
    }


def number_text(value: float) -> str:
    """A number as people write it: 0.05, 1.5, 20,000."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def wrapped_text(words: str, width: int) -> str:
    """Text for a figure, escaped, broken into lines of about equal length and at most `width` characters."""
    even = min(width, ceil(len(words) / ceil(max(len(words), 1) / width)) + 6)
    return "<br>".join(html.escape(line) for line in wrap(words, even, break_long_words=False, break_on_hyphens=False))


def seconds_unit(longest_s: float) -> tuple[float, str]:
    """What to multiply seconds with for an axis, and the unit's name."""
    for least_s, factor, name in ((120.0, 1 / 60, "minutes"), (0.5, 1.0, "seconds"), (5e-4, 1e3, "milliseconds")):
        if longest_s >= least_s:
            return factor, name
    return 1e6, "microseconds"


def time_words(seconds: float) -> str:
    """A time for people, in thousandths or millionths of a second where it is that short."""
    if seconds >= 0.1 or seconds == 0:
        return format_duration(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"


def five_digits(values: Sequence[float]) -> list[float]:
    """Values rounded to five digits: finer than a screen can show, at a third of the page's size."""
    return [float(f"{value:.5g}") for value in values]
