"""What every item of a step's time is priced with."""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_time import DeviceTime
from plait.planner.step_time.network_model import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs:
    """What every item of a step's time depends on: workload, candidate layouts, software, devices and network."""

    workload: Workload
    candidates: Candidates
    profile: SoftwareProfile
    device_time: DeviceTime
    network: Network
    largest_overlap: float
    """Share of a message that arithmetic may hide, as a probe found; 1 where none has measured."""
