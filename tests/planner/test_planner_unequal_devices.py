"""Unequal machines: does everybody get what it can carry, is that priced, and is it said?"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.commands.planning.plan_report import make_plan_report, plan_report_text
from plait.data.micro_sizes import micro_sizes
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import Cluster, cluster_of_hosts, read_cluster
from plait.model.sizes import explicit_shape, named_shape
from plait.partition.pipeline_simulation import ActionTimes, durations_s
from plait.planner.derive.resources import FixedWorkers, ProbeNeed, Resources, on_paper
from plait.planner.explain.choice import idle_machine_lines
from plait.planner.explain.unequal_devices import memory_limit_lines, unequal_lines, unequal_reasons, unequal_shares_of
from plait.planner.heterogeneous.assignment import WorkAssigner
from plait.planner.heterogeneous.batch_shares import equal_shares, shares_by_speed, shares_if_worthwhile, slowest_s
from plait.planner.heterogeneous.device_speeds import device_speeds_of
from plait.planner.heterogeneous.host_permutations import crosses_hosts_needlessly, node_alone
from plait.planner.heterogeneous.micro_batch_limits import replica_memory_of
from plait.planner.heterogeneous.unequal_pipeline import unequal_stage_times
from plait.planner.heterogeneous.unequal_step_time import bottleneck
from plait.planner.memory.estimate import ALLOCATOR_RESERVE, bytes_per_rank, estimate_memory
from plait.planner.plan import Plan
from plait.planner.problem.candidates import SHARDED_STATES, Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.stage_partition import balanced_stages_by_speed
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.report.report import layout_figures
from plait.planner.resolve.resolve import draft, settle
from plait.planner.search import layout_cost
from plait.planner.search.cost_breakdown import memory_items
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import closed_form_step_time, step_seconds, step_time_of
from plait.planner.search.search import CROSSES_HOSTS, search
from plait.planner.step_time.measured_network import slowest_measured_link
from plait.units import format_duration
from tests.planner.cost_inputs import inputs
from tests.planner.hosts import HOST, probed, told
from tests.planner.machines import PLAYS, recipe

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPE = explicit_shape(layers=8, width=256, heads=4, vocabulary=2048, sequence=256)


def work(batch: int = 16, layers: int = 8) -> Workload:
    shape = replace(SHAPE, layers=layers)
    return workload_of(shape, sequence=256, batch_sequences=batch, precision="float32")


def copies(count: int, micro: int = 1, **more: int | str) -> Constraints:
    return Constraints(degrees=Layout(replicate=count), knobs={"micro_sequences": micro, **more})


def deal_of(found: Search) -> tuple[int, ...]:
    assignment = found.assignment(found.chosen)
    assert assignment is not None
    return assignment.sequences_per_replica


@settings(max_examples=80, deadline=None)
@given(extra=st.integers(0, 9), speeds=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4))
def test_no_other_shares_end_earlier(extra: int, speeds: list[float]) -> None:
    count = len(speeds) + extra
    cuts = combinations(range(1, count), len(speeds) - 1)
    ways = [tuple(np.diff([0, *cut, count]).tolist()) for cut in cuts]
    dealt = shares_by_speed(count, speeds)
    assert sum(dealt) == count and min(dealt) >= 1
    assert slowest_s(dealt, speeds) == pytest.approx(min(slowest_s(way, speeds) for way in ways))


def test_shares_follow_speed_and_leave_nobody_without() -> None:
    assert shares_by_speed(16, [1, 0.4]) == (12, 4), (
        "the last one is done after 12 / 1, with 11 and 5 only after 5 / 0.4"
    )
    assert shares_by_speed(64, [1, 0.4]) == (46, 18)
    assert shares_by_speed(3, [1, 100]) == (1, 2)
    assert shares_by_speed(4, [1000, 1, 1, 1]) == (1, 1, 1, 1)
    assert shares_if_worthwhile(16, [1.0, 0.99]) == equal_shares(16, 2) == (8, 8)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 10),
    speeds=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=4),
    head=st.floats(0, 5),
    lookup=st.floats(0, 2),
)
def test_no_other_stages_are_done_earlier(layers: int, speeds: list[float], head: float, lookup: float) -> None:
    layers = max(layers, len(speeds))

    def slowest(each: tuple[int, ...]) -> float:
        costs = [float(count) for count in each]
        costs[0] += lookup
        costs[-1] += head
        return max(cost / speed for cost, speed in zip(costs, speeds, strict=True))

    cuts = combinations(range(1, layers), len(speeds) - 1)
    ways = [tuple(np.diff([0, *cut, layers]).tolist()) for cut in cuts]
    dealt = balanced_stages_by_speed(layers, speeds, head, lookup)
    assert sum(dealt) == layers and slowest(dealt) == pytest.approx(min(map(slowest, ways)))


def test_a_stage_gets_no_more_layers_than_it_can_hold() -> None:
    assert balanced_stages_by_speed(22, (1.0, 0.4), 0.0) == (16, 6)
    assert balanced_stages_by_speed(22, (1.0, 0.4), 0.0, max_layers=(12, 30)) == (12, 10)
    assert balanced_stages_by_speed(9, (3.0, 1.0, 1.0), 0.0, max_layers=(2, 9, 9)) == (2, 4, 3)


def test_speeds_come_from_the_clocks_of_the_probe() -> None:
    devices = device_speeds_of(work(), probed(1.0, 0.4), PLAIT_PROFILE)
    assert devices.names == ("a", "b") and devices.is_measured
    assert devices.speeds[0] / devices.speeds[1] == pytest.approx(2.5, rel=0.01)
    assert devices.speeds[1] == pytest.approx(1.0)
    assert device_speeds_of(work(), probed(1.0, 0.97), PLAIT_PROFILE).are_equal


def three_and_one() -> Cluster:
    """A host of three workers, one of them slow, and a slow host of one."""
    found = told((1.0, 0.5))
    three = replace(found.devices[0], workers=3, rates=(1.0, 1.0, 0.5))
    there = replace(found, devices=(three, found.devices[1]), workers=4)
    hosts = [(HOST, 1e11, 3), (HOST, 1e11, 1)]
    return replace(cluster_of_hosts(hosts, slowest_measured_link(there, "between")), measured=there)


def test_a_slow_worker_of_a_fast_host_counts_with_its_own_speed() -> None:
    speeds = np.array(device_speeds_of(work(), three_and_one(), PLAIT_PROFILE).speeds)
    assert speeds / speeds[0] == pytest.approx([1, 1, 0.5, 0.5], rel=0.01)


def test_a_machine_alone_is_priced_by_its_own_clock() -> None:
    found = search(work(), probed(1.0, 0.4))
    for place, speed in enumerate((1.0, 0.4)):
        alone = search(work(), node_alone(found.cluster, place, 1))
        own = search(work(), probed(speed))
        assert alone.step_s[alone.chosen] == pytest.approx(own.step_s[own.chosen])
        assert (
            f"alone would take {format_duration(float(own.step_s[own.chosen]))} a step"
            in idle_machine_lines(found)[place]
        )


def test_some_workers_of_a_host_alone_keep_their_own_speeds() -> None:
    three = device_speeds_of(work(), node_alone(three_and_one(), 0, 3), PLAIT_PROFILE)
    assert np.array(three.speeds) / three.speeds[0] == pytest.approx([1, 1, 0.5], rel=0.01)
    for place in (0, 1):
        one = node_alone(three_and_one(), place, 1)
        assert (
            one.measured is not None and one.n_devices == one.measured.workers == one.measured.devices[0].workers == 1
        )
        assert device_speeds_of(work(), one, PLAIT_PROFILE).speeds == (1.0,)


@pytest.mark.parametrize(
    ("speeds", "batch", "dealt"), [((1.0, 0.4), 64, (46, 18)), ((1.0, 1.0, 0.5, 0.25), 88, (32, 32, 16, 8))]
)
def test_copies_on_unequal_hosts_share_by_speed_and_come_near_the_sum_of_speeds(
    speeds: tuple[float, ...], batch: int, dealt: tuple[int, ...]
) -> None:
    found = search(work(batch), probed(*speeds, rate=1e12), constraints=copies(len(speeds)))
    assert deal_of(found) == unequal_shares_of(found, found.chosen) == dealt
    items = found.step_time(found.chosen)
    computed = float((items.products + items.scores + items.stream + items.head)[0])
    one = search(work(batch), probed(1.0, rate=1e12), constraints=Constraints(knobs={"micro_sequences": 1}))
    alone = one.step_time(one.chosen)
    alone_s = float((alone.products + alone.scores + alone.stream + alone.head)[0])
    assert computed == pytest.approx(max(n / s for n, s in zip(dealt, speeds, strict=True)) / batch * alone_s, rel=0.01)
    assert alone_s / sum(speeds) / computed > 0.93
    assert found.step_s[found.chosen] == pytest.approx(float(items.step_s[0]))


def test_equal_hosts_have_no_shares_and_the_same_price_as_ever() -> None:
    found = search(work(), probed(1.0, 1.0), constraints=copies(2))
    assert unequal_shares_of(found, found.chosen) == () and not unequal_lines(found, found.chosen)
    row = found.candidates.select(np.array([found.chosen]))
    assert found.step_s[found.chosen] == step_time_of(inputs(work(), found.cluster, row, found.profile)).step_s[0]


def test_named_shares_are_obeyed_and_priced() -> None:
    cluster = probed(1.0, 0.4)
    auto, named, even = (
        search(work(), cluster, constraints=replace(copies(2), shares=asked)) for asked in ((), (13, 3), (8, 8))
    )
    assert (
        deal_of(named) == unequal_shares_of(named, named.chosen) == (13, 3)
        and unequal_shares_of(even, even.chosen) == ()
    )
    assert auto.step_s[auto.chosen] < named.step_s[named.chosen] < even.step_s[even.chosen]
    assert any("as layout.shares says: 13 + 3 of 16" in line for line in unequal_lines(named, named.chosen))
    equals = search(work(), probed(1.0, 1.0), constraints=replace(copies(2), shares=(12, 4)))
    half = search(work(), probed(1.0, 1.0), constraints=copies(2))
    assert equals.step_s[equals.chosen] > 1.3 * half.step_s[half.chosen]


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (replace(copies(2), shares=(12, 3)), "add up to 15"),
        (replace(copies(2), shares=(8, 4, 4)), "should be 2 numbers"),
        (Constraints(shares=(12, 4)), "name layout.replicate or layout.shard"),
    ],
)
def test_shares_that_cannot_be_are_one_sentence(pins: Constraints, says: str) -> None:
    with pytest.raises(PlaitError, match=says):
        search(work(), probed(1.0, 0.4), constraints=pins)


def test_stages_are_cut_by_speed_the_head_included_and_simulated() -> None:
    pins = Constraints(degrees=Layout(pipeline=2), knobs={"micro_sequences": 1, "schedule": "1f1b"})
    found = search(work(64, layers=22), probed(1.0, 0.4), constraints=pins)
    head, lookup = found.assigner.devices.head_cost_in_layers, found.assigner.devices.embedding_cost_in_layers
    assert head > 0.2 and lookup > 0
    first, last = found.stage_layers(found.chosen)

    def slowest(layers: int) -> float:
        return max(layers + lookup, (22 - layers + head) / 0.4)

    assert first + last == 22 and slowest(first) == min(slowest(layers) for layers in range(1, 22))
    even = search(work(64, layers=22), probed(1.0, 0.4), constraints=replace(pins, stage_layers=(11, 11)))
    assert even.step_s[even.chosen] > 1.3 * found.step_s[found.chosen]
    assert any(f"{first} on a; {last} on b" in line for line in unequal_lines(found, found.chosen))


def test_a_pipeline_of_unequal_devices_takes_what_its_list_of_actions_takes() -> None:
    pins = Constraints(
        degrees=Layout(pipeline=2), knobs={"micro_sequences": 1, "schedule": "gpipe", "recompute": "none"}
    )
    workload, cluster = work(12), probed(1.0, 0.4)
    found = search(workload, cluster, constraints=pins)
    group = found.assigner.group_of(found.candidates, found.chosen)
    assert group.assignment is not None
    times = step_time_of(inputs(workload, cluster, group.candidates, found.profile))
    pace = bottleneck(inputs(workload, cluster, group.candidates, found.profile), group.assignment, times)
    stages = pace.stages_s
    halves: ActionTimes = {"forward": stages / 3, "backward-input": stages / 3, "backward-weight": stages / 3}
    whole = float(durations_s("gpipe", (2, 1, 12), halves, pace.times.stage_message)[0])
    assert float(pace.piped_s[0]) == pytest.approx(whole, rel=0.05)
    assert found.step_s[found.chosen] == pytest.approx(
        float(step_seconds(inputs(workload, cluster, group.candidates, found.profile))[0])
    )


def interleaved() -> Search:
    """Two stages on each of two unequal hosts."""
    pins = Constraints(
        degrees=Layout(pipeline=2), knobs={"micro_sequences": 1, "schedule": "interleaved", "virtual": 2}
    )
    return search(
        work(8, layers=12), probed(1.0, 0.4), constraints=replace(pins, knobs={**pins.knobs, "recompute": "none"})
    )


def test_what_interleaved_stages_hold_is_counted_stage_by_stage() -> None:
    found = interleaved()
    stages = found.stage_layers(found.chosen)
    assert len(set(stages)) > 1 and stages[2] > 1, "a stage behind keeps fewer micro-batches"
    row = replace(found.candidates.select(np.array([found.chosen])), layer_split=stages)
    assert found.memory_of_fullest(found.chosen).allocated == pytest.approx(
        estimate_memory(found.workload, row, found.profile).allocated
    )


def test_the_ends_of_an_interleaved_pipeline_stand_on_their_own_stages() -> None:
    found = interleaved()
    one = found.assigner.group_of(found.candidates, found.chosen)
    assert one.assignment is not None
    times = step_time_of(inputs(found.workload, found.cluster, one.candidates, found.profile))
    stages, _ = unequal_stage_times(
        inputs(found.workload, found.cluster, one.candidates, found.profile), one.assignment, times
    )
    each = [s / layers for s, layers in zip(stages.forward_s, one.assignment.stage_layers, strict=True)]
    lookup, head = one.assignment.embedding_cost_in_layers, found.assigner.devices.head_cost_in_layers
    first, _, third, last = (
        s / (layers + more) / slow
        for s, layers, more, slow in zip(
            stages.forward_s, one.assignment.stage_layers, (lookup, 0, 0, head), (1, 2.5, 1, 2.5), strict=True
        )
    )
    assert each[3] > each[1], "the head and the loss"
    assert first == pytest.approx(third, rel=0.02) and last == pytest.approx(third, rel=0.02)


def test_a_small_device_holds_fewer_layers_and_everything_fits() -> None:
    shape = named_shape("1.3B", vocabulary=32768, sequence=1024)
    workload = workload_of(shape, sequence=1024, batch_sequences=32)
    cluster = read_cluster("1x4090+1x3080@10G")
    pins = Constraints(degrees=Layout(pipeline=2), knobs={"schedule": "1f1b"})
    found = search(workload, cluster, constraints=pins)
    assignment = found.assignment(found.chosen)
    assert assignment is not None
    one = found.assigner.group_of(found.candidates, found.chosen)
    needed = bytes_per_rank(workload, one.candidates, found.profile)[:, 0]
    have = [island.device.memory_bytes for island in cluster.islands]
    assert needed[0] > have[1], "the larger device holds more than the smaller one could"
    assert (needed <= ALLOCATOR_RESERVE * np.array(have) + found.profile.outside_bytes).all(), (
        "as for every layout that was named"
    )
    assert found.capacity_bytes(found.chosen) in have
    assert sum(memory_items(found, found.chosen).values()) == pytest.approx(found.bytes_per_device(found.chosen))


def test_what_is_held_is_that_of_the_part_that_holds_most() -> None:
    """12 sequences, 8 at a time, are taken as 6 and 6."""
    found = search(work(), probed(1.0, 0.4), constraints=copies(2, micro=8, recompute="none"))
    assert deal_of(found) == (12, 4)
    row = found.candidates.select(np.array([found.chosen]))
    six = estimate_memory(work(24), replace(row, micro_sequences=np.array([6])), found.profile)
    assert found.memory(found.chosen).allocated == pytest.approx(six.allocated)
    assert found.memory_of_fullest(found.chosen).allocated == pytest.approx(six.allocated)
    assert found.micro_sequences(found.chosen) == (6,), "so that shares may change without anybody taking more"
    assert found.bytes_per_device(found.chosen) == pytest.approx(float(six.reserved[0]))


def old_and_new(micro: int, size: str = "125M", **degrees: int) -> Search:
    shape = named_shape(size, vocabulary=32768, sequence=2048)
    workload = workload_of(shape, sequence=2048, batch_sequences=64)
    knobs = {"micro_sequences": micro, "recompute": "none", "shard_what": "parameters"}
    pins = Constraints(degrees=Layout(**degrees) if degrees else Layout(replicate=2), knobs=knobs)
    best = replace(PLAIT_PROFILE, product_share=1.0, flash_share=0.6, flash_lag=0.0)
    return search(workload, read_cluster("1x4090+1x3080@10G"), constraints=pins, profile=best)


def test_a_small_device_takes_fewer_sequences_at_a_time_and_says_so() -> None:
    found = old_and_new(14)
    large, small = found.micro_sequences(found.chosen)
    assert large == 12 and small < 12, "46 sequences, 14 at a time, are taken as 12"
    [line] = memory_limit_lines(found, found.chosen)
    assert f"12 sequences at a time, and fewer where memory is short: RTX 3080 takes {small}" in line
    assert found.capacity_bytes(found.chosen) == min(island.device.memory_bytes for island in found.cluster.islands)
    assert found.memory_of_fullest(found.chosen).allocated > found.memory(found.chosen).allocated, "the larger one's"
    figures = layout_figures(found, found.chosen)
    assert figures.micro_sequences == 12 and figures.micro_limits == (12, small)
    assert sum(memory_items(found, found.chosen).values()) == pytest.approx(found.bytes_per_device(found.chosen))
    assert old_and_new(1).micro_sequences(0) == (1,) and not memory_limit_lines(old_and_new(1), 0)
    with pytest.raises(PlaitError, match=r"fits no layout of .* and the smallest device \(RTX 3080\) has 9\.88 GiB"):
        old_and_new(16, size="1.3B")


def test_parts_that_meet_gather_as_often_as_the_smallest_device_makes_them() -> None:
    found = old_and_new(64, shard=2)
    limits, assignment = found.micro_sequences(found.chosen), found.assignment(found.chosen)
    assert len(limits) == 2 and assignment is not None
    number = max(-(-share // limit) for share, limit in zip(assignment.sequences_per_replica, limits, strict=True))
    fewer = -(-max(assignment.sequences_per_replica) // limits[0])
    assert number > fewer and found.n_microbatches[found.chosen] == number
    group = found.assigner.group_of(found.candidates, found.chosen)
    often, seldom = (
        closed_form_step_time(found.cost_inputs, replace(group, n_microbatches=count)).parameters[0]
        for count in (np.array([number]), None)
    )
    assert found.step_time(found.chosen).parameters[0] == often == pytest.approx(number / fewer * seldom)


def alike_and_with_a_little_one(nodes: int) -> tuple[Workload, Cluster, Cluster]:
    """A model, equal machines, and the same of which the last has half the memory."""
    shape = named_shape("350M", vocabulary=32768, sequence=1024)
    alike = read_cluster(f"{nodes}x(1x4090)@10G")
    [island] = alike.islands
    little = replace(island.device, memory_bytes=island.device.memory_bytes // 2)
    islands = replace(island, nodes=nodes - 1), replace(island, nodes=1, device=little)
    return workload_of(shape, sequence=1024, batch_sequences=64), alike, replace(alike, islands=islands)


def test_equally_fast_devices_of_unequal_memory_are_priced_with_all_their_meetings() -> None:
    workload, small, unequal = alike_and_with_a_little_one(2)
    pins = Constraints(
        degrees=Layout(shard=2), knobs={"micro_sequences": 8, "recompute": "none", "shard_what": "parameters"}
    )
    even, uneven = search(workload, small, constraints=pins), search(workload, unequal, constraints=pins)
    large, less = uneven.micro_sequences(uneven.chosen)
    assert even.micro_sequences(even.chosen) == (8,) and large == 8 > less
    assert uneven.n_microbatches[uneven.chosen] == -(-32 // less) > even.n_microbatches[even.chosen] == 4
    assert uneven.step_time(0).parameters[0] / even.step_time(0).parameters[0] == pytest.approx(-(-32 // less) / 4)
    assert uneven.step_s[0] == pytest.approx(float(uneven.step_time(0).step_s[0]))


def test_parts_that_meet_compute_a_sequence_in_every_micro_batch() -> None:
    """Of 14 + 2, one at a time, the second part has 14 micro-batches too where parameters travel in each."""
    pins = replace(copies(2), degrees=Layout(shard=2), shares=(14, 2))

    def computed_s(what: str, speed: float) -> float:
        knobs = {"micro_sequences": 1, "recompute": "none", "shard_what": what}
        found = search(work(), probed(1.0, speed), constraints=replace(pins, knobs=knobs))
        return float(found.step_time(0).products[0])

    assert computed_s("optimizer", 0.4) == pytest.approx(computed_s("optimizer", 1.0)), "2 / 0.4 are done before 14"
    assert computed_s("parameters", 0.4) == pytest.approx(2.5 * computed_s("optimizer", 0.4))


def test_a_gpipe_keeps_as_many_micro_batches_as_its_share_may_grow_to() -> None:
    """Two copies of a pipeline of two stages: one of them may come to take all but one of 16 sequences."""
    pins = Constraints(degrees=Layout(pipeline=2, replicate=2), knobs={"micro_sequences": 1, "recompute": "none"})
    most = {}
    for schedule in ("gpipe", "1f1b"):
        one = replace(pins, knobs={**pins.knobs, "schedule": schedule})
        found = search(work(), probed(1.0, 0.4, 1.0, 0.4), constraints=one)
        held = replica_memory_of(
            found.workload, found.assigner.group_of(found.candidates, 0), found.profile, found.memory_budget
        )
        most[schedule] = max(part.most.max() for part in held), max(part.needed_bytes.max() for part in held)
    grown, dealt = most["gpipe"]
    per_sequence = (grown - dealt) / (15 - shares_by_speed(16, (1.0, 0.4))[0])
    assert per_sequence > 8 / 2 * 256 * 256 * 4, "more than the inputs of its layers"
    grown, dealt = most["1f1b"]
    assert grown - dealt < per_sequence / 2, "as many are under way as there are stages, and numbers of tokens"


def test_a_share_that_grows_still_fits() -> None:
    """Both ranks may come to take what the larger share takes at a time, in more than one micro-batch."""
    found = search(work(), probed(1.0, 0.4), constraints=copies(2, micro=12, recompute="none"))
    [part, _] = replica_memory_of(
        found.workload, found.assigner.group_of(found.candidates, 0), found.profile, found.memory_budget
    )
    [most] = found.micro_sequences(0)
    row = replace(found.candidates.select(np.array([0])), micro_sequences=np.array([most]))
    assert part.most.max() == pytest.approx(float(estimate_memory(work(4 * most), row, found.profile).reserved[0]))


def test_what_is_told_of_memory_is_of_shares_as_they_are_dealt() -> None:
    """Each takes its 8 sequences at once; that it may come to take more of them is for judging what fits."""
    pins = replace(copies(2, micro=8, recompute="none"), shares=(8, 8))
    found = search(work(), probed(1.0, 0.4), constraints=pins)
    held = replica_memory_of(
        found.workload, found.assigner.group_of(found.candidates, 0), found.profile, found.memory_budget
    )
    dealt, grown = max(part.needed_bytes.max() for part in held), max(part.most.max() for part in held)
    assert found.bytes_per_device(0) == dealt < grown == found.judged_bytes[0]


def test_beside_a_larger_first_micro_batch_stand_no_gradients() -> None:
    """7 sequences are taken as 4 and 3: the 4 before any gradients are there, the 3 with those of the 4."""
    pins = replace(copies(2, micro=4, recompute="none"), shares=(9, 7))
    found = search(work(), probed(1.0, 0.8), constraints=pins)
    [four_and_three, three_times_three] = replica_memory_of(
        found.workload, found.assigner.group_of(found.candidates, 0), found.profile, found.memory_budget
    )

    def held(micros: int, size: int) -> float:
        row = replace(found.candidates.select(np.array([0])), micro_sequences=np.array([size]))
        return float(estimate_memory(work(2 * micros * size), row, found.profile).reserved[0])

    assert three_times_three.needed_bytes.max() == held(3, 3)
    assert four_and_three.needed_bytes.max() == max(held(1, 4), held(2, 3)) < held(2, 4) == four_and_three.most.max()
    assert (
        found.memory_of_fullest(0).reserved[0] == found.bytes_per_device(0) == max(held(1, 4), held(2, 3), held(3, 3))
    )


def test_portions_are_cut_as_the_loader_cuts_them() -> None:
    found = old_and_new(16)
    group = found.assigner.group_of(found.candidates, found.chosen)
    assert group.assignment is not None
    for portion in replica_memory_of(found.workload, group, found.profile, found.memory_budget):
        for part in portion.replicas:
            [sizes] = micro_sizes((group.assignment.sequences_per_replica[part],), (int(portion.limit[0]),))
            assert (len(sizes), sizes[0]) == (int(portion.number[0]), int(portion.size[0]))


def test_tensor_groups_do_not_straddle_machines() -> None:
    cluster = read_cluster("2x(3x4090)@10G")
    rows = Candidates.from_rows([{"tensor": 2, "replicate": 3}, {"tensor": 3, "replicate": 2}, {"replicate": 6}])
    assert crosses_hosts_needlessly(cluster, rows).tolist() == [True, False, False]
    shape = explicit_shape(layers=12, width=768, heads=12, vocabulary=4096, sequence=512)
    found = search(workload_of(shape, sequence=512, batch_sequences=24), cluster)
    assert found.refused[CROSSES_HOSTS] > 0 and 2 not in found.candidates.tensor


def planned(folder: Path, cluster: Cluster, *overrides: str) -> Plan:
    """A run over hosts that were looked at."""
    model = ("model.layers=8", "model.width=256", "model.heads=4", "model.vocabulary=4096", "train.sequence=256")
    config = recipe(folder, "train.budget=100 steps", "train.batch_tokens=4096", *model, *overrides)

    def look(need: ProbeNeed) -> Cluster:
        return cluster

    given = FixedWorkers(workers=cluster.n_devices, threads=1)
    resources = Resources(machine=HOST, peak_flops=1e11, fixed_workers=given, probe=look)
    outline = draft(config, PLAYS, resources, recipe_hash="cafe")
    return settle(config, outline, outline.layouts)


def test_the_plan_of_two_hosts_carries_their_shares_and_says_why(tmp_path: Path) -> None:
    plan = planned(tmp_path, probed(1.0, 0.4), "layout.replicate=2")
    assert plan.placement.shares == plan.sequences_per_replica == (12, 4) and plan.cadence.balance_every_steps == 50
    assert "b does 25% of each batch: it is 2.5 times slower than a" in plan.reasons
    assert planned(tmp_path, probed(1.0, 1.0), "layout.replicate=2").placement.shares == ()
    named = planned(tmp_path, probed(1.0, 1.0), "layout.replicate=2", "layout.shares=[13,3]", "balance.every=never")
    assert named.sequences_per_replica == (13, 3) and named.cadence.balance_every_steps == 0
    piped = planned(tmp_path, probed(1.0, 0.4), "layout.pipeline=2")
    assert (
        len(piped.placement.layout.stage_layers) == 2
        and piped.placement.layout.stage_layers[0] > 4
        and piped.placement.shares == ()
    )
    with pytest.raises(PlaitError, match="add up to 15"):
        planned(tmp_path, probed(1.0, 1.0), "layout.replicate=2", "layout.shares=[12,3]")


def test_one_device_alone_is_the_first_by_its_own_clock(tmp_path: Path) -> None:
    beside, equal = (planned(tmp_path, probed(1.0, other), "layout.replicate=2").forecast for other in (0.4, 1.0))
    assert beside is not None and equal is not None
    assert beside.one_device_step_s == pytest.approx(equal.one_device_step_s)


def test_equal_devices_of_one_host_are_never_balanced(tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.budget=100 steps", "model.size=1M", "layout.replicate=2")
    outline = draft(config, PLAYS, Resources(machine=replace(HOST, cores=8), peak_flops=1e11), recipe_hash="cafe")
    assert settle(config, outline, outline.layouts).cadence.balance_every_steps == 0


def test_unlike_gpus_of_one_host_are_balanced_while_the_run_goes_on(tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.budget=100 steps", "model.size=1M", "layout.replicate=2")
    machine = replace(
        HOST, device="cuda", name="NVIDIA GeForce RTX 3080", devices=2, unlike=("NVIDIA GeForce RTX 4090",)
    )
    outline = draft(config, PLAYS, Resources(machine=machine, peak_flops=6e13), recipe_hash="cafe")
    plan = settle(config, outline, outline.layouts)
    assert plan.cadence.balance_every_steps == 50
    assert any("beside NVIDIA GeForce RTX 3080 it has NVIDIA GeForce RTX 4090" in why for why in plan.reasons)


CASES = {
    "old-and-new": ("1x4090+1x3080@10G", ("model.size=350M", "train.sequence=1024", "train.batch_tokens=65536")),
    "unequal-nodes": (
        "1x(4xA100)+1x(4xH100)+400G",
        ("model.size=7B", "train.sequence=4096", "train.batch_tokens=524288"),
    ),
    "unequal-pipeline": (
        "4x4090+4x3090@1G",
        ("model.size=1.3B", "train.sequence=1024", "train.batch_tokens=65536", "layout.pipeline=4", "layout.tensor=2"),
    ),
}


@pytest.mark.parametrize(
    "name", ["old-and-new", pytest.param("unequal-nodes", marks=pytest.mark.slow), "unequal-pipeline"]
)
def test_the_words_for_unequal_clusters(name: str, tmp_path: Path) -> None:
    cluster, asked = CASES[name]
    text = plan_report_text(
        make_plan_report(recipe(tmp_path, "train.budget=1B tokens", *asked), on_paper(read_cluster(cluster)), top=3)
    )
    golden = GOLDEN / f"plan-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"


def test_what_unequal_shares_save_is_told() -> None:
    found = search(work(), probed(1.0, 0.4), constraints=copies(2))
    assert any("with equal shares the slowest device would set the pace" in line for line in unequal_reasons(found))
    few = search(work(2), probed(1.0, 0.4), constraints=copies(2))
    assert any(
        "too few to be shared by speed; b is 2.5 times slower" in line for line in unequal_lines(few, few.chosen)
    )


def test_a_dealers_answer_does_not_hang_on_which_layouts_are_asked_about() -> None:
    cluster = read_cluster("1x4090+1x3080@10G")
    shape = named_shape("350M", vocabulary=32768, sequence=1024)
    workload = workload_of(shape, sequence=1024, batch_sequences=32)
    found = search(workload, cluster)
    assigner: WorkAssigner = found.assigner
    groups = assigner.grouped(found.candidates)
    assert sorted(place for group in groups for place in group.indices) == list(range(len(found.candidates)))
    for group in groups:
        for at in range(0, len(group.indices), 7):
            lone = assigner.group_of(found.candidates, int(group.indices[at]))
            assert group.assignment is not None and lone.assignment is not None
            assert (lone.assignment.stage_layers, lone.assignment.sequences_per_replica) == (
                group.assignment.stage_layers,
                group.assignment.sequences_per_replica,
            )
            assert lone.candidates.row(0) == group.candidates.row(at)
            assert lone.candidates.layer_split == group.candidates.layer_split


def test_a_layout_costs_the_same_whoever_is_priced_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small device of four makes parts that split parameters meet more often, and nobody else."""
    monkeypatch.setattr(layout_cost, "SIMULATED_WITHIN", -1.0)  # nothing is simulated
    workload, _, unequal = alike_and_with_a_little_one(4)
    found = search(workload, unequal, constraints=Constraints(degrees=Layout(pipeline=2, shard=2)))
    usual = -(-32 // found.candidates.micro_sequences)
    often = (found.n_microbatches > usual) & (found.candidates.shard_what == SHARDED_STATES.index("parameters"))
    assert often.any() and not often.all()
    alone = [float(found.step_time(index).step_s[0]) for index in range(len(found.candidates))]
    assert found.step_s == pytest.approx(alone)
