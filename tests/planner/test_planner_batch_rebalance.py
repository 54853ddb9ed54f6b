"""When shares of the batch change: for what lasts, soon; for noise, spikes and equal machines, never."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from plait.layout import Layout
from plait.planner.heterogeneous.batch_shares import ShardGroups, shares_by_speed
from plait.planner.plan import HostShare
from plait.planner.rebalancing.batch_rebalance import (
    StepObservation,
    change_reason,
    ranks_of_replicas,
    rebalance,
    replica_names,
    why_rebalancing_cannot_help,
)
from tests.commands.other_values import base_recipe
from tests.planner.machines import LAPTOP, corpus, planned
from tests.plans import changed

SUMS_S = 4.0
"""Of each step, beside computing, where a sequence takes a second on a machine of speed 1."""


def steps_of(
    shares: Sequence[int], speeds: Sequence[float], count: int, draw: random.Random, sigma: float
) -> list[StepObservation]:
    """Steps as real ones are: lognormal noise, and one rank in a hundred that takes two or three times as long."""
    found = []
    for _ in range(count):
        compute = [
            share / speed * draw.lognormvariate(0, sigma) * (draw.uniform(2, 3) if draw.random() < 0.01 else 1)
            for share, speed in zip(shares, speeds, strict=True)
        ]
        found.append(StepObservation(compute_s=tuple(compute), step_s=max(compute) + SUMS_S))
    return found


def names(parts: int) -> list[str]:
    return [f"host {chr(ord('a') + part)}" for part in range(parts)]


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("every", [10, 50])
def test_equal_machines_keep_their_shares_for_a_thousand_steps(parts: int, every: int) -> None:
    shares = (64 // parts,) * parts
    for seed in range(8):
        draw = random.Random(seed)
        steps: list[StepObservation] = []
        for _ in range(1000 // every):
            steps = [*steps, *steps_of(shares, [1.0] * parts, every, draw, 0.08)][-2 * every :]
            assert rebalance(shares, steps, names(parts)) is None, f"seed {seed}"


@pytest.mark.parametrize(
    ("speeds", "shares"), [([1, 0.4], (23, 9)), ([1, 1, 0.5, 0.25], (12, 12, 5, 3)), ([0.3, 1, 1, 1], (3, 10, 10, 9))]
)
def test_unequal_machines_get_nearly_what_is_best_for_them(speeds: list[float], shares: tuple[int, ...]) -> None:
    for seed in range(10):
        equal = (32 // len(speeds),) * len(speeds)
        change = rebalance(equal, steps_of(equal, speeds, 20, random.Random(seed), 0.05), names(len(speeds)))
        assert change is not None and sum(change.shares) == 32, f"seed {seed}"
        best, now = (max(n / s for n, s in zip(some, speeds, strict=True)) for some in (shares, change.shares))
        assert now < 1.13 * best, f"seed {seed}: {change}"


def test_what_lasts_for_one_window_only_changes_nothing_and_what_ends_gives_back() -> None:
    draw = random.Random(1)
    well, slow = (steps_of((16, 16), [1, speed], 10, draw, 0.03) for speed in (1, 0.3))
    assert rebalance((16, 16), [*well, *slow], names(2)) is None
    assert rebalance((16, 16), [*slow, *well], names(2)) is None
    assert rebalance((16, 16), slow, names(2)) is None  # too few steps
    first = rebalance((16, 16), slow * 2, names(2))
    assert first is not None and first.shares[1] in (7, 8) and 0.3 < first.gain < 0.8
    again = rebalance(first.shares, steps_of(first.shares, [1, 1], 20, draw, 0.03), names(2))
    assert again is not None and again.shares[1] in (15, 16, 17)


@pytest.mark.parametrize(("limit", "slower", "settled"), [(1, 2.0, (8, 8)), (2, 3.0, (10, 6)), (4, 4.0, (12, 4))])
def test_parts_that_meet_are_dealt_by_what_they_compute(limit: int, slower: float, settled: tuple[int, int]) -> None:
    """With few sequences a time, the fast part's many micro-batches cost the slow one a sequence each."""
    meetings = ShardGroups(size=2, limits=(limit, limit))
    dealt = (8, 8)
    for _ in range(6):
        fast, slow = meetings.computed(dealt)
        step = StepObservation(compute_s=(float(fast), slower * slow), step_s=max(fast, slower * slow))
        change = rebalance(dealt, [step] * 20, names(2), meetings)
        dealt = change.shares if change else dealt
    best = min(max(one, slower * other) for one, other in (meetings.computed((n, 16 - n)) for n in range(1, 16)))
    one, other = meetings.computed(dealt)
    assert max(one, slower * other) == best and dealt == settled


def test_one_more_meeting_must_be_worth_its_messages() -> None:
    speeds = (40.5, 23.5)
    assert ShardGroups(size=2, limits=(41, 41)).best_shares(64, speeds) == shares_by_speed(64, speeds) == (41, 23)
    assert ShardGroups(size=2, limits=(40, 40)).best_shares(64, speeds) == (40, 24), (
        "41 would be faster by a hair, and meet twice"
    )
    assert ShardGroups(size=2, limits=(40, 40)).best_shares(64, (52.0, 12.0)) == (52, 12)


def test_what_parts_that_meet_compute() -> None:
    four = ShardGroups(size=2, limits=(2, 2, 4, 4))
    assert four.computed((12, 3, 8, 1)) == (12, 6, 8, 2), "six micro-batches, and two"
    alone = ShardGroups(size=1, limits=(2, 2, 4, 4))
    assert alone.computed((12, 3, 8, 1)) == (12, 3, 8, 1)


def test_a_gain_must_be_worth_it_and_every_part_keeps_a_sequence() -> None:
    still = [StepObservation(compute_s=(16.4, 16.0), step_s=20.4)] * 20
    assert rebalance((16, 16), still, names(2)) is None
    crawling = [StepObservation(compute_s=(2.0, 1000.0), step_s=1000.0)] * 20
    change = rebalance((2, 2), crawling, names(2))
    assert change is not None and change.shares == (3, 1)
    assert rebalance((3, 1), [StepObservation(compute_s=(3.0, 500.0), step_s=500.0)] * 20, names(2)) is None
    assert rebalance((4,), [StepObservation(compute_s=(4.0,), step_s=4.0)] * 20, names(1)) is None


def test_the_reason_says_who_and_why() -> None:
    assert change_reason((8, 8), (11, 5), (2.4, 1.0), names(2)) == (
        "host b is 2.4 times slower than host a: its share goes from 8 to 5 of 16 sequences"
    )
    assert change_reason((11, 5), (8, 8), (1.0, 1.0), names(2)) == (
        "host b is now as fast as host a: its share goes from 5 to 8 of 16 sequences"
    )
    assert change_reason((11, 5), (10, 6), (1.0, 0.6), names(2)) == (
        "host b is now at 60% of the speed of host a: its share goes from 5 to 6 of 16 sequences"
    )
    assert change_reason((4, 4), (2, 6), (1.0, 3.0), ("ranks 0 and 2", "ranks 1 and 3")) == (
        "ranks 0 and 2 are 3.0 times slower than ranks 1 and 3: their share goes from 4 to 2 of 8 sequences"
    )


def test_parts_are_called_by_their_host_or_their_ranks(tmp_path) -> None:
    plan = planned(base_recipe(tmp_path), corpus(1_500_000, 1), LAPTOP)
    one_each = (HostShare(name="old", workers=1, threads=1), HostShare(name="new", workers=1, threads=1))
    both = replace(
        plan,
        placement=replace(plan.placement, layout=Layout(replicate=2)),
        machines=replace(plan.machines, hosts=one_each),
    )
    assert replica_names(both) == ("host old", "host new")
    assert replica_names(changed(both, hosts=())) == ("rank 0", "rank 1")
    pipes = replace(
        plan, placement=replace(plan.placement, layout=Layout(replicate=2, pipeline=2, stage_layers=(1, 1)))
    )
    assert ranks_of_replicas(pipes.placement.layout) == ((0, 2), (1, 3))
    assert replica_names(changed(pipes, hosts=())) == ("ranks 0 and 2", "ranks 1 and 3")
    two_each = tuple(replace(host, workers=2) for host in one_each)
    wide = replace(
        plan,
        placement=replace(plan.placement, layout=Layout(replicate=4)),
        machines=replace(plan.machines, hosts=two_each),
    )
    assert replica_names(wide) == ("rank 0 on old", "rank 1 on old", "rank 2 on new", "rank 3 on new")
    assert why_rebalancing_cannot_help(changed(wide, balance_every_steps=50)) is None
    alone = replace(
        plan,
        placement=replace(plan.placement, layout=Layout(tensor=2)),
        cadence=replace(plan.cadence, balance_every_steps=50),
    )
    assert "a layout with replicate or shard could" in (why_rebalancing_cannot_help(alone) or "")
    assert why_rebalancing_cannot_help(changed(alone, balance_every_steps=0)) is None
