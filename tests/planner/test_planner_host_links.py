"""Unlike roads between hosts: what a group pays hangs on which of them it uses, and the hosts stand accordingly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from plait.layout import Layout
from plait.machines.cluster import Cluster
from plait.model.sizes import explicit_shape
from plait.planner.explain.unequal_devices import unequal_reasons
from plait.planner.heterogeneous.host_permutations import other_orders
from plait.planner.problem.workload import workload_of
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.host_choice import with_best_host_order
from plait.planner.search.search import search
from plait.planner.step_time.host_links import host_links_of
from tests.planner.hosts import probed
from tests.probing.probed import link, point

SLOW, FAST = 2e7, 1e9
SHAPE = explicit_shape(layers=8, width=256, heads=4, vocabulary=2048, sequence=256)
WORK = workload_of(SHAPE, sequence=256, batch_sequences=16, precision="float32")
TENSOR = Constraints(degrees=Layout(tensor=2, replicate=2))
MIXED = Constraints(degrees=Layout(pipeline=2, replicate=2))


def rooms(room_of: str, *, fast: float = FAST, order: Sequence[int] | None = None) -> Cluster:
    """Equal hosts a, b, c …, of which those with the same letter in `room_of` are joined by fast roads."""
    found = probed(*(1.0 for _ in room_of), rate=SLOW)
    assert found.measured is not None
    sends = []
    for first, second in combinations(range(len(room_of)), 2):
        rate = fast if room_of[first] == room_of[second] else SLOW
        road = link("send", *(point(2**k, 1e-4 + 2**k / rate) for k in (10, 20, 26)), scope="between")
        sends.append(replace(road, hosts=("abcdefgh"[first], "abcdefgh"[second])))
    others = tuple(one for one in found.measured.links if one.kind != "send")
    devices = tuple(found.measured.devices[host] for host in order or range(len(room_of)))
    return replace(found, measured=replace(found.measured, links=(*others, *sends), devices=devices))


def step_s(found: Search) -> float:
    return float(found.step_s[found.chosen])


def test_a_group_waits_for_the_slowest_road_that_it_uses() -> None:
    """Hosts a and c are in one room, b and d in the other."""
    measured = rooms("xyxy").measured
    assert measured is not None
    roads = host_links_of(measured)
    assert roads is not None and roads.greedy_host_order() == (0, 2, 1, 3)
    size, stride = np.array([2.0, 2.0, 4.0, 1.0]), np.array([2.0, 1.0, 1.0, 1.0])
    found = roads.relative_time(np.full(4, 2.0**20), size, stride, "each with each")
    assert found == pytest.approx([(1e-4 + 2**20 / FAST) / (1e-4 + 2**20 / SLOW), 1.0, 1.0, 1.0])
    assert roads.relative_time(
        np.array([2.0**20]), np.array([3.0]), np.array([1.0]), "each with each"
    ) == pytest.approx([1.0])


def test_a_chain_uses_the_roads_between_neighbours_only() -> None:
    """All but a and d are well joined: those are the ends of a pipeline, which send each other nothing."""
    measured = rooms("xxxx").measured
    assert measured is not None
    narrow = [replace(one, points=(point(2**26, 2**26 / SLOW),)) for one in measured.links if one.hosts == ("a", "d")]
    wide = [one for one in measured.links if one.hosts != ("a", "d")]
    roads = host_links_of(replace(measured, links=(*wide, *narrow)))
    assert roads is not None
    message, size, stride = np.array([2.0**26]), np.array([4.0]), np.array([1.0])
    assert roads.relative_time(message, size, stride, "each with each") == pytest.approx([1.0])
    assert roads.relative_time(message, size, stride, "each to the next")[0] < 0.03


@pytest.mark.parametrize("cluster", [rooms("xx"), rooms("xyxy", fast=1.3 * SLOW), probed(1.0, 1.0, 1.0)])
def test_like_roads_and_unknown_ones_say_nothing(cluster: Cluster) -> None:
    assert cluster.measured is not None and host_links_of(cluster.measured) is None


def test_those_who_cut_matrices_together_stand_in_one_room() -> None:
    here = search(WORK, rooms("xyxy"), constraints=TENSOR)
    found = with_best_host_order(here)
    assert found.host_order is not None and found.host_order.hosts == (0, 2, 1, 3)
    assert step_s(found) < 0.5 * step_s(here)
    assert step_s(found) == pytest.approx(step_s(search(WORK, rooms("xyxy", order=(0, 2, 1, 3)), constraints=TENSOR)))
    [line] = unequal_reasons(found)
    assert line.startswith("the machines are in the order a, c, b, d") and "some links between them are" in line
    assert with_best_host_order(search(WORK, rooms("xxyy"), constraints=TENSOR)).host_order is None, (
        "they stand so already"
    )


def test_the_order_is_the_best_of_all() -> None:
    """Held against every order, each searched for itself: here sums of gradients want the fast roads."""
    found = with_best_host_order(search(WORK, rooms("xyyx"), constraints=MIXED))
    tried = {
        order: step_s(search(WORK, rooms("xyyx", order=(0, *order)), constraints=MIXED))
        for order in permutations((1, 2, 3))
    }
    assert step_s(found) == pytest.approx(min(tried.values()))
    assert max(tried.values()) > 1.1 * min(tried.values())


def test_many_machines_are_also_tried_each_beside_the_one_it_reaches_best() -> None:
    places = [order for order, _ in other_orders(rooms("xyxyxy"), first_stays=True)]
    assert (0, 2, 4, 1, 3, 5) in places
    found = with_best_host_order(
        search(WORK, rooms("xyxyxy"), constraints=Constraints(degrees=Layout(tensor=1, shard=3, pipeline=2)))
    )
    assert found.host_order is not None
