"""What the plan says about a layout that the recipe names, or of which it names a part."""

from __future__ import annotations

from plait.errors import PlaitError
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import layout_text
from plait.planner.search.search import search
from plait.units import format_duration, slower_text


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
