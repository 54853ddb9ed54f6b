"""Checkpoints come as often as asked, or as often as their cost allows."""

from __future__ import annotations

import pytest

from plait.trainer.checkpointing.pace import CheckpointPace
from plait.units import Every

MINUTE = Every(60, "seconds")
CHEAP = Every(60, "seconds", cost_share=0.02)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def interval_s(pace: CheckpointPace, clock: Clock) -> float:
    """Seconds from now until a checkpoint is due."""
    begin = clock.now
    while not pace.is_due(step=10**6):
        clock.now += 0.5
    return clock.now - begin


def saved(pace: CheckpointPace, step: int, cost_s: float) -> str | None:
    """A save that begins and ends now."""
    pace.begun(step)
    return pace.cost_known(step, cost_s)


@pytest.mark.parametrize(("cost_s", "wanted_s"), [(0.3, 60), (1.2, 60), (2.0, 100), (12.0, 600)])
def test_saving_takes_at_most_its_share_of_the_time(cost_s: float, wanted_s: float) -> None:
    clock = Clock()
    pace = CheckpointPace(CHEAP, step=0, clock=clock)
    assert interval_s(pace, clock) == 60, "the first cost is not known yet"
    clock.now += cost_s
    saved(pace, 1, cost_s)
    waited_s = interval_s(pace, clock)
    assert waited_s == wanted_s and cost_s / (waited_s + cost_s) <= 0.02


@pytest.mark.parametrize("every", [MINUTE, Every(4, "steps")], ids=str)
def test_an_interval_that_was_asked_for_is_obeyed_whatever_it_costs(every: Every) -> None:
    clock = Clock()
    pace = CheckpointPace(every, step=0, clock=clock)
    clock.now += 60
    assert not pace.is_due(3) or every is MINUTE
    assert pace.is_due(4)
    assert saved(pace, 4, cost_s=50.0) is None, "nothing changed, so nothing is said"
    assert not pace.is_due(7)
    clock.now += 60
    assert pace.is_due(8)


def test_what_changes_is_said_once_and_in_plain_words() -> None:
    clock = Clock()
    pace = CheckpointPace(CHEAP, step=0, clock=clock)
    told = [saved(pace, step, cost_s) for step, cost_s in enumerate([1.0, 12.0, 13.0, 11.0, 0.5], 1)]
    assert told == [
        None,
        "saving took 12 s, so the next checkpoint comes after 10 min: at most 2% of the time goes to saving "
        "(checkpoint.every sets another interval)",
        None,
        None,
        "saving took 0.5 s, so the next checkpoint comes after 1 min: at most 2% of the time goes to saving "
        "(checkpoint.every sets another interval)",
    ]


def test_never_stays_never() -> None:
    clock = Clock()
    pace = CheckpointPace(Every(0, "steps"), step=0, clock=clock)
    clock.now += 10**6
    assert not pace.is_due(10**6)


def test_it_knows_the_share_of_the_time_that_saving_takes() -> None:
    clock = Clock()
    pace = CheckpointPace(Every(4, "steps"), step=0, clock=clock)
    assert pace.share == 0.0
    clock.now += 10
    saved(pace, 4, cost_s=0.5)
    assert pace.share == 0.05
    clock.now += 2
    saved(pace, 8, cost_s=4.0)
    assert pace.share == 1.0
