"""Why a run took longer than its budget of time is said by what its own steps took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.commands.monitoring.finish import missed_budget_line
from plait.units import Amount
from tests.report.test_report_receipt import RECEIPT

BUDGET = Amount(12, "seconds")


def line(steps: int, step_s: float, wall_s: float, budget: Amount = BUDGET, compile: str = "blocks") -> str:
    receipt = replace(RECEIPT, steps=steps, step_s_median=step_s, wall_s=wall_s)
    return missed_budget_line(budget, receipt, compile)  # pyright: ignore[reportArgumentType]


def test_steps_as_planned_leave_the_rest_to_all_else() -> None:
    """As read on an H100: layers were compiled in a run of seconds."""
    found = line(495, 0.0236, 26.6)
    assert found == (
        "the run took 26.6 s, not 12 s: its steps took 11.7 s, as planned, and compiling layers, evaluations and "
        "checkpoints 14.9 s"
    )
    assert line(495, 0.0236, 26.6, compile="off") == found.replace("compiling layers, ", "")


@pytest.mark.parametrize(("steps", "step_s", "wall_s"), [(495, 0.05, 26.6), (495, 0.01, 5.0), (100, 0.12, 8.0)])
def test_other_steps_are_the_reason_themselves(steps: int, step_s: float, wall_s: float) -> None:
    assert line(steps, step_s, wall_s).endswith(
        f"not 12 s: steps were {'slower' if wall_s > 12 else 'faster'} than timed"
    )


def test_nothing_is_said_of_a_budget_that_was_kept_or_is_no_time() -> None:
    assert line(495, 0.0236, 13.0) == ""
    assert line(495, 0.0236, 26.6, Amount(500, "steps")) == ""
