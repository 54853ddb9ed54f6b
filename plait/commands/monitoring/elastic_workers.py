"""The machines of a run as they come and go between its starts, as training sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from plait.commands.planning.introduction import layout_in_words
from plait.errors import RunFailed, StopSignal
from plait.launch.values.failed_job import FailureFacts
from plait.layout import Layout
from plait.planner.plan import Plan
from plait.workers import WorkerPool

_SAME_SPEED = 0.005
"""Steps whose times differ by less than this share are said to take as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """A run's plan for the machines that are there now, and who came and went since the plan before, as a sentence
    (`who`). `until` says how long it is slower for it."""

    plan: Plan
    subject: Literal["hosts", "devices"]
    who: str
    until: str = ""


class CannotGoOn(RunFailed):
    """The machines that are left cannot carry the run, which is saved; `left_by` is the signal by which the one that is
    missing was stopped there, None where it was lost."""

    def __init__(self, sentence: str, left_by: StopSignal | None) -> None:
        super().__init__(sentence)
        self.left_by: StopSignal | None = left_by


class ElasticWorkers(Protocol):
    """The workers of a run, on machines that may come and go between its starts."""

    @property
    def workers(self) -> WorkerPool:
        """Those of the present machines."""
        ...

    @property
    def may_shrink(self) -> bool:
        """Whether the run may go on without a machine that it lost."""
        ...

    def renewed(self, plan: Plan, failure: FailureFacts | None) -> Renewed | None:
        """Look at who is there, and plan again where that is not who was there before; None where nothing changed. Call
        it while no ranks run. `failure` is what ended the start before; None where it was paused.

        Raises CannotGoOn where the machines that are left cannot carry the run.
        """
        ...


def came_and_went(gone: Sequence[str], came: Sequence[str]) -> str:
    """Names of hosts as a sentence."""
    left = f"{_listed(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else ""
    joined = f"{_listed(came)} joined" if came else ""
    return " and ".join(part for part in (left, joined) if part)


def change_text(before: Plan, renewed: Renewed) -> str:
    """Who came and went, what the planner did about it, and what that costs."""
    speed = change_of_speed(before, renewed.plan)
    if speed.endswith("slower") and renewed.until:
        speed += f" {renewed.until}"
    what = ", ".join(part for part in (in_place_of(before, renewed.plan), speed) if part)
    return f"{renewed.subject:8} {renewed.who}: {what}"


def in_place_of(before: Plan, after: Plan) -> str:
    """The new layout in words, beside the old one."""
    old, new = layout_in_words(before.placement.layout), layout_in_words(after.placement.layout)
    if old == new:
        return (
            f"{new}, as before"
            if before.placement.shares == after.placement.shares
            else f"{new}, as before, with other shares"
        )
    only_copies = _without_copies(before.placement.layout) == _without_copies(after.placement.layout) == [1, 1, 1, 1, 1]
    count = after.placement.layout.replicate
    if only_copies:
        return f"{count} {'copy' if count == 1 else 'copies'} in place of {before.placement.layout.replicate}"
    return f"{new} in place of {old}"


def change_of_speed(before: Plan, after: Plan) -> str:
    """How much slower or faster the run is by its plans; empty where one of them does not know."""
    old_s, new_s = (plan.step_s or (plan.forecast.step_s if plan.forecast else None) for plan in (before, after))
    if not old_s or not new_s:
        return ""
    rate = old_s / new_s
    if abs(rate - 1) < _SAME_SPEED:
        return "as fast as before"
    return f"{1 - rate:.0%} slower" if rate < 1 else f"{rate - 1:.0%} faster"


def _without_copies(layout: Layout) -> list[int]:
    return [degree for axis, degree in {**layout.degrees, "expert": layout.expert}.items() if axis != "replicate"]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
