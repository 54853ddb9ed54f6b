"""What a person asks of a drill, and the faults that come of it in a run's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from plait.commands.drilling.faults import (
    DrilledPlan,
    Fault,
    drawn_faults,
    faults_by_time,
    require_possible,
    with_moments,
)
from plait.errors import PlaitError
from plait.units import parse_amount

MOST_DRAWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedFaults:
    """The faults that a person named, how many more are drawn, or for how many seconds some come; without a seed one is
    drawn."""

    named: Sequence[Fault] = ()
    drawn: int = 0
    seconds: float = 0.0
    seed: int | None = None

    @property
    def lost_hosts(self) -> int:
        """How many hosts besides this one the named faults need."""
        return max((fault.rank for fault in self.named if fault.kind == "lose-host"), default=0)


def parse_random(text: str) -> tuple[int, float]:
    """How many faults are to be drawn, or for how many seconds: of "5" or "30min". Raises PlaitError for anything
    else."""
    if text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_DRAWN)) and int(text) <= MOST_DRAWN:
        return int(text), 0.0
    try:
        amount = parse_amount(text)
    except PlaitError:
        amount = None
    if amount is None or amount.unit != "seconds":
        raise PlaitError(f"--random {text}: write how many failures, such as 5, or for how long, such as 30min")
    return 0, amount.value


def planned_faults(asked: AskedFaults, plan: DrilledPlan, seed: int, step_s: float) -> list[Fault]:
    """The faults that come in a run of this plan, in their order; raises PlaitError for those that it cannot have."""
    more = faults_by_time(plan, seed, seconds=asked.seconds) if asked.seconds else drawn_faults(asked.drawn, plan, seed)
    return ordered_faults([*with_moments(asked.named, plan, seed), *more], plan, step_s)


def faults_from_now(asked: AskedFaults, plan: DrilledPlan, seed: int, step_s: float) -> list[Fault]:
    """The same for a run that is at work: those that are drawn come by time, from now on."""
    more: list[Fault] = []
    if asked.drawn or asked.seconds:
        more = faults_by_time(plan, seed, seconds=asked.seconds or inf, count=asked.drawn or inf)
    return ordered_faults([*with_moments(asked.named, plan, seed), *more], plan, step_s)


def ordered_faults(faults: Sequence[Fault], plan: DrilledPlan, step_s: float) -> list[Fault]:
    """Faults as they come one after the other, where a step takes so long; raises PlaitError for what cannot be."""
    require_possible(faults, plan)
    return sorted(faults, key=lambda fault: fault.step if fault.at_s is None else fault.at_s / step_s)
