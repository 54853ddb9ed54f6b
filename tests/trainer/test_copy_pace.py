"""How many steps lie between two copies of the state in memory: as few as the measured costs allow."""

from __future__ import annotations

import pytest

from plait.trainer.checkpointing.pace import COPY_COST_SHARE, FIRST_AFTER_STEPS, CopyPace
from plait.units import Every

AUTO = Every(4, "steps", cost_share=0.02)


def due_after(pace: CopyPace, step: int) -> int:
    """Steps from this one until a copy is due."""
    return next(later for later in range(1, 10**6) if pace.is_due(step + later))


@pytest.mark.parametrize(("cost_s", "saving", "wanted"), [(0.0001, 0.0, 1), (0.004, 0.0, 4), (0.004, 0.01, 8)])
def test_it_is_the_fewest_steps_that_with_saving_cost_two_percent(cost_s: float, saving: float, wanted: int) -> None:
    pace = CopyPace(AUTO, step=10)
    assert due_after(pace, 10) == FIRST_AFTER_STEPS
    for _ in range(20):
        pace.stepped(0.05)
    pace.begun(12)
    said = pace.copied(cost_s, saving)
    assert due_after(pace, 12) == wanted == pace.every_steps
    assert said is not None and (f"every {wanted} steps" in said or (wanted == 1 and "every 1 step:" in said))
    assert cost_s / (wanted * 0.05) <= 0.02 - saving
    assert wanted == 1 or cost_s / ((wanted - 1) * 0.05) > 0.02 - saving, "fewer would cost more"


def test_saving_that_takes_it_all_leaves_copies_their_half() -> None:
    pace = CopyPace(AUTO, step=0)
    pace.stepped(0.1)
    pace.stepped(0.1)
    pace.copied(0.01, 0.5)
    assert due_after(pace, 0) == round(0.01 / (COPY_COST_SHARE * 0.1))


def test_it_is_said_again_only_where_it_changed_by_a_factor_of_two() -> None:
    pace = CopyPace(AUTO, step=0)
    for _ in range(3):
        pace.stepped(0.1)
    assert pace.copied(0.010, 0.0) is not None
    assert pace.copied(0.012, 0.0) is None
    said = [pace.copied(0.1, 0.0) for _ in range(20)]
    assert 1 <= sum(one is not None for one in said) <= 2 and pace.every_steps == 50


def test_one_slow_copy_changes_nothing() -> None:
    pace = CopyPace(AUTO, step=0)
    for _ in range(9):
        pace.stepped(0.1)
        pace.copied(0.002, 0.0)
    assert pace.copied(5.0, 0.0) is None and pace.every_steps == 1


def test_the_first_step_is_no_measure_of_a_step() -> None:
    pace = CopyPace(AUTO, step=0)
    for step_s in (60.0, 0.1, 0.1):
        pace.stepped(step_s)
    pace.copied(0.02, 0.0)
    assert pace.every_steps == 10


def test_a_number_is_obeyed_and_never_is_never() -> None:
    pace = CopyPace(Every(5, "steps"), step=3)
    pace.stepped(0.1)
    assert pace.copied(9.0, 0.0) is None and due_after(pace, 3) == 5
    never = CopyPace(Every(0, "steps"), step=0)
    assert not never.is_due(10**6) and never.every_steps == 0
