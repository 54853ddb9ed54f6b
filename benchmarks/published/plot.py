"""Draws the figures of published runs as one SVG: forecast against measured, errors, and how layouts were ranked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape

import numpy as np

from benchmarks.published.figures import Judged
from benchmarks.published.pricing import Priced
from benchmarks.published.scoring import Job

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
OTHERS = "#9c8f84"
SHOWN = 8
"""Sources with a colour of their own: those with the most rows."""
WIDTH, HEIGHT = 1180, 470
SIDE, TOP = 300, 70
"""Length of a panel's sides, and where it begins."""
NEAR, FAR = -0.4, 0.4
BINS = 32
"""The errors that the histogram shows, and in how many steps; what lies beyond is counted with the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A square with two scales; points are given as shares of its sides, from below on the left."""

    left: float
    title: str
    across: str
    up: str

    def x(self, share: float) -> float:
        return round(self.left + share * SIDE, 1)

    def y(self, share: float) -> float:
        return round(TOP + (1 - share) * SIDE, 1)

    def frame(self, across: Iterable[tuple[float, str]], up: Iterable[tuple[float, str]]) -> list[str]:
        """Its border, words and marks, each mark a place and its text."""
        lines = [
            f'<rect x="{self.left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#ccc"/>',
            _text(self.left, TOP - 14, self.title, weight="bold"),
            _text(self.left + SIDE / 2, TOP + SIDE + 34, self.across, anchor="middle"),
            f'<g transform="rotate(-90)">{_text(-TOP - SIDE / 2, self.left - 40, self.up, anchor="middle")}</g>',
        ]
        lines += [_text(self.x(place), TOP + SIDE + 16, text, anchor="middle") for place, text in across]
        lines += [_text(self.left - 6, self.y(place) + 4, text, anchor="end") for place, text in up]
        return lines


def drawing(judged: Judged, day: date) -> str:
    """The whole picture; what is told is the model as it stands, no scalar fitted."""
    timed = [row for row in judged.priced if row.case.step_s]
    told = f"{len(timed):,} published runs, forecast by plait's model, no scalar fitted to a source ({day})"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="sans-serif" font-size="12" fill="#333">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            _text(60, 28, told, size=15, weight="bold"),
            *_scatter(timed),
            *_histogram(timed),
            *_ranking(judged.jobs),
            "</svg>",
            "",
        ]
    )


def _scatter(timed: Sequence[Priced]) -> list[str]:
    """Forecast against measured seconds, both by powers of ten, a colour for each of the larger sources."""
    panel = Panel(left=60, title="Seconds of a step", across="measured", up="forecast")
    both = [second for row in timed for second in (row.step_s, row.case.step_s or row.step_s)] or [0.1, 10.0]
    low, high = math.floor(math.log10(min(both))), math.ceil(math.log10(max(both)))

    def share(seconds: float) -> float:
        return (math.log10(seconds) - low) / max(high - low, 1)

    marks = [(share(10.0**power), f"{10.0**power:g}") for power in range(low, high + 1)]
    lines = panel.frame(marks, marks)
    lines.append(f'<path d="M{panel.x(0)} {panel.y(0)}L{panel.x(1)} {panel.y(1)}" stroke="#bbb"/>')
    largest = [name for name, _ in Counter(row.case.source for row in timed).most_common(SHOWN)]
    for number, name in enumerate([*largest, None]):
        rows = [row for row in timed if (row.case.source if row.case.source in largest else None) == name]
        colour = OTHERS if name is None else COLOURS[number]
        dots = "".join(f"M{panel.x(share(r.case.step_s or 1))} {panel.y(share(r.step_s))}h0" for r in rows)
        lines.append(
            f'<path d="{dots}" stroke="{colour}" stroke-width="4" stroke-linecap="round" stroke-opacity="0.6"/>'
        )
        words = f"{name or 'others'} ({len(rows)})"
        column, line = number % 3, number // 3
        lines.append(_text(60 + column * 105, TOP + SIDE + 58 + 18 * line, words, fill=colour, size=11, weight="bold"))
    return lines


def _histogram(timed: Sequence[Priced]) -> list[str]:
    """How many runs were forecast how far off: dense models on GPUs filled, experts and TPUs as a line."""
    panel = Panel(
        left=470,
        title="Errors",
        across="forecast / measured - 1; what lies beyond stands with the last",
        up="share of the runs",
    )
    edges = np.linspace(NEAR, FAR, BINS + 1)
    marks = [((off - NEAR) / (FAR - NEAR), f"{off:+.0%}" if off else "0") for off in (-0.4, -0.2, 0.0, 0.2, 0.4)]
    counted = {kind: _shares([row for row in timed if row.case.kind == kind], edges) for kind in ("dense", "moe_tpu")}
    most = max(0.05, *(float(shares.max()) for shares in counted.values()))
    lines = panel.frame(marks, [(part / 4, f"{most * part / 4:.0%}") for part in range(5)])
    looks = {"dense": 'fill="#4269d0" fill-opacity="0.55"', "moe_tpu": 'fill="none" stroke="#ff725c" stroke-width="2"'}
    for kind, shares in counted.items():
        steps = "".join(
            f"L{panel.x(i / BINS)} {panel.y(value / most)}L{panel.x((i + 1) / BINS)} {panel.y(value / most)}"
            for i, value in enumerate(shares)
        )
        lines.append(f'<path d="M{panel.x(0)} {panel.y(0)}{steps}L{panel.x(1)} {panel.y(0)}" {looks[kind]}/>')
    lines.append(_text(482, TOP + 20, "dense models on GPUs", fill="#4269d0", weight="bold"))
    lines.append(_text(482, TOP + 38, "experts and TPUs", fill="#ff725c", weight="bold"))
    return lines


def _shares(rows: Sequence[Priced], edges: np.ndarray) -> np.ndarray:
    off = [row.step_s / (row.case.step_s or 1) - 1 for row in rows]
    counts = np.histogram(np.clip(off, NEAR, np.nextafter(FAR, 0)), edges)[0]
    return counts / max(len(rows), 1)


def _ranking(jobs: Sequence[Job]) -> list[str]:
    """Each job's rank correlation against what the layout named as best costs beyond the best."""
    panel = Panel(left=860, title="Layouts of the same job, ranked", across="Kendall's tau", up="regret")
    far = max(0.05, *(job.regret for job in jobs), 0.05)
    low = min(0.5, *(math.floor(job.tau * 10) / 10 for job in jobs), 0.5)
    across = [(part / 5, f"{low + (1 - low) * part / 5:.2f}") for part in range(6)]
    lines = panel.frame(across, [(part / 4, f"{far * part / 4:.0%}") for part in range(5)])
    for job in jobs:
        x, y = panel.x((job.tau - low) / (1 - low)), panel.y(job.regret / far)
        look = 'fill="#ff725c"' if job.multi_node else 'fill="#4269d0" fill-opacity="0.4"'
        told = escape(f"{job.source} {job.name}: tau {job.tau:.2f}, regret {job.regret:.1%} of {job.layouts} layouts")
        lines.append(f'<circle cx="{x}" cy="{y}" r="5" {look}><title>{told}</title></circle>')
    lines.append(_text(860, TOP + SIDE + 58, "several nodes", fill="#ff725c", weight="bold"))
    lines.append(_text(960, TOP + SIDE + 58, "one node", fill="#4269d0", weight="bold"))
    return lines


def _text(x: float, y: float, words: str, **look: object) -> str:
    names = {"size": "font-size", "weight": "font-weight", "anchor": "text-anchor"}
    said = "".join(f' {names.get(name, name)}="{value}"' for name, value in look.items())
    return f'<text x="{round(x, 1)}" y="{round(y, 1)}"{said}>{escape(words)}</text>'
