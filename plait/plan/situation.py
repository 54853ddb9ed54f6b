"""What every item of a step's time is priced with."""

from __future__ import annotations

from dataclasses import dataclass

from plait.plan.arithmetic import Arithmetic
from plait.plan.candidates import Candidates
from plait.plan.collectives import Roads
from plait.plan.stack import Stack
from plait.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A workload, layouts to be priced, and the machines as the items need them."""

    workload: Workload
    candidates: Candidates
    stack: Stack
    arithmetic: Arithmetic
    roads: Roads
    hidden_at_most: float
    """Share of a message that arithmetic may hide, as a probe found."""
