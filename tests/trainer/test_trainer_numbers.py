"""Which steps are called bad, and where the loop ends for one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import exp, inf, nan

import pytest

from plait.report.metrics import StepReport
from plait.trainer.checkpointing.background import SaveEnd
from plait.trainer.divergence import SPIKE_WINDOW_STEPS, BadStep, NumberGuard, NumberWatch
from plait.trainer.loop import run_loop
from plait.trainer.state import TrainState, past_skipped
from plait.units import Every
from tests.trainer.test_trainer_loop import PACE, Diary


def report(step: int, loss: float, norm: float) -> StepReport:
    return StepReport(
        step=step, tokens=step, loss=loss, grad_norm=norm, lr=1e-3, step_s=0.1, tokens_per_s=1.0, mfu=None,
        data_wait_s=0.0,
    )  # fmt: skip


def healthy(steps: int, *, seed: int, noise: float, tail: float) -> Iterator[StepReport]:
    """A run with a warm-up: losses that fall from 10 to 2 with a hill of 1.5 nats on the way, noise that is three times
    as large in one step of a hundred; gradients that fall and rise again while the learning rate does, times numbers of
    a long tail."""
    dice = random.Random(seed)
    for step in range(1, steps + 1):
        trend = 2 + 8 * exp(-step / 300) + 1.5 * exp(-(((step - 600) / 30) ** 2))
        loss = trend + dice.gauss(0, noise) * (3 if dice.random() < 0.01 else 1)
        gradient = 0.3 + 8 * exp(-step / 50) + 1.5 * min(1, step / 500)
        yield report(step, loss, gradient * exp(dice.gauss(0, tail)))


@pytest.mark.parametrize(("noise", "tail"), [(0.01, 0.1), (0.1, 0.4), (0.3, 0.6), (0.5, 1.0)])
def test_healthy_runs_give_no_alarm_in_twenty_thousand_steps(noise: float, tail: float) -> None:
    for seed in range(4):
        watch = NumberWatch(NumberGuard(judged_after=0))
        assert [bad for one in healthy(5_000, seed=seed, noise=noise, tail=tail) if (bad := watch.judge(one))] == []


@pytest.mark.parametrize("step", [40, 200, 3_000])
@pytest.mark.parametrize(("loss", "norm"), [(10.0, 1.0), (1.0, 12.0)])
def test_what_is_ten_times_as_large_as_in_a_healthy_run_is_a_spike(step: int, loss: float, norm: float) -> None:
    watch = NumberWatch(NumberGuard(judged_after=0))
    found = []
    for one in healthy(step + 5, seed=1, noise=0.1, tail=0.1):
        spiked = replace(one, loss=one.loss * loss, grad_norm=one.grad_norm * 30 if norm > 1 else one.grad_norm)
        if bad := watch.judge(spiked if one.step == step else one):
            found.append(bad)
    assert [bad.step for bad in found] == [step]
    assert found[0].what.startswith("loss" if loss > 1 else "gradient norm")


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (nan, 1.0, "loss nan"),
        (inf, 1.0, "loss inf"),
        (2.0, nan, "gradient norm nan"),
        (2.0, inf, "gradient norm inf"),
    ],
)
def test_what_is_not_finite_is_bad_from_the_first_step_on(loss: float, norm: float, what: str) -> None:
    bad = NumberWatch(NumberGuard(judged_after=0)).judge(report(1, loss, norm))
    assert bad == BadStep(step=1, what=what)


def test_steps_that_are_let_pass_are_not_judged_and_those_before_this_start_count() -> None:
    calm = [2.0] * SPIKE_WINDOW_STEPS
    guard = NumberGuard(judged_after=0, losses=calm, norms=calm)
    assert NumberWatch(guard).judge(report(500, 9.0, 2.0)) is not None
    assert NumberWatch(NumberGuard(judged_after=0)).judge(report(500, 9.0, 2.0)) is None
    patient = NumberWatch(replace(guard, judged_after=500))
    assert patient.judge(report(500, nan, 9.0)) is None and patient.judge(report(501, nan, 9.0)) is not None


@pytest.mark.parametrize("report_every", [1, 4])
def test_the_loop_ends_at_a_bad_step_without_saving_what_came_after_it(report_every: int) -> None:
    diary = Diary(loses={6: nan}, going_on=SaveEnd(step=4, cost_s=0.0, blocked_s=0.0))
    pace = replace(PACE, report_every_steps=report_every, checkpoint_every=Every(4, "steps"))
    state, end = run_loop(TrainState(), pace, diary.actions(), diary, NumberGuard(judged_after=0))
    assert end == BadStep(step=6, what="loss nan")
    assert state.step == (6 if report_every == 1 else 8)
    assert [entry.split()[1] for entry in diary.entries if entry.startswith("save")] == ["4"]
    assert diary.reports[-1].step == state.step


def test_a_healthy_run_is_the_same_with_a_guard() -> None:
    with_guard, without = Diary(), Diary()
    ends = [
        run_loop(TrainState(), PACE, with_guard.actions(), with_guard, NumberGuard(judged_after=0)),
        run_loop(TrainState(), PACE, without.actions(), without),
    ]
    assert ends[0] == ends[1] and with_guard.entries == without.entries


def test_a_step_whose_samples_are_skipped_takes_the_batch_after_its_own() -> None:
    before = TrainState(step=24, position=168, tokens=9)
    assert past_skipped(before, {25}, 7) == TrainState(step=24, position=175, tokens=9)
    assert past_skipped(before, {24, 26}, 7) == before
