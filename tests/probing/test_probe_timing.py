"""Rounds: medians forgive bursts, unsteady figures get more rounds, time ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.machines.machine import core_share
from plait.probing.timing import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    EventClock,
    ProcessorClock,
    SilentDevice,
    SingleRank,
    TimingSetup,
    summarize_readings,
    time_in_rounds,
)


class ToldClock:
    """A clock that has been told what every run takes."""

    def __init__(self, seconds: dict[str, Iterator[float]]) -> None:
        self._seconds = seconds

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        return next(self._seconds[str(run())]), 0.25


def forever(*seconds: float) -> Iterator[float]:
    """A warm-up that is long enough to be the only one, then these over and over."""
    yield 1.0
    while True:
        yield from seconds


def rounds(seconds: dict[str, Iterator[float]], limit_s: float = 60):
    runs = {name: lambda name=name: name for name in seconds}
    bench = TimingSetup(device=None, clock=ToldClock(seconds), lockstep=SingleRank())
    return time_in_rounds(runs, bench, seconds=limit_s)


class DescribedQueue:
    """A device that works for some time on what is submitted, and whose host hears of its end only much later."""

    def __init__(self, looks: int) -> None:
        self.now_s, self.looks = 0.0, looks

    def work(self, seconds: float) -> None:
        self.now_s += seconds

    def event(self) -> DescribedEvent:
        return DescribedEvent(self)


class DescribedEvent:
    """A mark in the queue of a described device."""

    def __init__(self, queue: DescribedQueue) -> None:
        self._queue, self.at_s = queue, -1.0

    def record(self) -> None:
        self.at_s = self._queue.now_s

    def query(self) -> bool:
        self._queue.looks -= 1
        return self._queue.looks < 0

    def elapsed_time(self, end_event: DescribedEvent) -> float:
        return 1e3 * (end_event.at_s - self.at_s)


def test_a_device_s_own_marks_time_what_is_shorter_than_a_look_at_it() -> None:
    queue = DescribedQueue(looks=40)  # the host looks for 2 ms and more
    wall_s, cpu_s = EventClock(make_event=queue.event, timeout_s=60).time(lambda: queue.work(7e-6), 5)
    assert wall_s == pytest.approx(7e-6) and 0 <= cpu_s < 2e-3


def test_a_device_that_never_ends_is_told() -> None:
    queue = DescribedQueue(looks=10**9)
    with pytest.raises(SilentDevice, match=r"did not finish its work within 0\.01 s; see what nvidia-smi says"):
        EventClock(make_event=queue.event, timeout_s=0.01).time(lambda: queue.work(1), 1)


def test_a_burst_in_one_round_does_not_move_the_median() -> None:
    found = rounds({"a": forever(1.0, 1.0, 30.0, 1.0), "b": forever(2.0)})
    assert found["a"].seconds == 1.0 and found["b"].seconds == 2.0
    assert found["a"].rounds == (1.0, 1.0, 30.0, 1.0)
    assert found["b"].spread == 0 and found["b"].cpu_s == 0.25


@pytest.mark.parametrize(("limit_s", "last"), [(1e9, 0.3), (-1.0, 0.825), (1e-9, 0.825)])
def test_how_far_it_is_only_grows_and_counts_the_rounds_that_come_in_any_case(limit_s: float, last: float) -> None:
    told, seconds = list[float](), {"a": forever(1.0, 2.0), "b": forever(2.0)}
    runs = {name: lambda name=name: name for name in seconds}
    bench = TimingSetup(device=None, clock=ToldClock(seconds), lockstep=SingleRank(), tell=told.append)
    time_in_rounds(runs, bench, seconds=limit_s)
    assert told == sorted(told) and told[:3] == [0.0, 0.15, 0.3]
    assert told[-1] == pytest.approx(last)


def test_steady_figures_end_after_the_least_rounds() -> None:
    assert len(rounds({"a": forever(1.0, 1.01)})["a"].rounds) == LEAST_ROUNDS


def test_unsteady_figures_get_more_rounds_and_late_ones_end() -> None:
    assert len(rounds({"a": forever(1.0, 2.0)})["a"].rounds) == MOST_ROUNDS
    assert len(rounds({"a": forever(1.0, 2.0)}, limit_s=-1)["a"].rounds) == 2


def test_the_spread_is_that_of_the_quartiles() -> None:
    assert summarize_readings([(s, 0.0) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]).spread == pytest.approx(2 / 3)
    assert summarize_readings([(1.0, 0.5)]).spread == 0


def test_a_process_that_is_limited_takes_longer_by_the_wall() -> None:
    def work() -> int:
        return sum(range(20_000))

    wall_s, cpu_s = ProcessorClock(share=0.25).time(work, 3)
    assert wall_s == pytest.approx(4 * cpu_s) and cpu_s > 0


@pytest.mark.parametrize(
    ("group", "files", "share"),
    [
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 0.75),
        ("0::/a/b", {"a/cpu.max": "max 100000"}, 1.0),
        ("0::/a", {"cpu.max": "45000 100000", "a/cpu.max": "90000 100000"}, 0.225),
        (
            "3:memory:/z\n2:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "4500", "cpu/a/cpu.cfs_period_us": "10000"},
            0.225,
        ),
        ("2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "10000"}, 1.0),
        ("2:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "1", "cpu/a/cpu.cfs_period_us": "10000"}, 1.0),
        ("0::/", {}, 1.0),
    ],
)
def test_the_narrowest_group_around_a_process_limits_it(
    tmp_path: Path, group: str, files: dict[str, str], share: float
) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    (tmp_path / "own").write_text(group + "\n")
    assert core_share(2, own=tmp_path / "own", root=tmp_path / "groups") == pytest.approx(share)


def test_of_two_readings_the_shorter_counts() -> None:
    assert summarize_readings([(0.5, 0.2), (0.3, 0.1)]).seconds == 0.3
    assert summarize_readings([(0.5, 0.2), (0.3, 0.1), (0.4, 0.3)]).seconds == 0.4
