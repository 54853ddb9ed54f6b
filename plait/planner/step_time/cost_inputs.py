"""All that the cost of layouts depends on, in one value that every price takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from plait.machines.cluster import Cluster
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_time import DeviceTime, device_time_of
from plait.planner.step_time.measured_network import largest_overlap
from plait.planner.step_time.network_model import Network, network_of


@dataclass(frozen=True, kw_only=True, eq=False)
class CostInputs:
    """Candidate layouts of a workload on a cluster, run by a software profile; alter one field with
    dataclasses.replace."""

    workload: Workload
    cluster: Cluster
    candidates: Candidates
    profile: SoftwareProfile

    def with_candidates(self, candidates: Candidates) -> CostInputs:
        """These inputs with other candidates."""
        return replace(self, candidates=candidates)

    @cached_property
    def device_time(self) -> DeviceTime:
        """Times of layers, head and optimizer on the slowest device."""
        return device_time_of(self.workload, self.cluster, self.profile)

    @cached_property
    def network(self) -> Network:
        """The links inside and between nodes."""
        return network_of(self.cluster)

    @cached_property
    def largest_overlap(self) -> float:
        """Share of a message that arithmetic can hide at most, as a probe found; 1 where none has measured it."""
        return largest_overlap(self.cluster)
