"""The machines of a run as they come and go between its starts, as training sees them."""

from __future__ import annotations

from collections.abc import Callable

from plait.commands.planning.introduction import layout_in_words
from plait.errors import PlaitError
from plait.launch.values.failure import FailureFacts
from plait.layout import Layout
from plait.machines.machine import Machine, usable_cores
from plait.planner.plan import Plan
from plait.units import counted
from plait.workers import CannotGoOn, HostWorkers, PlanFor, Renewed

_SAME_SPEED = 0.005
"""Steps whose times differ by less than this share are said to take as long."""


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


_NOT_OF_A_DEVICE = ("SIGKILL", "SIGTERM", "SIGINT")
"""Signals that kill a worker for reasons other than its GPU."""
Survey = Callable[[], Machine]
"""Looks at this machine with the devices that the recipe asks for; raises PlaitError where they cannot be used."""


class OneMachine:
    """ElasticWorkers of this machine alone. `plan_for` makes each further plan."""

    def __init__(self, workers: HostWorkers, survey: Survey, plan_for: PlanFor) -> None:
        self.workers = workers
        self._survey, self._plan_for = survey, plan_for

    @property
    def may_shrink(self) -> bool:
        return False

    def renewed(self, plan: Plan, failure: FailureFacts | None) -> Renewed | None:
        """As in ElasticWorkers: processors' cores tell what is gone, or torch after a failure that may be a GPU's."""
        gone = self._gone(plan, failure)
        if not gone:
            return None
        try:
            return Renewed(plan=self._plan_for(self.workers), subject="devices", who=f"{gone} are gone")
        except PlaitError as error:
            raise CannotGoOn(
                f"{gone} of this machine are gone, and what is left cannot carry the run: {error}; or bring them back: "
                "the run is saved, and the same command goes on with it",
                None,
            ) from error

    def _gone(self, plan: Plan, failure: FailureFacts | None) -> str:
        """Resources that this machine had when the plan was made and has lost since; empty if there are none."""
        if self.workers.fixed_workers is not None:  # torchrun's: plait cannot start others
            return ""
        if plan.machines.device == "cpu":
            return _lost_text(plan.machines.fingerprint["cores"], usable_cores(), "core")
        if failure is None or failure.what in _NOT_OF_A_DEVICE:  # looking at GPUs takes seconds
            return ""
        return _lost_text(plan.machines.fingerprint["devices"], self._survey().devices, "GPU")


def _lost_text(before: int, now: int, what: str) -> str:
    return f"{before - now} of {counted(before, what)}" if now < before else ""
