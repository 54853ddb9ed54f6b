"""The picture of the motto: time of each layout against the cables' rate, as measured and as it was predicted."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.contenders import Line, measured
from benchmarks.lab.drawing import COLOURS, INK, PALE, path, stroke, svg, text

WIDTH, HEIGHT = 920, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 60, 60
LINES_AT_MOST = len(COLOURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One layout, or one baseline, over rates: (bits a second, seconds)."""

    name: str
    measured: tuple[tuple[float, float], ...]
    predicted: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From a value on a logarithmic axis to a place on the paper."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, steps: Sequence[int] = (1, 2, 5)) -> list[float]:
        """Round values between the ends."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [step * 10.0**power for power in powers for step in steps if self.low <= step * 10.0**power <= self.high]


def pictures(lines: Sequence[Line], out: Path) -> dict[Path, str]:
    """An SVG for each group of cases that differ in the rate alone, beside the file of results."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["case"]["group"], []).append(line)
    return {
        out.with_name(f"{out.stem}-{_slug(group)}.svg"): picture(group, same)
        for group, same in groups.items()
        if len(same) > 1
    }


def curves(lines: Sequence[Line]) -> list[Curve]:
    """The contenders of a group, those that were ever fastest or near it first."""
    times: dict[str, dict[float, float]] = {}
    forecasts: dict[str, dict[float, float]] = {}
    for line in lines:
        rate = rate_of_line(line)
        for one in measured(line):
            if one.bound == "failed":
                continue
            name = one.name.split(",")[0]
            times.setdefault(name, {})[rate] = min(one.step_s, times.get(name, {}).get(rate, math.inf))
            if one.predicted_s:
                known = forecasts.setdefault(name, {})
                known[rate] = min(one.predicted_s, known.get(rate, math.inf))
    best = {rate: min(each[rate] for each in times.values() if rate in each) for rate in map(rate_of_line, lines)}
    ordered = sorted(times, key=lambda name: min(second / best[rate] for rate, second in times[name].items()))
    return [
        Curve(
            name=name,
            measured=tuple(sorted(times[name].items())),
            predicted=tuple(sorted(forecasts.get(name, {}).items())),
        )
        for name in ordered[:LINES_AT_MOST]
    ]


def rate_of_line(line: Line) -> float:
    """The rate of a case's cables; without a limit what they were measured to carry."""
    rate = line["case"]["rate"]
    return min(line["carried_bits_per_s"]) if rate == "unshaped" else rate


def picture(group: str, lines: Sequence[Line]) -> str:
    """The SVG of one group."""
    drawn = curves(lines)
    points = [point for curve in drawn for point in (*curve.measured, *curve.predicted)]
    rates, seconds = [rate for rate, _ in points], [second for _, second in points]
    x = Scale(low=min(rates) / 1.3, high=max(rates) * 1.3, start=LEFT, end=WIDTH - RIGHT)
    y = Scale(low=min(seconds) / 1.2, high=max(seconds) * 1.2, start=HEIGHT - BOTTOM, end=TOP)
    parts = [
        text(LEFT, 24, f"Step time of each layout: {group}", size=15),
        text(LEFT, 42, "dots and lines: measured; dashes: predicted before the run", size=11),
        *_axes(x, y),
        *_crossings(lines, x),
        *(part for index, curve in enumerate(drawn) for part in _curve(curve, COLOURS[index], x, y)),
        *(part for index, curve in enumerate(drawn) for part in _legend(curve, COLOURS[index], index)),
    ]
    return svg(WIDTH, HEIGHT, parts)


def _axes(x: Scale, y: Scale) -> list[str]:
    parts = []
    for rate in x.ticks():
        parts.append(stroke((x(rate), y.start), (x(rate), y.end), PALE))
        parts.append(text(x(rate), y.start + 18, _rate(rate), anchor="middle"))
    for second in y.ticks():
        parts.append(stroke((x.start, y(second)), (x.end, y(second)), PALE))
        parts.append(text(x.start - 8, y(second) + 4, f"{second:g} s", anchor="end"))
    parts.append(text((x.start + x.end) / 2, HEIGHT - 14, "rate of each host's cable, bits a second", anchor="middle"))
    return parts


def _crossings(lines: Sequence[Line], x: Scale) -> list[str]:
    """Where the planner expected another layout to become the fastest, as said in the first case of the group."""
    inside = [crossing for crossing in lines[0]["crossings"] if x.low < crossing[0] < x.high]
    parts = []
    for place, (rate, below, above) in enumerate(inside):
        parts.append(stroke((x(rate), HEIGHT - BOTTOM), (x(rate), TOP), INK, dash="2 4"))
        words = f"predicted: {below} → {above} at {_rate(rate)}"
        parts.append(text(x(rate) + 4, TOP + 12 + 13 * place, words, size=10))
    return parts


def _curve(curve: Curve, colour: str, x: Scale, y: Scale) -> list[str]:
    places = [(x(rate), y(second)) for rate, second in curve.measured]
    foreseen = [(x(rate), y(second)) for rate, second in curve.predicted]
    parts = [path(places, colour), path(foreseen, colour, dash="6 4")]
    return parts + [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in places]


def _legend(curve: Curve, colour: str, index: int) -> list[str]:
    left, top = WIDTH - RIGHT + 20, TOP + 12 + 18 * index
    return [stroke((left, top - 4), (left + 22, top - 4), colour, width=2.5), text(left + 28, top, curve.name)]


def _rate(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:.3g} G" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.3g} M"


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower().replace("×", "x")).strip("-")
