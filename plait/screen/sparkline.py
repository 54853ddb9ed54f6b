"""A small curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from statistics import mean

BLOCKS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
"""Eight levels, the lowest first."""


def sparkline(values: Sequence[float], columns: int, encoding: str) -> str:
    """The means of up to `columns` equal parts of the values, as one character each; what is not finite is left out.

    Blocks where the encoding has them, else ASCII. Empty for fewer than two values.
    """
    finite = [value for value in values if isfinite(value)]
    if len(finite) < 2:
        return ""
    parts = min(columns, len(finite))
    edges = [part * len(finite) // parts for part in range(parts + 1)]
    means = [mean(finite[first:end]) for first, end in pairwise(edges)]
    levels, low, high = _levels_of(encoding), min(means), max(means)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in means)


def _levels_of(encoding: str) -> str:
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII_LEVELS
    return BLOCKS
