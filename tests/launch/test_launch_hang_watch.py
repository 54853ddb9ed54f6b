"""The verdict on ranks that no longer get on, from what is seen of them: the culprit, and no false alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from plait.launch.values.phase import HangTimeouts
from plait.launch.values.progress import ProcessState, RankProgress
from plait.launch.watching.board import innermost_place
from plait.launch.watching.hang_watch import LOOK_EVERY_S, Hang, HangWatch

Scene = Callable[[int, float], RankProgress]
"""What is seen of a rank at a moment."""


def seen(rank: int, changes: int, **more: object) -> RankProgress:
    values = {"step": 3, "collective": 9, "phase": "the sum of gradients", "state": "waiting"}
    values |= {"cpu_s": 0.0, "longest_s": 0.5}
    return RankProgress(rank=rank, changes=changes, **{**values, **more})  # type: ignore[arg-type]


def watched(
    watch: HangWatch, scene: Scene, ranks: int, seconds: float, begin_s: float = 0.0
) -> tuple[float, Hang] | None:
    """The first verdict and when it came; None where none comes in so many seconds."""
    now_s = begin_s
    while now_s < begin_s + seconds:
        if hang := watch.look(now_s, [scene(rank, now_s) for rank in range(ranks)]):
            return now_s - begin_s, hang
        now_s += LOOK_EVERY_S
    return None


def lively(step_s: float) -> Scene:
    """Ranks whose steps take so long, and which publish each phase of them."""

    def look(rank: int, now_s: float) -> RankProgress:
        changes = 1 + int(now_s / step_s * 4)
        phase = ("the fetch of data", "forward and backward", "the sum of gradients", "saving")[changes % 4]
        known_s = step_s / 4 if changes > 4 else None
        return seen(rank, changes, step=1 + changes // 4, collective=changes // 2, phase=phase, longest_s=known_s)

    return look


@pytest.mark.parametrize("step_s", [0.05, 1.0, 30.0, 400.0])
def test_a_healthy_run_is_left_alone(step_s: float) -> None:
    assert watched(HangWatch(), lively(step_s), 4, max(200.0, 12 * step_s)) is None


def test_steps_that_vary_by_three_are_left_alone() -> None:
    dice = random.Random(5)
    moments = [0.0]
    for _ in range(5_000):
        moments.append(moments[-1] + dice.uniform(0.4, 1.2))

    def look(rank: int, now_s: float) -> RankProgress:
        step = sum(moment <= now_s for moment in moments[:40]) if now_s < 20 else 0
        while step + 1 < len(moments) and moments[step + 1] <= now_s:
            step += 1
        return seen(rank, step + 1, step=step + 1)

    assert watched(HangWatch(), look, 2, 900.0) is None


def test_a_stopped_rank_is_named_within_seconds_although_the_others_are_no_further() -> None:
    watch, alive = HangWatch(), lively(1.0)
    assert watched(watch, alive, 3, 20.0) is None

    def look(rank: int, now_s: float) -> RankProgress:
        last = alive(rank, 20.0)
        return replace(last, state="stopped" if rank == 1 else "waiting")

    verdict = watched(watch, look, 3, 60.0, begin_s=20.0)
    assert verdict is not None and verdict[1].culprit.rank == 1
    assert verdict[0] <= HangTimeouts().stopped_s + 1


@pytest.mark.parametrize("culprit", [0, 1, 2, 3])
@pytest.mark.parametrize("state", ["waiting", "working"])
def test_who_did_not_enter_is_named_with_where_the_others_wait(culprit: int, state: ProcessState) -> None:
    watch, alive = HangWatch(), lively(1.0)
    assert watched(watch, alive, 4, 20.0) is None

    def look(rank: int, now_s: float) -> RankProgress:
        if rank == culprit:
            used_s = now_s if state == "working" else 0.0
            place = {"phase": "forward and backward", "step": 21, "collective": 40}
            return seen(rank, 1_000, state=state, cpu_s=used_s, **place)
        return seen(rank, 1_000, phase="the sum of gradients", step=21, collective=41)

    verdict = watched(watch, look, 4, 200.0, begin_s=20.0)
    assert verdict is not None
    found_after_s, hang = verdict
    assert hang.culprit.rank == culprit and hang.others_in == "the sum of gradients of step 21"
    assert found_after_s <= (HangTimeouts().computing_s if state == "working" else HangTimeouts().least_s) + 2


def test_a_rank_that_gets_no_processor_is_hungry_not_stuck() -> None:
    watch, alive = HangWatch(), lively(1.0)
    assert watched(watch, alive, 2, 20.0) is None

    def look(rank: int, now_s: float) -> RankProgress:
        return seen(rank, 1_000, step=21, state="working" if rank == 0 else "waiting", cpu_s=3.0)

    assert watched(watch, look, 2, 600.0, begin_s=20.0) is None


def test_a_watch_that_slept_counts_nothing_of_it() -> None:
    watch, alive = HangWatch(), lively(1.0)
    assert watched(watch, alive, 2, 20.0) is None
    asleep = [replace(alive(rank, 20.0), state="waiting") for rank in range(2)]
    assert [watch.look(20.0 + hours * 3600, asleep) for hours in range(5)] == [None] * 5


@pytest.mark.parametrize("state", ["waiting", "working"])
def test_a_job_that_tells_no_step_is_left_alone(state: ProcessState) -> None:
    def look(rank: int, now_s: float) -> RankProgress:
        return seen(rank, 1, step=0, state=state, cpu_s=now_s)

    assert watched(HangWatch(), look, 2, 5_000.0) is None


def test_a_first_step_may_compute_for_long_and_wait_for_ten_minutes() -> None:
    def computing(rank: int, now_s: float) -> RankProgress:
        return seen(rank, 1, step=1, state="working", cpu_s=now_s, longest_s=None)

    def waiting(rank: int, now_s: float) -> RankProgress:
        return seen(rank, 1, step=1, longest_s=None)

    assert watched(HangWatch(), computing, 2, 5_000.0) is None
    assert watched(HangWatch(), waiting, 2, 590.0) is None
    assert watched(HangWatch(), waiting, 2, 700.0) is not None


@pytest.mark.parametrize("counter", ["network_bytes", "file_bytes"])
def test_a_wait_in_which_bytes_move_is_slow_and_one_in_which_they_stop_is_a_hang(counter: str) -> None:
    """Saving takes half a second, then an hour over a cable of 20 kB/s; after that hour nothing moves any more."""

    def saving(rank: int, now_s: float) -> RankProgress:
        carried = {counter: 20_000 * int(min(now_s, 3_600.0))}
        return seen(rank, 1, step=9, phase="saving", longest_s=0.5, **carried)

    found = watched(HangWatch(), saving, 2, 5_000.0)
    assert found is not None
    when_s, hang = found
    assert 3_600 < when_s < 3_700 and hang.culprit.phase == "saving"


def test_what_idle_connections_carry_is_no_progress() -> None:
    """Heartbeats of a hundred bytes a second do not hide a hang."""

    def beating(rank: int, now_s: float) -> RankProgress:
        return seen(rank, 1, step=9, longest_s=0.5, network_bytes=100 * int(now_s))

    with_heartbeats, without = watched(HangWatch(), beating, 2, 600.0), watched(HangWatch(), still, 2, 600.0)
    assert with_heartbeats is not None and without is not None
    assert without[0] <= with_heartbeats[0] <= 1.1 * without[0] + 1


def still(rank: int, now_s: float) -> RankProgress:
    return seen(rank, 1, step=9, longest_s=0.5)


def test_a_cable_that_becomes_slow_is_reported_with_both_rates() -> None:
    """100 MB/s for a minute of steps, then 30 kB/s in one sum of gradients."""
    watch = HangWatch()

    def look(rank: int, now_s: float) -> RankProgress:
        carried = int(1e8 * min(now_s, 60.0) + 3e4 * max(0.0, now_s - 60.0))
        return seen(rank, 1 + int(min(now_s, 60.0)), step=1 + int(min(now_s, 60.0)), network_bytes=carried)

    assert watched(watch, look, 2, 60.0) is None and not watch.slow_waits()
    assert watched(watch, look, 2, 120.0, begin_s=60.0) is None
    slow = watch.slow_waits()
    assert {one.rank.rank for one in slow} == {0, 1}
    assert slow[0].rate == pytest.approx(3e4, rel=0.05) and slow[0].rate_before == pytest.approx(1e8, rel=0.05)


def test_long_steps_give_a_stop_its_time() -> None:
    watch = HangWatch()
    assert watched(watch, lively(200.0), 2, 1_000.0) is None
    assert 200 <= watch.longest_phase_s(1_000.0) <= 400


STACK = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f0 (most recent call first):
  File "/venv/torch/autograd/graph.py", line 9 in _engine
  File "/home/me/plait/plait/trainer/step.py", line 88 in run_micros_in_turn
  File "/home/me/plait/plait/trainer/worker.py", line 90 in main
"""

# A process that was stopped: the signal is taken by the thread that goes on first.
BY_ANOTHER_THREAD = STACK.replace("Current thread", "Main").replace("Thread 0x", "Current thread 0x", 1)
BY_ANOTHER_THREAD = BY_ANOTHER_THREAD.replace("Main 0x", "Thread 0x")


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (STACK, "plait/trainer/step.py:88 in run_micros_in_turn"),
        (BY_ANOTHER_THREAD, "plait/trainer/step.py:88 in run_micros_in_turn"),
        ('Current thread 0x1 (most recent call first):\n  File "/x/y.py", line 3 in f', "/x/y.py:3 in f"),
        ("", "None"),
        ("garbage", "None"),
    ],
)
def test_the_innermost_line_of_ours_is_named(stack: str, place: str) -> None:
    assert str(innermost_place(stack)) == place


def test_verdicts_do_not_depend_on_the_order_of_ranks() -> None:
    def first(ranks: Sequence[int]) -> int:
        watch = HangWatch()
        for now in range(400):
            views = [seen(rank, 5 + (now < 9) * now, collective=9 - (rank == 2)) for rank in ranks]
            if hang := watch.look(now * LOOK_EVERY_S, views):
                return hang.culprit.rank
        return -1

    assert first([0, 1, 2, 3]) == first([3, 2, 1, 0]) == 2
