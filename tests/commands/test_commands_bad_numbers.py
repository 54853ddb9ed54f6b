"""What follows a step with bad numbers: once more, without its samples, and then as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from plait.commands.monitoring.recovery import (
    MOST_REWINDS,
    MOST_SKIPPED_STEPS,
    Followed,
    after_bad_step,
    guard_argument,
)
from plait.report.incidents import BackAtWork, Incident, StartLine, generation_of, lost_by_cause, skipped_ranges
from plait.trainer.divergence import SPIKE_WINDOW_STEPS, BadStep

BATCH = 7
Samples = Literal["endless", "as many as epochs have"]


def bad(step: int) -> BadStep:
    return BadStep(step=step, what="loss nan")


def incident(step: int, followed: Followed, *, resumed_from: int = 0, generation: int = 1) -> Incident:
    first, last = followed.skipped or (None, None)
    return Incident(
        generation=generation, at="", cause="numbers", what="", rank=None, host=None, device=None, step=step, place="",
        stack="", resumed_from=resumed_from, lost_s=0.5, found_after_s=0.0, decision="started again",
        sentence=followed.sentence, bad_step=step, skipped_first=first, skipped_last=last,
        judged_after=followed.judged_after,
    )  # fmt: skip


def after(step: int, told: list[Incident], resumed_from: int, samples: Samples = "endless") -> Followed:
    return after_bad_step(bad(step), told, resumed_from=resumed_from, batch_sequences=BATCH, samples=samples)


def follow(steps: list[int], samples: Samples = "endless") -> tuple[list[Followed], list[Incident]]:
    found: list[Followed] = []
    told: list[Incident] = []
    for step in steps:
        found.append(after(step, told, 0, samples))
        told.append(incident(step, found[-1]))
    return found, told


def test_a_step_is_taken_again_then_without_its_samples_then_as_it_is() -> None:
    found, told = follow([9, 9, 9])
    assert [one.treatment for one in found] == ["again", "skip", "let pass"]
    assert found[1].skipped == (8 * BATCH, 9 * BATCH - 1) and found[2].judged_after == 9 + SPIKE_WINDOW_STEPS
    assert f"its samples {8 * BATCH} to {9 * BATCH - 1} are skipped" in found[1].sentence
    argument = guard_argument(told, [], 0)
    assert argument["skipped"] == [9] and argument["guard"]["judged_after"] == 9 + SPIKE_WINDOW_STEPS
    later = after(700, told, 690)
    assert later.treatment == "again"
    second = after(700, [*told, incident(700, later, resumed_from=690)], 690)
    assert second.skipped == (700 * BATCH, 701 * BATCH - 1)  # one batch was left out before
    assert [(one.step, one.first) for one in skipped_ranges([incident(700, second), *told])] == [
        (9, 8 * BATCH), (700, 700 * BATCH),
    ]  # fmt: skip


def test_there_is_an_end_to_rewinds_and_to_skipped_samples() -> None:
    found, _ = follow(list(range(20, 40)))
    assert [one.treatment for one in found] == ["again"] * MOST_REWINDS + ["let pass"] * (20 - MOST_REWINDS)
    told: list[Incident] = []
    for step in range(100, 100 * (MOST_SKIPPED_STEPS + 2), 100):
        for _ in range(2):
            followed = after(step, told, step - 1)
            told.append(incident(step, followed, resumed_from=step - 1))
    skips = [one.skipped_first is not None for one in told]
    assert sum(skips) == MOST_SKIPPED_STEPS and told[-1].judged_after > 0


def test_a_run_of_so_many_epochs_has_no_other_samples_to_take() -> None:
    found, _ = follow([9, 9], "as many as epochs have")
    assert [one.treatment for one in found] == ["again", "let pass"]


def test_what_failures_cost_is_told_by_their_cause() -> None:
    once = incident(9, Followed(treatment="again", sentence=""))
    killed = replace(once, cause="killed", generation=2, found_after_s=2.0, lost_s=1.0)
    back = [BackAtWork(generation=2, back_after_s=0.25), BackAtWork(generation=3, back_after_s=4.0)]
    assert lost_by_cause([once, killed], back) == {"killed": 7.0, "numbers": 0.75}
    assert list(lost_by_cause([once, killed], back)) == ["killed", "numbers"]


@pytest.mark.parametrize(("step", "generation"), [(1, 1), (20, 1), (21, 2), (25, 2), (26, 3), (60, 3)])
def test_a_step_was_taken_by_the_newest_start_before_it(step: int, generation: int) -> None:
    starts = [StartLine(generation=n, steps_done=done, at="") for n, done in ((1, 0), (2, 20), (3, 25))]
    assert generation_of(step, starts) == generation and generation_of(step, []) == 0
