"""How layouts compare: the next best ones, step times with the fastest layout, complexity with the chosen one, and a
layout that the recipe names with plait's own choice."""

from __future__ import annotations

import numpy as np

from plait.errors import PlaitError
from plait.planner.problem.candidates import Counts
from plait.planner.search.cost_breakdown import TIME_NAMES, time_items
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import kinds_of, layout_text
from plait.units import compared_text, counted, format_duration

SAME_TIME = 5e-4
"""Share of a step below which two times count as equal."""


def why_not(found: Search, index: int) -> str:
    """One layout's time and complexity: "3.79 s, 20.1% slower than the fastest (…), 4 points simpler than the chosen
    layout"."""
    return f"{time_compared(found, index)}, {complexity_compared(found, index)} the chosen layout"


def time_compared(found: Search, index: int) -> str:
    """One layout's step time against the fastest layout's; where it is slower than the chosen layout, also the item
    that costs it most."""
    step_s, time = float(found.step_s[index]), format_duration(float(found.step_s[index]))
    if step_s < (1 + SAME_TIME) * found.best_step_s:
        return f"{time}, {'the fastest' if index == found.fastest else 'as fast as the fastest'}"
    where = f" ({_worst_item(found, index)})" if step_s > (1 + SAME_TIME) * found.chosen_step_s else ""
    return f"{time}, {slower_than_fastest(found, index)}{where}"


def slower_than_fastest(found: Search, index: int) -> str:
    """The one base of a plan's percentages: "5.1% slower than the fastest", "3 times as slow as the fastest"."""
    factor = float(found.step_s[index]) / found.best_step_s
    return compared_text(factor, "slower", "faster", digits=1, than="the fastest")


def complexity_compared(found: Search, index: int) -> str:
    """One layout's complexity against the chosen one's, which the caller names: "2 points simpler than", "as simple
    as"."""
    more = int(found.complexity[index] - found.complexity[found.chosen])
    return (
        f"{counted(abs(more), 'point')} {'more complicated' if more > 0 else 'simpler'} than"
        if more
        else "as simple as"
    )


def recipe_layout_reason(found: Search) -> str:
    """The layout that the recipe names against the one that the planner chooses with [layout] left open."""
    free, named = found.with_layout_open, "as [layout] of the recipe says"
    if free is None:
        return named
    if isinstance(free, PlaitError):
        return f"{named}; left open, plait would choose nothing: {free}"
    own = free.candidates.row(free.chosen)
    if own == found.candidates.row(found.chosen) and free.cluster.islands == found.cluster.islands:
        return f"{named}; left open, the forecast would choose the same"
    factor = found.chosen_step_s / free.chosen_step_s
    slower = compared_text(factor, "slower", "faster", digits=1, than="that")
    yours = "about as fast" if factor <= 1 + free.tolerance else slower
    time = format_duration(free.chosen_step_s)
    return f"{named}; left open, the forecast would choose {layout_text(own)}, {time}; yours is {yours}"


def recipe_layout_changes(found: Search) -> str:
    """The effect of other machines, if the recipe names a part of the layout."""
    if found.constraints.degrees:
        return "the layout is as the recipe says, whatever the machines"
    return "not looked for, because [layout] of the recipe settles a part of the layout"


def runners_up(found: Search, top: int | None = None) -> list[int]:
    """The next best layouts, `top` of them or all: the fastest of each kind and of each way to cut the model, beside
    the chosen one."""
    c = found.candidates
    combinations = np.stack([kinds_of(c), c.pipeline, c.tensor])
    order = np.lexsort([found.complexity, found.step_s])
    _, first = np.unique(combinations[:, order], axis=1, return_index=True)
    own = (combinations == combinations[:, [found.chosen]]).all(axis=0)
    return [int(order[place]) for place in np.sort(first) if not own[order[place]]][:top]


def runners_up_lines(found: Search, top: int) -> list[str]:
    """The cost of the other layouts and why they lost; if none is listed, the reason."""
    others = runners_up(found)
    if others and not top:
        return [f"{counted(len(others), 'other kind', ',')} of layout would fit; --top N lists the fastest N of them"]
    if others:
        return [f"{layout_text(found.candidates.row(index))}: {why_not(found, index)}" for index in others[:top]]
    if found.constraints:
        return ["no other kind of layout was priced: [layout] of the recipe allows this kind alone"]
    if found.cluster.n_devices == 1:
        on_processor = found.cluster.islands[0].device.kind == "cpu"
        return [f"one {'worker' if on_processor else 'device'} has no other kind of layout"]
    return ["these devices have no other kind of layout that fits"]


def best_of_kinds(found: Search) -> Counts:
    """The fastest layout of every kind, the fastest first."""
    order = np.argsort(found.step_s, kind="stable")
    _, first = np.unique(kinds_of(found.candidates)[order], return_index=True)
    return order[np.sort(first)]


def _worst_item(found: Search, index: int) -> str:
    here, there = time_items(found, found.chosen), time_items(found, index)
    name = max(here, key=lambda item: there[item] - here[item])
    return (
        f"{TIME_NAMES[name]}: {format_duration(there[name])}, with the chosen layout "
        f"{format_duration(max(here[name], 0.0))}"
    )
