"""Fair comparison on a machine that is not quiet: contenders take turns in rounds and are compared round by round.

A ratio is always taken between turns of one round, so that a slow minute hits both sides; the median of the rounds'
ratios is the result, their least and greatest say how far to trust it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

RESULTS = Path(__file__).parent / "results"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One contender beside the reference; ratios are its seconds over the reference's: above 1, the reference won."""

    name: str
    median_s: float
    ratio: float
    least_ratio: float
    greatest_ratio: float


def alternate(names: Sequence[str], rounds: int, turn: Callable[[str], T]) -> dict[str, list[T]]:
    """Call `turn` for every name in every round; each round begins with another name, so that no place is favoured."""
    turns: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            turns[name].append(turn(name))
    return turns


def compare(seconds: Mapping[str, Sequence[float]], reference: str) -> list[Standing]:
    """Every contender against `reference`, round by round."""
    return [_standing(name, values, seconds[reference]) for name, values in seconds.items()]


def table(standings: Sequence[Standing], columns: Mapping[str, Mapping[str, str]], reference: str) -> str:
    """A Markdown table of the standings; `columns` adds a text per contender under each heading."""
    headings = ["contender", "ms a step", *columns, f"time ÷ {reference}", "least … greatest"]
    rows = [
        [
            one.name,
            f"{one.median_s * 1e3:.1f}",
            *(texts[one.name] for texts in columns.values()),
            f"{one.ratio:.3f}",
            f"{one.least_ratio:.3f} … {one.greatest_ratio:.3f}",
        ]
        for one in standings
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, ["---"] * len(headings), *rows])


def save(name: str, result: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """Write NAME-DATE.json, with a number behind it where today's file of that name exists."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    stem = f"{name}-{now:%Y-%m-%d}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    path = next(path for path in (folder / f"{each}.json" for each in names) if not path.exists())
    path.write_text(json.dumps({"name": name, "date": now.isoformat(timespec="seconds"), **result}, indent=2) + "\n")
    return path


def _standing(name: str, values: Sequence[float], reference: Sequence[float]) -> Standing:
    ratios = [value / base for value, base in zip(values, reference, strict=True)]
    return Standing(
        name=name,
        median_s=median(values),
        ratio=median(ratios),
        least_ratio=min(ratios),
        greatest_ratio=max(ratios),
    )
