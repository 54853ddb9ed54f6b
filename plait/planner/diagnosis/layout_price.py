"""Time and memory of a single layout, for a diagnosis that alters one input after another.

Everything here takes the CostInputs of a single candidate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plait.planner.search.cost_breakdown import BOTTLENECKS, TIME_NAMES
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import bytes_of, step_seconds, step_time_of
from plait.planner.step_time.cost_inputs import CostInputs


def chosen_layout(found: Search) -> CostInputs:
    """The layout that a search chose, with all that its price depended on."""
    return found.cost_inputs.with_candidates(found.candidates.select(np.array([found.chosen])))


def layout_step_s(layout: CostInputs) -> float:
    """Seconds of a step."""
    return float(step_seconds(layout)[0])


def layout_items_s(layout: CostInputs) -> Mapping[str, float]:
    """Seconds of a step by item, by the closed form, and those of messages that arithmetic hides."""
    priced = step_time_of(layout)
    return {name: float(getattr(priced, name)[0]) for name in (*TIME_NAMES, "hidden")}


def waited_s(layout: CostInputs) -> float:
    """Seconds of a step in which devices wait for messages."""
    items = layout_items_s(layout)
    return sum(items[name] for name in BOTTLENECKS["links"])


def layout_bytes(layout: CostInputs) -> float:
    """Bytes of memory that a device needs."""
    return float(bytes_of(layout.workload, layout.candidates, layout.profile)[0])
