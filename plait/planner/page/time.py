"""The page's waterfall: where a step's time goes, item after item."""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.search.cost_breakdown import BOTTLENECKS, TIME_NAMES, bottlenecks, message_seconds, time_items
from plait.planner.search.found import Search
from plait.report.figures import time_words

LEAST_TIME_SHARE_SHOWN = 0.004
"""Share of a step from which an item is drawn by itself."""
GROUPS = (*BOTTLENECKS, "all else")
"""What binds where an item takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallBar:
    """One item: it begins where the one before ended."""

    name: str
    group: str
    start_s: float
    spent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The items of a step's time one after the other; they end at `step_s`."""

    falls: tuple[WaterfallBar, ...]
    step_s: float
    hidden_s: float
    """Messages that travel under arithmetic and so cost nothing."""
    exposed_s: float
    """Messages that devices wait for: among the items."""
    binds: str


def waterfall(found: Search) -> Waterfall:
    """The chosen layout's step, taken apart."""
    items, step_s = time_items(found, found.chosen), float(found.step_s[found.chosen])
    seen = {name: spent for name, spent in items.items() if spent >= LEAST_TIME_SHARE_SHOWN * step_s}
    parts = [(TIME_NAMES[name], _group(name), spent) for name, spent in seen.items()]
    rest = step_s - sum(seen.values())
    if rest > 1e-9 * step_s:
        parts.append(("all else", GROUPS[-1], rest))
    falls, start_s = [], 0.0
    for name, group, spent in parts:
        falls.append(WaterfallBar(name=name, group=group, start_s=start_s, spent_s=spent))
        start_s += spent
    hidden, exposed = message_seconds(found, found.chosen)
    return Waterfall(
        falls=tuple(falls), step_s=step_s, hidden_s=hidden, exposed_s=exposed, binds=bottlenecks(items)[0][0]
    )


def waterfall_caption(waterfall: Waterfall) -> str:
    """What one sees, in words."""
    longest = max(waterfall.falls, key=lambda fall: fall.spent_s)
    words = (
        f"A step takes {time_words(waterfall.step_s)}. The longest item is {longest.name} with "
        f"{longest.spent_s / waterfall.step_s:.0%}; what limits the speed most is {waterfall.binds}."
    )
    if waterfall.hidden_s + waterfall.exposed_s < LEAST_TIME_SHARE_SHOWN * waterfall.step_s:
        return f"{words} Messages between devices take next to nothing."
    return (
        f"{words} Of the messages between devices {time_words(waterfall.exposed_s)} are exposed, that is, devices wait "
        f"for them; {time_words(waterfall.hidden_s)} more are hidden: they travel while devices compute, and cost no "
        f"time."
    )


def _group(name: str) -> str:
    return next(group for group, names in BOTTLENECKS.items() if name in names)
