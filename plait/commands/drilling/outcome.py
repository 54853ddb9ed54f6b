"""What became of faults: each beside the incident that followed it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from plait.commands.drilling.faults import Fault
from plait.report.incidents import BackAtWork, Incident

_CLOCK_S = 0.002
"""Incidents are dated to the millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A fault that was carried out, `at` seconds of the clock of the day, after this step and in that phase; `what` was
    done, where that was open. `found_at` and `back_at` are known of those after which nobody starts again."""

    at: float
    step: int
    phase: str = ""
    what: str = ""
    found_at: float | None = None
    back_at: float | None = None
    failure: str = ""
    """Why it could not be carried out after all."""

    def found(self, at: float) -> Carried:
        """The same, noticed at this time."""
        return replace(self, found_at=at)

    def back(self, at: float) -> Carried:
        """The same, with the run as it was before since this time."""
        return replace(self, back_at=at)

    def failed(self, why: str) -> Carried:
        """The same, which nobody could have noticed."""
        return replace(self, failure=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedFault:
    """The incident that followed a fault, and after how many seconds from the fault on it was known and the run was
    back at work; None where it is not."""

    incident: Incident
    found_after_s: float
    back_after_s: float | None


def what_followed(at: float, incidents: Sequence[Incident], back: Sequence[BackAtWork]) -> FollowedFault | None:
    """What followed what was done at this time: the first incident since then, and the first step after it.

    Where workers died once more on their way back, the step came after a later start.
    """
    incident = next((one for one in incidents if _seconds(one) >= at - _CLOCK_S), None)
    if incident is None:
        return None
    found_after_s = max(0.0, _seconds(incident) - at)
    first = next((one for one in back if one.generation > incident.generation), None)
    back_after_s = None
    if first is not None:
        last = max((one for one in incidents if one.generation < first.generation), key=lambda one: one.generation)
        back_after_s = max(0.0, _seconds(last) - at) + first.back_after_s
    return FollowedFault(incident=incident, found_after_s=found_after_s, back_after_s=back_after_s)


def told_fault(
    fault: Fault, carried: Carried | None, incidents: Sequence[Incident], back: Sequence[BackAtWork]
) -> Mapping[str, Any]:
    """A fault for a report: kind, rank, step, phase, what, found_after_s, back_after_s, steps_lost; null where it did
    not come to that. Nobody looks for one that is only slow."""
    told: dict[str, Any] = {"kind": fault.kind, "rank": fault.rank, "step": fault.step, "phase": "", "what": ""}
    told |= dict.fromkeys(("found_after_s", "back_after_s", "steps_lost"))
    if carried is None:
        return told
    told |= {"step": carried.step, "phase": carried.phase, "what": carried.failure or carried.what}
    if carried.failure:
        return told
    followed = what_followed(carried.at, incidents, back) if fault.restarts else None
    if followed is not None:
        told |= {"found_after_s": round(followed.found_after_s, 3), "steps_lost": followed.incident.steps_lost}
        if followed.back_after_s is not None:
            told["back_after_s"] = round(followed.back_after_s, 3)
    if carried.found_at is not None:
        told["found_after_s"] = round(carried.found_at - carried.at, 3)
    if carried.back_at is not None:
        told["back_after_s"] = round(carried.back_at - carried.at, 3)
        told["steps_lost"] = told["steps_lost"] or 0
    return told


def _seconds(incident: Incident) -> float:
    return datetime.fromisoformat(incident.at).timestamp()
