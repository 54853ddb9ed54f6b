"""Timed messages tell of links alone."""

from __future__ import annotations

from plait.launch.values.job import Job
from tests.shared_ranks import RanksOf

LATE_S = 0.6


def timed(ranks: int) -> dict[int, dict[str, float]]:
    told: dict[int, dict[str, float]] = {}
    job = Job(entry="time_messages", argument=str(LATE_S), world_size=ranks, threads=1)
    ranks = RanksOf("tests.parallel.echo_entries")
    ranks.run(job, on_message=lambda message: told.update({message.rank: dict(message.values)}))
    return told


def test_a_rank_that_is_late_makes_no_link_slow():
    told = timed(3)
    assert told[0]["whole_s"] > LATE_S / 2, "rank 1 was not late"
    assert all(0 < one["took_s"] < LATE_S / 2 for one in told.values()), told


def test_one_rank_has_no_links():
    assert timed(1)[0]["took_s"] == 0.0
