"""Warns when experts get no tokens any more, or have no room for all: once, and again when it is more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.report.metrics import StepReport

SETTLED_STEPS = 20
"""Before this step a router has hardly begun to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUse:
    """How a step's tokens used the experts of all layers together; all 0 without experts."""

    experts: int
    idle: int
    """Experts that no token chose."""
    choices: int
    dropped: int
    """Choices that found their expert full; 0 where experts have no capacity."""


class ExpertWatch:
    """Follows how many experts are idle, and what share of the choices is dropped; passes warnings to `note`."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._noted_idle, self._noted_share = 0, 0.0

    def at_report(self, report: StepReport, use: ExpertUse) -> None:
        """Warn of more idle experts than before, and of dropped choices if their share has doubled."""
        step = report.step
        if step >= SETTLED_STEPS and use.idle > self._noted_idle:
            self._noted_idle = use.idle
            self._note(
                f"step {step}: {use.idle} of {use.experts} experts got no token in this step, and an expert without "
                "tokens learns nothing; a higher model.expert_balance_rate, or a loss in model.expert_balance, "
                "spreads them"
            )
        share = use.dropped / max(use.choices, 1)
        if use.dropped and share >= 2 * self._noted_share:
            self._noted_share = share
            self._note(
                f"step {step}: {use.dropped} of {use.choices} choices of experts ({share:.1%}) found their expert full "
                "and were dropped, as model.expert_capacity says; a higher one drops fewer, and without it none is"
            )
