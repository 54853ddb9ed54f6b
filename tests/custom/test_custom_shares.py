"""Shares of batches by measured speed: decided after a few steps, followed while the run goes on, kept by a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.custom.data.batches import BatchPlace, BatchRequest, own_batches
from plait.custom.data.measured_shares import LAST_MEASURED, WATCH_EVERY, ShareMeter
from plait.custom.data.shares import AHEAD, ShareTable
from plait.custom.group import Workers
from plait.custom.likeness import worker_names

BATCH, STEPS_OF_A_DECISION = 70, WATCH_EVERY


class TimedWorkers:
    """Sums over two workers, of which the other one's times are told here: its seconds an example, and ours."""

    index, size = 0, 2

    def __init__(self, own_s: float, other_s: float) -> None:
        self.own_s, self.other_s = own_s, other_s
        self.seconds: list[float] = []
        """Of the other worker's steps that were timed."""

    def __call__(self, values: Tensor) -> Tensor:
        raise AssertionError("shares need no sum")

    def largest(self, values: Tensor) -> Tensor:
        raise AssertionError("shares need no maximum")

    def gather(self, values: Tensor) -> list[Tensor]:
        other = values.clone()
        other[:, 0] = torch.tensor(self.seconds[-len(values) :])
        return [values, other]


class Watched:
    """One worker's meter over batches of its own, and what it said."""

    def __init__(self, times: TimedWorkers, shares: Any = "measured", alike: Any = "unlike") -> None:
        self.times = times
        workers = Workers(rank=0, size=2, local_rank=0, device=torch.device("cpu"), sums=times)
        self.meter = ShareMeter(workers, alike, ("new", "old"))
        self.meter.choose(shares)
        request = BatchRequest(
            batch=BATCH,
            epochs=10_000,
            order="given",
            last="drop",
            collate=None,
            collated_over="share",
            cut=None,
            seed=0,
            number=0,
        )
        self.place = BatchPlace(shares=[(0, self.meter.shares)])
        table = ShareTable(2, self.place.shares)
        self.own = own_batches(torch.arange(BATCH), request, table, 0, self.place)

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.place.given += 1
            first, end = self.own.shares.own_range(self.place.given - 1, BATCH, 0)
            own_s, other_s = self.times.own_s * (end - first), self.times.other_s * (BATCH - end + first)
            if self.meter.clock() == "timed":
                self.times.seconds.append(other_s)
                self.meter.note(own_s, max(own_s, other_s), [self.own])

    @property
    def part(self) -> int:
        """Of the next batch, this worker's."""
        first, end = self.own.shares.own_range(self.place.given, BATCH, 0)
        return end - first


def test_shares_follow_the_first_steps_and_later_changes(capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(TimedWorkers(0.001, 0.0025))
    watched.take(LAST_MEASURED)
    assert watched.part == BATCH // 2  # batches that are read ahead keep their shares
    watched.take(AHEAD)
    assert watched.part == 50 and watched.meter.shares == (50.0, 20.0)
    watched.times.other_s = 0.001  # the other one has recovered
    watched.take(STEPS_OF_A_DECISION + AHEAD)
    assert watched.part == 35
    told = capsys.readouterr().out
    assert "new 71.4%, old 28.6% (2.5 times slower)" in told and "new 50.0%, old 50.0%" in told


def test_an_odd_step_changes_nothing_and_equal_workers_keep_their_shares(capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(TimedWorkers(0.001, 0.00102))
    watched.take(LAST_MEASURED)
    for _ in range(4):
        watched.take(STEPS_OF_A_DECISION - 1)
        watched.times.other_s = 0.02
        watched.take(1)
        watched.times.other_s = 0.00102
    assert watched.part == 35 and len(watched.place.shares) == 1
    assert capsys.readouterr().out.count("shares of each batch") == 2  # what will be measured, and that they stay


@pytest.mark.parametrize(("shares", "alike"), [("equal", "unlike"), ("auto", "alike"), ([2, 1], "unlike")])
def test_nothing_is_measured_that_nobody_asked_for(shares: Any, alike: Any) -> None:
    watched = Watched(TimedWorkers(0.001, 0.01), shares, alike)
    watched.take(3 * WATCH_EVERY)
    assert len(watched.place.shares) == 1
    assert watched.part == {"equal": 35, "auto": 35}.get(str(shares), 47)


def test_a_second_loop_goes_on_with_what_was_measured() -> None:
    watched = Watched(TimedWorkers(0.001, 0.0025))
    watched.take(LAST_MEASURED + AHEAD)
    watched.meter.choose("measured")
    assert watched.meter.shares == (50.0, 20.0) and watched.meter.decided == "decided"
    watched.meter.choose("equal")
    watched.meter.choose("measured")
    assert watched.meter.shares == (1.0, 1.0) and watched.meter.decided == "undecided"


def test_a_resume_keeps_shares_that_do_not_hold_yet() -> None:
    watched = Watched(TimedWorkers(0.001, 0.0025))
    watched.take(LAST_MEASURED)
    watched.place.used = watched.place.given
    saved = json.loads(json.dumps(watched.place.plain()))
    place = BatchPlace.from_plain(saved, "same workers")
    assert place == replace(watched.place)
    again = ShareTable(2, place.shares)
    for batch in range(place.used, place.used + 2 * AHEAD):
        assert again.own_range(batch, BATCH, 0) == watched.own.shares.own_range(batch, BATCH, 0)
    assert BatchPlace.from_plain(saved, "other workers").shares == []
    assert BatchPlace.from_plain([3, False], "same workers") == BatchPlace(given=3, used=3)


def test_workers_are_called_by_their_hosts_where_that_tells_them_apart() -> None:
    assert worker_names([("big", 0), ("old", 1)]) == ("big", "old")
    assert worker_names([("big", 0), ("big", 0), ("old", 2)]) == ("worker 0 on big", "worker 1 on big", "old")
    assert worker_names([("lab", 0), ("lab", 1)]) == ("worker 0", "worker 1")
    assert worker_names([("\x1b[2Ja", 0), ("b", 1)]) == ("[2Ja", "b")
