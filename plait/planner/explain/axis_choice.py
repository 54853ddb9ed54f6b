"""Whether cutting a model along an axis pays on a cluster, and at what bandwidth the answer turns.

An axis pays where the fastest layout with it beats the fastest one without by more than the forecast can tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.planner.explain.tipping_points import (
    MANY_LAYOUTS,
    TippingQuantity,
    crossing,
    number_of_layouts,
    representatives,
    search_again,
    step_s_elsewhere,
    with_faster_network,
    with_faster_nodes,
)
from plait.planner.problem.candidates import Counts, Reals
from plait.planner.search.found import Search

CutAxis = Literal["pipeline", "expert"]
AXIS_BITS = {"pipeline": 4, "expert": 8}
"""The axes' bits in a kind of layout (layout_kinds.kinds_of), above the three of what copies split."""


NEARBY = 1.1
"""Power of a turning point's factor at which a whole search must agree with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """Whether an axis pays, and where the answer turns."""

    axis: CutAxis
    with_axis: int | None
    """Index of the fastest layout with the axis; None where none fits."""
    without: int | None
    leanest_without_bytes: float
    """Bytes a device of the leanest layout without it, whether it fits or not."""
    pays: bool
    link: TippingQuantity
    """The link whose bandwidth was altered: between nodes where there are several, else inside one."""
    slower: float | None
    """Times the present bandwidth, below 1, at which the answer turns; None where no slower link turns it."""
    faster: float | None
    """The same above 1."""


def axis_choice(found: Search, axis: CutAxis) -> AxisChoice:
    """The answer for one axis."""
    has_axis = getattr(found.candidates, axis) > 1
    with_axis, without = _fastest(found, has_axis), _fastest(found, ~has_axis)
    link: TippingQuantity = "between" if found.cluster.n_nodes > 1 else "inside"
    both = with_axis is not None and without is not None
    slower, faster = _turns(found, axis, link) if both else (None, None)
    return AxisChoice(
        axis=axis,
        with_axis=with_axis,
        without=without,
        leanest_without_bytes=min(
            (needed for kind, needed in found.leanest_bytes.items() if not kind // 8 & AXIS_BITS[axis]), default=np.inf
        ),
        pays=with_axis is not None and (without is None or _pays(found, found.step_s, has_axis)),
        link=link,
        slower=slower,
        faster=faster,
    )


def _fastest(found: Search, among: NDArray[np.bool_]) -> int | None:
    return int(np.where(among, found.step_s, np.inf).argmin()) if among.any() else None


def _pays(found: Search, step_s: Reals, has_axis: NDArray[np.bool_]) -> bool:
    return bool(step_s[has_axis].min() * (1 + found.tolerance) < step_s[~has_axis].min())


def _turns(found: Search, axis: CutAxis, link: TippingQuantity) -> tuple[float | None, float | None]:
    """The multiples of the present bandwidth, below and above 1, at which the answer turns: found among
    representatives, and where whole searches are quick and say otherwise nearby, by these."""
    rows: Counts = representatives(found)
    has_axis = getattr(found.candidates, axis)[rows] > 1
    alter = with_faster_network if link == "between" else with_faster_nodes
    step_s_on = step_s_elsewhere(found, rows)
    here = _pays(found, found.step_s[rows], has_axis)

    def quick(factor: float) -> bool:
        return _pays(found, step_s_on(alter(found.cluster, factor)), has_axis) != here

    def whole(factor: float) -> bool:
        other = search_again(found, found.workload, alter(found.cluster, factor))
        return _pays(other, other.step_s, getattr(other.candidates, axis) > 1) != here

    def turn(step: float) -> float | None:
        limits = crossing(quick, (1.0, step), step)
        if limits is not None and number_of_layouts(found) < MANY_LAYOUTS:
            same, other = limits
            if whole(same ** (1 / NEARBY)) or not whole(other**NEARBY):
                limits = crossing(whole, (same**0.7, other), step**0.5)
        return limits[1] if limits else None

    return turn(0.5), turn(2.0)
