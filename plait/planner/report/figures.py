"""Figures as HTML that needs no script and wraps like text: what all of the page's pictures share.

Lengths and places are shares of the room that there is, so that a figure fits a phone as well as paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from plait.units import format_duration

BLUE, ORANGE, RED, TEAL, GREEN = "#4e79a7", "#f28e2b", "#e15759", "#59b3ad", "#59a14f"
YELLOW, PURPLE, PINK, BROWN, GREY = "#d9b13b", "#b07aa1", "#f0829a", "#9c755f", "#8f8a87"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, YELLOW, PINK, BROWN, GREY)
"""Colours that are readable on white and on dark (after Tableau's ten)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendKey:
    """A line of a picture's legend."""

    colour: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure as HTML, and a legend that stands beneath."""

    html: str
    legend: tuple[LegendKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with its title, what one sees in words, and the drawing where there is something to draw."""

    title: str
    caption: str
    drawing: Drawing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A coloured piece of a row; the words show where somebody points at it."""

    start: float
    length: float
    colour: str
    words: str
    opacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """A row of bars with its name, and a figure in words behind it."""

    name: str
    bars: tuple[Bar, ...]
    value: str = ""


def bars_html(
    rows: Sequence[BarRow], *, whole: float, style: str, row_px: int = 24, marks: Sequence[float] = ()
) -> str:
    """Rows of bars, where `whole` is as long as a row, with dashed marks across each; `style` is a class of the page's
    style sheet."""
    lines = [_bar_row(row, whole, marks) for row in rows]
    return f'<div class="bars {style}" style="--row:{row_px}px">\n{"".join(lines)}</div>'


def _bar_row(row: BarRow, whole: float, marks: Sequence[float]) -> str:
    pieces = [
        f'<i style="left:{_share(bar.start / whole)};width:{_share(bar.length / whole)};background:{bar.colour}'
        f'{f";opacity:{bar.opacity:.2g}" if bar.opacity < 1 else ""}"{pointed(bar.words)}></i>'
        for bar in row.bars
    ]
    pieces += [f'<b style="left:{_share(mark / whole)}"></b>' for mark in marks]
    name, value = (f"<span>{escape(text)}</span>" for text in (row.name, row.value))
    return f'<div class="row">{name}<div class="track">{"".join(pieces)}</div>{value}</div>\n'


def ends_html(last: str) -> str:
    """The two ends of an axis that begins at 0."""
    return f'<p class="ends"><span>0</span><span>{escape(last)}</span></p>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from `least` to `most`, of equal ratios or of equal differences, with its ticks."""

    words: str
    least: float
    most: float
    ticks: tuple[float, ...]
    of_ratios: bool = False

    def share(self, value: float) -> float:
        """The position of a value: 0 at the minimum, 1 at the maximum."""
        least, most, value = (log10(one) if self.of_ratios else one for one in (self.least, self.most, value))
        return (value - least) / (most - least)


NARROW = 4.0
WIDE = 200.0


def ratio_axis(words: str, least: float, most: float) -> Axis:
    """An axis of equal ratios unless its ends are near each other; plain numbers at its ticks."""
    if most / least < NARROW:
        return even_axis(words, least, most)
    marks = (1,) if most / least > WIDE else (1, 2, 5) if most / least > 3 * NARROW else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [float(f"{mark}e{power}") for power in range(-9, 13) for mark in marks]
    shown = tuple(tick for tick in ticks if least <= tick <= most)
    return Axis(words=words, least=least, most=most, ticks=shown, of_ratios=True)


def even_axis(words: str, least: float, most: float) -> Axis:
    """An axis of equal differences with four to ten round ticks."""
    power = 10.0 ** floor(log10((most - least) / 4))
    step = next(power * mark for mark in (5, 2, 1) if (most - least) / (power * mark) >= 4)
    first = ceil(least / step)
    ticks = tuple(number * step for number in range(first, floor(most / step) + 1))
    return Axis(words=words, least=least, most=most, ticks=ticks)


def chart_html(x: Axis, y: Axis, inside: str) -> str:
    """A plane with two axes; `inside` is placed by the shares of both."""
    across = "".join(f'<span style="left:{_share(x.share(tick))}">{number_text(tick)}</span>' for tick in x.ticks)
    up = "".join(f'<span style="bottom:{_share(y.share(tick))}">{number_text(tick)}</span>' for tick in y.ticks)
    grid = "".join(f'<hr style="bottom:{_share(y.share(tick))}">' for tick in y.ticks)
    ticks = f'<div class="up">{up}</div><div class="across">{across}</div>'
    above, below = f'<p class="axis">↑ {escape(y.words)}</p>', f'<p class="axis end">{escape(x.words)} →</p>'
    return f'{above}\n<div class="plane">{grid}{inside}{ticks}</div>\n{below}'


def area_html(first: float, last: float, colour: str) -> str:
    """A background from one share of the x axis to another."""
    return f'<u style="left:{_share(first)};width:{_share(last - first)};background:{colour}"></u>'


def line_html(share: float, words: str) -> str:
    """A dashed vertical line at a share of the x axis, with words at its upper end."""
    return f'<b style="left:{_share(share)}"></b><em style="left:{_share(share)}">{escape(words)}</em>'


def curve_html(points: Sequence[tuple[float, float]], colour: str, *, width: float, dashes: str = "") -> str:
    """A line through points, each a pair of shares, from the left below; what lies above the plane is cut off."""
    path = " ".join(f"{1000 * x:.4g},{1000 * (1 - y):.5g}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def curves_html(curves: Sequence[str]) -> str:
    """Lines over a whole plane."""
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none">{"".join(curves)}</svg>'


def dot_html(x: float, y: float, colour: str, words: str) -> str:
    """A dot at two shares."""
    return f'<i style="left:{_share(x)};bottom:{_share(y)};background:{colour}"{pointed(words)}></i>'


def star_html(x: float, y: float, colour: str, words: str) -> str:
    """A star at two shares."""
    return f'<strong style="left:{_share(x)};bottom:{_share(y)};color:{colour}"{pointed(words)}>★</strong>'


def pointed(words: str) -> str:
    """Attributes that show words while somebody points at an element, or has tapped it."""
    return f' tabindex="-1" data-words="{escape(words)}"'


def _share(share: float) -> str:
    return f"{100 * share:.4g}%"


def number_text(value: float) -> str:
    """A number as people write it: 0.05, 1.5, 20,000."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds_unit(longest_s: float) -> tuple[float, str]:
    """The factor for seconds on an axis, and the unit's name."""
    for least_s, factor, name in ((120.0, 1 / 60, "minutes"), (0.5, 1.0, "seconds"), (5e-4, 1e3, "milliseconds")):
        if longest_s >= least_s:
            return factor, name
    return 1e6, "microseconds"


def time_words(seconds: float) -> str:
    """A time for people, in thousandths or millionths of a second where it is that short."""
    if seconds >= 0.1 or seconds == 0:
        return format_duration(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"
