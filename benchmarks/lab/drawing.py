"""Lines, words, bars and curves as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1b6ca8", "#c8501e", "#2d8a4e", "#8e44ad", "#b8860b", "#c2185b", "#00838f", "#5d4037", "#607d8b", "#7cb342")
INK, PALE = "#333333", "#dddddd"
BAR, GAP, NAMES, ROOM = 14, 18, 330, 430


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """The whole picture, on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def bars(title: str, rows: Mapping[str, Mapping[str, float]], *, goal: float) -> str:
    """For each row a bar for each of its shares (1 is the ideal), with a line at the goal."""
    names = list(dict.fromkeys(name for values in rows.values() for name in values))
    most = max([1.0, *(value for values in rows.values() for value in values.values())])
    parts, y = [text(10, 22, title, size=15)], 40.0
    for place, name in enumerate(names):
        parts.append(_bar(10 + 130 * place, y, 18, COLOURS[place]))
        parts.append(text(34 + 130 * place, y + 11, name))
    top = y = y + 2 * GAP
    for row, values in rows.items():
        parts.append(text(10, y + 11, row))
        for name, value in values.items():
            parts.append(_bar(NAMES, y, ROOM * value / most, COLOURS[names.index(name)]))
            parts.append(text(NAMES + ROOM * value / most + 6, y + 11, f"{value:.0%}"))
            y += BAR + 2
        y += GAP / 2
    for share, dash in ((goal, "6 4"), (1.0, "")):
        x = NAMES + ROOM * share / most
        parts.append(stroke((x, top - 6), (x, y), INK, dash=dash))
        parts.append(text(x, y + 14, f"{share:.0%}", anchor="middle"))
    return svg(NAMES + ROOM + 60, y + 30, parts)


def _bar(x: float, y: float, length: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'


def path(places: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
    """A curve through these places."""
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'


def stroke(
    start: tuple[float, float], end: tuple[float, float], colour: str, *, dash: str = "", width: float = 1.0
) -> str:
    """A straight line."""
    style = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{style}/>'


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    """Words, from or around a place."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{INK}" text-anchor="{anchor}">{escape(words)}</text>'
    )
