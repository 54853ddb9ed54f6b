"""One layout on one cluster, to be priced again with something altered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from plait.cluster.cluster import Cluster
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.search.cost_breakdown import BOTTLENECKS, TIME_NAMES
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import bytes_of, step_seconds, step_time_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """One layout with everything that its cost depends on."""

    workload: Workload
    cluster: Cluster
    profile: SoftwareProfile
    layout: Candidates
    """A single candidate."""

    @property
    def step_s(self) -> float:
        return float(step_seconds(self.workload, self.cluster, self.layout, self.profile)[0])

    @property
    def items(self) -> Mapping[str, float]:
        """Seconds by item, by the closed form."""
        priced = step_time_of(self.workload, self.cluster, self.layout, self.profile)
        return {name: float(getattr(priced, name)[0]) for name in (*TIME_NAMES, "hidden")}

    @property
    def waited_s(self) -> float:
        """Seconds of a step in which devices wait for messages."""
        return sum(self.items[name] for name in BOTTLENECKS["links"])

    @property
    def bytes_per_device(self) -> float:
        return float(bytes_of(self.workload, self.layout, self.profile)[0])


def chosen_layout(found: Search) -> PricedLayout:
    """The layout that a search chose, as it was priced."""
    chosen = found.candidates.select(np.array([found.chosen]))
    return PricedLayout(workload=found.workload, cluster=found.cluster, profile=found.profile, layout=chosen)
