"""rank-times.jsonl: how each rank spent its steps, in lines that stay few."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.report.rank_times_file import RankTimesFile, RankTimesLine, parse_rank_times


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(path: Path) -> list[RankTimesLine | None]:
    return [parse_rank_times(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-times.jsonl"


def test_a_line_is_the_mean_of_the_steps_since_the_last_one(path: Path) -> None:
    clock = Clock()
    file = RankTimesFile(path, 2, clock)
    file.add(
        4,
        [[(50.0, 0, 0, 0), (2.0, 1, 0, 0), (2.0, 3, 0, 0), (2.0, 2, 0, 0)], [(60.0, 0, 0, 0), *[(1.0, 0, 0.5, 4)] * 3]],
    )
    [line] = lines_of(path)
    assert line == RankTimesLine(
        step=4, steps=3, compute_s=(2.0, 1.0), wait_s=(2.0, 0.0), inside_s=(0.0, 4.0), data_s=(0.0, 0.5)
    ), "the first step of a process counts nowhere"
    rows = [[(1.0, 0, 0, 0)] * 4] * 2
    for step, now in ((8, 1.0), (12, 4.9)):
        clock.now = now
        file.add(step, rows)
    assert len(lines_of(path)) == 1
    clock.now = 5.0
    file.add(16, [[(4.0, 0, 0, 0)] * 4] * 2)
    last = lines_of(path)[-1]
    assert last is not None and (last.step, last.steps, last.compute_s) == (16, 12, (2.0, 2.0))


def test_the_last_steps_are_a_line_too(path: Path) -> None:
    file = RankTimesFile(path, 1, Clock())
    for step in range(1, 31):
        file.add(step, [[(9.0 if step < 3 else 1.0, 0, 0, 0)]])
    assert [line and (line.step, line.compute_s) for line in lines_of(path)] == [(2, (9.0,))]
    file.close()
    last = lines_of(path)[-1]
    assert last is not None and (last.step, last.steps, last.compute_s) == (30, 28, (1.0,))
    file.close()
    RankTimesFile(path, 1, Clock()).close()
    assert len(lines_of(path)) == 2


@pytest.mark.parametrize("ranks", [1, 50, 400])
def test_the_file_grows_slowly_however_many_ranks_there_are(path: Path, ranks: int) -> None:
    clock = Clock()
    file = RankTimesFile(path, ranks, clock)
    for step in range(4, 4000, 4):
        clock.now += 1.0
        file.add(step, [[(1.2345678, 0.1234567, 1e-5 / 3, 0.0)] * 4] * ranks)
    assert path.stat().st_size / clock.now <= 400


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    file = RankTimesFile(tmp_path / "gone" / "rank-times.jsonl", 1, Clock())
    file.add(2, [[(1.0, 0, 0, 0)] * 2])


def test_nothing_measured_is_no_line(path: Path) -> None:
    file = RankTimesFile(path, 1, Clock())
    file.add(1, [[]])
    file.add(1, [[(9.0, 0, 0, 0)]])
    file.add(1, [[]])
    assert lines_of(path) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values | {"wait_s": [1.0]},
        lambda values: values | {"steps": 0},
        lambda values: values | {"step": "4"},
        lambda values: {},
        lambda values: [values],
    ],
)
def test_what_is_no_line_is_none(change: Callable[[dict[str, object]], object]) -> None:
    values: dict[str, object] = {"step": 4, "steps": 4, "compute_s": [1.0, 2.0], "wait_s": [0.0, 0.0]}
    values |= {"inside_s": [0.0, 0.0], "data_s": [0.0, 0.0]}
    assert parse_rank_times(json.dumps(values).encode()) is not None
    assert parse_rank_times(json.dumps(change(values)).encode()) is None and parse_rank_times(b"{") is None
