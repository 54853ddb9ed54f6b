"""How long measuring before a run may take: a share of the budget, regardless of the load on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from plait.errors import OutOfTime
from plait.launch.values.job import NO_LIMIT_S, Job
from plait.screen.screen import ShowProgress
from plait.units import Amount, format_duration

SHARE_OF_BUDGET = 0.1
WITHOUT_TIME_BUDGET_S = 60.0
"""Seconds of measuring where the budget is no time."""
LEAST_S = 0.2
"""Less is not enough to start workers and time anything."""
Timing = Literal["bounded", "none"]
"""Whether anything may be timed before a run; "none" is `--no-timing`."""


def with_skip_hint(show: ShowProgress) -> ShowProgress:
    """The progress display, with words behind each stage that say how to skip it."""
    return lambda done, total, stage: show(done, total, f"{stage} (--no-timing skips it)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringTime:
    """A deadline that all measurements before a run share."""

    limit_s: float
    """Time limit of all measurements together; 0 if none is wanted."""
    ends_at_s: float
    clock: Callable[[], float] = time.monotonic

    @staticmethod
    def of(budget: Amount, timing: Timing = "bounded") -> MeasuringTime:
        """The time for a run of this budget; it begins now."""
        limit_s = allowed_s(budget) if timing == "bounded" else 0.0
        return MeasuringTime(limit_s=limit_s, ends_at_s=time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_at_s - self.clock())

    def part(self, share: float) -> MeasuringTime:
        """This share of what is left; all of it where there is no limit."""
        return replace(self, ends_at_s=self.clock() + share * self.left_s)

    def limited(self, job: Job) -> Job:
        """The job, ended with OutOfTime when the time is up; raises OutOfTime at once where none is left."""
        if self.left_s < LEAST_S:
            raise OutOfTime("no time is left to measure in")
        return replace(job, limit_s=min(NO_LIMIT_S, self.left_s))

    def sentence(self, missing: list[str]) -> str:
        """What was not measured, as a reason of the plan; empty if everything was."""
        if not missing:
            return ""
        why = (
            f"no time to measure (limit {format_duration(self.limit_s)})"
            if self.limit_s
            else "not measured (--no-timing)"
        )
        what = " and ".join(missing)
        return f"{why}: {what}; the plan uses forecasts and earlier measurements"


UNLIMITED = MeasuringTime(limit_s=NO_LIMIT_S, ends_at_s=NO_LIMIT_S, clock=lambda: 0.0)
"""For commands that do nothing but measure."""


def allowed_s(budget: Amount) -> float:
    """Seconds that may go into measuring before a run of this budget."""
    return SHARE_OF_BUDGET * budget.value if budget.unit == "seconds" else WITHOUT_TIME_BUDGET_S
