"""How one layout compares with the chosen one, in words."""

from __future__ import annotations

from plait.planner.search.cost_breakdown import TIME_NAMES, time_items
from plait.planner.search.found import Search
from plait.units import counted, format_duration, slower_text

SAME_TIME = 5e-4
"""Share of a step below which a difference is none."""


def why_not(found: Search, index: int) -> str:
    """How one layout compares with the chosen one: its time, what makes it slower, its complexity."""
    more = int(found.complexity[index] - found.complexity[found.chosen])
    points = counted(abs(more), "point")
    harder = f"{'more complicated' if more > 0 else 'simpler'} by {points}" if more else "as simple"
    joined = "and " if found.step_s[index] < (1 + SAME_TIME) * found.step_s[found.chosen] else ""
    return f"{time_compared(found, index)}, {joined}{harder}"


def time_compared(found: Search, index: int) -> str:
    """The time of one layout's step against that of the chosen one, and what makes it slower."""
    factor = float(found.step_s[index] / found.step_s[found.chosen])
    time = format_duration(float(found.step_s[index]))
    if factor < 1 - SAME_TIME:
        return f"{time}, {1 - factor:.1%} faster"
    if factor < 1 + SAME_TIME:
        return f"{time}, no faster"
    return f"{time}, {slower_text(factor)} ({_worst_item(found, index)})"


def _worst_item(found: Search, index: int) -> str:
    here, there = time_items(found, found.chosen), time_items(found, index)
    name = max(here, key=lambda item: there[item] - here[item])
    return (
        f"{TIME_NAMES[name]} takes {format_duration(there[name])} in place of {format_duration(max(here[name], 0.0))}"
    )
