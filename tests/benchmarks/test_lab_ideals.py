"""Is the best split of a pipeline over unequal hosts really the best, and which steps are held against it?"""

from __future__ import annotations

import pytest

from benchmarks.lab.cut import WARM_UP
from benchmarks.lab.ideals import best_order, best_split
from benchmarks.lab.unequal import SETTLED, warmed_up
from plait.report.shares_file import SharesLine, append_shares


def test_equal_hosts_split_evenly_and_lose_the_bubble():
    tokens_per_s, split = best_split([100.0, 100.0], layers=8, head_layers=0.0, micros=4, batch_tokens=400)
    assert split == (4, 4)
    assert tokens_per_s == pytest.approx(200 * 4 / 5), "four micro-batches through two stages take five turns"


def test_a_slow_host_gets_fewer_layers_and_the_head_counts():
    _, split = best_split([100.0, 40.0], layers=14, head_layers=0.0, micros=64, batch_tokens=1000)
    assert split == (10, 4)
    _, with_head = best_split([100.0, 40.0], layers=12, head_layers=2.0, micros=64, batch_tokens=1000)
    assert with_head == (10, 2), "the head is as much as two of the slow host's four"


def test_with_many_micro_batches_the_best_split_nears_the_sum_of_the_speeds():
    tokens_per_s, _ = best_split([100.0, 50.0], layers=9, head_layers=0.0, micros=10_000, batch_tokens=10_000)
    assert tokens_per_s == pytest.approx(150.0, rel=1e-3)


def test_the_best_order_is_found_behind_the_first_host():
    """With the slowest host last it would have the head, which is more than it should do."""
    asked = {"layers": 10, "head_layers": 4.0, "micros": 64, "batch_tokens": 640}
    speeds = [100.0, 100.0, 25.0]
    tokens_per_s, split, order = best_order(speeds, **asked)
    assert order == (0, 2, 1) and len(split) == 3 and sum(split) == 10
    assert tokens_per_s == best_split([100.0, 25.0, 100.0], **asked)[0] > best_split(speeds, **asked)[0]


def test_all_steps_count_since_shares_changed_last_before_they_should_have_settled(tmp_path):
    changes = tmp_path / "shares.jsonl"
    assert warmed_up(changes) == WARM_UP, "nothing changed"
    for step, counted_after in ((8, 8), (15, 15), (SETTLED, SETTLED), (SETTLED + 7, SETTLED)):
        append_shares(changes, SharesLine(step=step, shares=(3, 1), reason="", speeds=(3.0, 1.0)))
        assert warmed_up(changes) == counted_after
