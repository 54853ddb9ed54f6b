"""Hosts told apart, ranks summed up, and the slow and the dead named."""

from __future__ import annotations

import pytest

from plait.probing.answer import (
    PairTiming,
    ProbedHost,
    dead_device_sentence,
    dead_link_sentence,
    find_slow_parts,
    group_ranks_by_host,
    measured_device,
    median_times,
    pair_links,
    relative_speeds,
    slowdown_side_by_side,
)
from plait.probing.links import schedule_pairs
from tests.probing.probed import point, timed

HOSTS = (
    ProbedHost(name="ada", ranks=(0, 1)),
    ProbedHost(name="bob", ranks=(2, 3, 4)),
    ProbedHost(name="cyd", ranks=(5,)),
)


def pair(first: int, second: int, short_s: float = 1e-4, bulk_s: float = 1e-2) -> PairTiming:
    return PairTiming(first=first, second=second, points=(point(1024, short_s), point(2**24, bulk_s)))


def test_a_host_begins_where_local_ranks_begin_again() -> None:
    told = [("ada", 0), ("ada", 1), ("ada", 0), ("bob", 0)]
    assert group_ranks_by_host(told) == (
        ProbedHost(name="ada", ranks=(0, 1)),
        ProbedHost(name="ada (2)", ranks=(2,)),
        ProbedHost(name="bob", ranks=(3,)),
    )


def test_every_two_hosts_and_all_neighbours_are_paired_and_nobody_twice_in_a_round() -> None:
    pairs = schedule_pairs([host.ranks for host in HOSTS])
    assert {(p.first, p.second) for p in pairs} == {(0, 1), (2, 3), (3, 4), (0, 2), (0, 5), (2, 5)}
    assert [p.round for p in pairs] == sorted(p.round for p in pairs)
    for number in {p.round for p in pairs}:
        busy = [rank for p in pairs if p.round == number for rank in (p.first, p.second)]
        assert len(busy) == len(set(busy))
    assert schedule_pairs([(0,)]) == ()


def test_medians_over_ranks_and_factors_side_by_side() -> None:
    three = [[timed("copy", (8,), seconds)] for seconds in (1.0, 9.0, 2.0)]
    assert median_times(three) == (timed("copy", (8,), 2.0),)
    alone = [timed("copy", (8,), 0.5), timed("launch", (), 1.0)]
    assert slowdown_side_by_side(three[0], alone) == {"copy": 2.0}


def test_a_layers_rest_takes_the_factor_of_the_whole_layer() -> None:
    together = [timed("product", (2, 2, 2), 6.0), timed("product", (4, 2, 2), 4.0), timed("stream", (2, 2, 2), 2.0)]
    alone = [timed("product", (2, 2, 2), 5.0), timed("product", (4, 2, 2), 3.0), timed("stream", (2, 2, 2), 0.5)]
    assert slowdown_side_by_side(together, alone) == pytest.approx({"product": 10 / 8, "stream": 12 / 8.5})


def test_a_device_of_a_host_knows_how_its_workers_compare() -> None:
    told = {rank: [timed("product", (2, 2, 2), 1e-3 * (1 + rank))] for rank in range(6)}
    bob = measured_device(HOSTS[1], "x", told, (), granted=0.5, threads=3, memory_bytes=5)
    assert bob.rates == pytest.approx((1 / 3, 1 / 4, 1 / 5))
    assert bob.timed[0].seconds == pytest.approx(4e-3)
    assert (bob.workers, bob.threads, bob.granted, bob.beside) == (3, 3, 0.5, {})


def test_alike_machines_give_no_complaint() -> None:
    assert find_slow_parts(HOSTS, dict.fromkeys(range(6), 0.5), [pair(0, 1), pair(2, 3), pair(0, 2), pair(0, 5)]) == ()


def test_a_device_ten_times_slower_is_named() -> None:
    speeds = relative_speeds({r: [timed("product", (2, 2, 2), 1e-3 * (12 if r == 3 else 1))] for r in range(6)})
    (sentence,) = find_slow_parts(HOSTS, speeds, [pair(0, 1)])
    assert "worker 3 on bob computes 12 times slower" in sentence


def test_a_slow_link_is_named_among_its_like_only() -> None:
    between = [pair(0, 2, bulk_s=0.5), pair(0, 5, bulk_s=6.0), pair(2, 5, bulk_s=0.5, short_s=2e-3)]
    told = find_slow_parts(HOSTS, dict.fromkeys(range(6), 1.0), [pair(0, 1), pair(2, 3), *between])
    assert len(told) == 2
    assert "worker 0 on ada and worker 5 on cyd each byte takes 12 times" in told[0]
    assert "worker 2 on bob and worker 5 on cyd a short message takes 20 times" in told[1]


def test_links_are_the_slowest_pair_inside_and_every_pair_between() -> None:
    links = pair_links(HOSTS, [pair(0, 1), pair(2, 3), pair(3, 4, bulk_s=0.03), pair(0, 2), pair(2, 5)])
    assert [(link.scope, link.hosts) for link in links] == [
        ("inside", ("ada",)),
        ("inside", ("bob",)),
        ("between", ("ada", "bob")),
        ("between", ("bob", "cyd")),
    ]
    assert links[1].points[-1].seconds == 0.03


def test_the_dead_are_named() -> None:
    assert "worker 1 on ada and worker 4 on bob is dead" in dead_link_sentence(HOSTS, 1, 4)
    assert "worker 5 on cyd is dead: no kernel" in dead_device_sentence(HOSTS, 5, "no kernel")
