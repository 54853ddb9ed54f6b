"""How one layout compares with the chosen one, and one that the recipe names with plait's own choice, in words."""

from __future__ import annotations

from plait.errors import PlaitError
from plait.planner.search.cost_breakdown import TIME_NAMES, time_items
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import layout_text
from plait.planner.search.search import search
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


def recipe_layout_reason(found: Search) -> str:
    """The layout that a person named against what the same search chooses without it."""
    try:
        free = search(found.workload, found.cluster, profile=found.profile)
    except PlaitError as error:
        return f"as [layout] of the recipe says; left open, plait would choose nothing: {error}"
    if free.candidates.row(free.chosen) == found.candidates.row(found.chosen):
        return "the layout that plait would also choose without [layout] of the recipe"
    factor = float(found.step_s[found.chosen] / free.step_s[free.chosen])
    own = layout_text(free.candidates.row(free.chosen))
    if factor <= 1 + free.tolerance:
        return f"as [layout] of the recipe says; plait would choose {own}, which is about as fast"
    there = format_duration(float(free.step_s[free.chosen]))
    return f"as [layout] of the recipe says; plait would choose {own}, {there}: yours is {slower_text(factor)}"


def recipe_layout_changes(found: Search) -> str:
    """What other machines would change, where the recipe names a part of the layout."""
    if found.constraints.degrees:
        return "the layout is as the recipe says, whatever the machines"
    return "not looked for, because [layout] of the recipe settles a part of the layout"


def _worst_item(found: Search, index: int) -> str:
    here, there = time_items(found, found.chosen), time_items(found, index)
    name = max(here, key=lambda item: there[item] - here[item])
    return (
        f"{TIME_NAMES[name]} takes {format_duration(there[name])} in place of {format_duration(max(here[name], 0.0))}"
    )
