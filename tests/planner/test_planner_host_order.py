"""The order of unlike machines: priced like any other choice, carried out, and said."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import Cluster, read_cluster
from plait.model.sizes import explicit_shape
from plait.planner.derive.resources import FixedWorkers, Resources
from plait.planner.explain.unequal_devices import unequal_reasons
from plait.planner.heterogeneous.host_permutations import other_orders
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.resolve.constrained_search import constrained_search
from plait.planner.resolve.resolve import draft, settle
from plait.planner.search.enumeration import Constraints
from plait.planner.search.feasibility import DoesNotFit
from plait.planner.search.found import Search
from plait.planner.search.host_choice import with_best_host_order, with_better_first_host
from plait.planner.search.search import search
from plait.units import format_duration
from tests.planner.hosts import HOST, probed
from tests.planner.machines import PLAYS, recipe

SHAPE = explicit_shape(layers=22, width=128, heads=4, vocabulary=2048, sequence=256)
PIPELINE = Constraints(degrees=Layout(pipeline=4), knobs={"micro_sequences": 1, "schedule": "1f1b", "virtual": 1})
SPEEDS = (1.0, 1.0, 0.5, 0.25)


def work(batch: int = 32) -> Workload:
    return workload_of(SHAPE, sequence=256, batch_sequences=batch, precision="float32")


def step_s(found: Search) -> float:
    return float(found.step_s[found.chosen])


def hosts_of(cluster: Cluster) -> str:
    assert cluster.measured is not None
    return "".join(each.host for each in cluster.measured.devices)


@pytest.mark.parametrize(("first_stays", "orders"), [(False, ["acb", "bac", "bca", "cab", "cba"]), (True, ["acb"])])
def test_other_orders_of_machines_take_their_measurements_along(first_stays: bool, orders: list[str]) -> None:
    found = other_orders(probed(1.0, 0.4, 0.2), first_stays=first_stays)
    assert [hosts_of(other) for _, other in found] == orders
    assert ["".join("abc"[host] for host in places) for places, _ in found] == orders
    for _, other in found:
        flops = [island.device.flops("float32") for island in other.islands]
        names = hosts_of(other)
        assert [flops[names.index(name)] for name in "abc"] == pytest.approx([1e11, 4e10, 2e10])
    assert not other_orders(read_cluster("2x(1x4090)@10G"), first_stays=first_stays)


def test_few_machines_move_one_by_one_many_with_all_of_their_kind() -> None:
    few = other_orders(read_cluster("2x(1x4090)+1x3080@10G"), first_stays=True)
    assert [places for places, _ in few] == [(0, 2, 1)]
    assert [(island.device.name, island.nodes) for island in few[0][1].islands] == [
        ("RTX 4090", 1),
        ("RTX 3080", 1),
        ("RTX 4090", 1),
    ]
    back = other_orders(few[0][1], first_stays=True)
    assert [[island.nodes for island in other.islands] for _, other in back] == [[2, 1]]
    many = other_orders(read_cluster("2x(1x4090)+1x3080+3x(1x3090)@10G"), first_stays=True)
    assert [places for places, _ in many] == [(0, 1, 3, 4, 5, 2)]


def test_more_machines_than_can_be_tried_in_all_orders_are_tried_by_speed() -> None:
    five = probed(0.5, 1.0, 0.2, 0.7, 0.4)
    assert ["".join("abcde"[host] for host in places) for places, _ in other_orders(five, first_stays=True)] == [
        "acedb",
        "abdec",
    ]
    assert [hosts_of(other) for _, other in other_orders(five, first_stays=False)] == ["ceadb", "bdaec"]


def test_a_pipeline_s_machines_stand_in_the_best_order_behind_the_first() -> None:
    """Held against every order, each searched for itself."""
    found = with_best_host_order(search(work(), probed(*SPEEDS), constraints=PIPELINE))
    tried: dict[tuple[int, ...], float] = {
        order: step_s(search(work(), probed(SPEEDS[0], *(SPEEDS[host] for host in order)), constraints=PIPELINE))
        for order in permutations((1, 2, 3))
    }
    assert found.host_order is not None and found.host_order.hosts[0] == 0
    assert step_s(found) == pytest.approx(min(tried.values())) and step_s(found) < 0.97 * tried[1, 2, 3]
    assert tried[found.host_order.hosts[1:]] == pytest.approx(min(tried.values()))
    assert found.host_order.step_s_in_given_order == pytest.approx(tried[1, 2, 3])
    assert hosts_of(found.cluster) == "".join("abcd"[host] for host in found.host_order.hosts)


def test_machines_stay_where_they_are_unless_that_costs_time() -> None:
    copies = Constraints(degrees=Layout(replicate=4), knobs={"micro_sequences": 1})
    assert with_best_host_order(search(work(), probed(*SPEEDS), constraints=copies)).host_order is None
    as_named = replace(PIPELINE, stage_layers=(8, 8, 4, 2))
    assert with_best_host_order(search(work(), probed(*SPEEDS), constraints=as_named)).host_order is None


def test_another_machine_is_named_to_start_on_where_that_is_faster() -> None:
    """Cutting matrices over this cable takes as long in any order; shares the wrong way round do not."""
    two = probed(1.0, 0.4)
    cut = search(work(), two, constraints=Constraints(degrees=Layout(tensor=2)))
    assert with_better_first_host(cut) is None and not any("in the order" in line for line in unequal_reasons(cut))
    shares = Constraints(degrees=Layout(replicate=2), knobs={"micro_sequences": 1}, shares=(8, 24))
    turned = search(work(), two, constraints=shares)
    [line] = [line for line in unequal_reasons(turned) if "in the order b, a" in line]
    back = search(work(), probed(0.4, 1.0), constraints=shares)
    there, here = format_duration(step_s(back)), format_duration(step_s(turned))
    assert line.endswith(f"would take {there}, not {here}: start the run on b, let the others join in this order")


@pytest.mark.slow
def test_the_plan_carries_the_places_and_says_why(tmp_path: Path) -> None:
    cluster = probed(*SPEEDS)
    found = constrained_search(work(32), cluster, PLAIT_PROFILE, PIPELINE)
    assert found.host_order is not None
    resources = Resources(
        machine=HOST,
        peak_flops=None,
        fixed_workers=FixedWorkers(workers=4, threads=1),
        cluster=cluster,
        probe=lambda need: cluster,
    )
    size = ("model.layers=22", "model.width=128", "model.heads=4", "model.vocabulary=2048", "train.sequence=256")
    batch = ("train.batch_tokens=8192", "layout.micro_sequences=1", "layout.schedule='1f1b'")
    config = recipe(tmp_path, *size, *batch, "layout.pipeline=4", "optimizer.kind=adamw", 'train.budget="40 steps"')
    outline = draft(config, replace(PLAYS, vocabulary=2048), resources, recipe_hash="")
    plan = settle(config, outline, outline.layouts)
    assert (
        plan.placement.host_order == found.host_order.hosts
        and plan.placement.layout.stage_layers == found.stage_layers(found.chosen)
    )
    names, before_s = (
        ", ".join("abcd"[host] for host in plan.placement.host_order),
        found.host_order.step_s_in_given_order,
    )
    assert before_s is not None
    [line] = [line for line in plan.reasons if line.startswith("the machines are in the order ")]
    assert line.endswith(f"{names}: as they were given a step would take {before_s / step_s(found) - 1:.0%} longer")
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_where_nothing_fits_as_the_machines_stand_another_order_may_do(tmp_path: Path) -> None:
    """The last of a pipeline has the head, which is larger than the small machine."""
    pins = replace(PIPELINE, degrees=Layout(pipeline=3))
    huge = workload_of(
        replace(SHAPE, vocabulary=SHAPE.vocabulary * 2000), sequence=256, batch_sequences=8, precision="bf16"
    )
    given = read_cluster("2x(1x4090)+1x3080@10G")
    with pytest.raises(DoesNotFit):
        search(huge, given, constraints=pins)
    found = constrained_search(huge, given, PLAIT_PROFILE, pins)
    assert found.host_order is not None and found.host_order.hosts == (0, 2, 1)
    assert any(
        line.endswith("as they were given what [layout] asks for would not fit") for line in unequal_reasons(found)
    )
    with pytest.raises(DoesNotFit):
        constrained_search(huge, given, PLAIT_PROFILE, replace(pins, stage_layers=(10, 10, 2)))


def test_what_surely_fits_comes_before_what_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    given, copies = probed(*SPEEDS), Constraints(degrees=Layout(replicate=4), knobs={"micro_sequences": 1})
    slow, fast = (search(work(), given, constraints=pins) for pins in (copies, PIPELINE))
    assert with_best_host_order(fast).host_order is not None and with_best_host_order(slow).host_order is None
    monkeypatch.setattr("plait.planner.search.host_choice._holds", lambda found: found.cluster == given)
    assert with_best_host_order(fast).host_order is None, "where others fit only if all goes well they stay"
    monkeypatch.setattr("plait.planner.search.host_choice._holds", lambda found: found.cluster != given)
    assert with_best_host_order(slow).host_order is not None, "and the other way round they move, though for no time"


def test_an_order_in_which_nothing_fits_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(work(), probed(*SPEEDS), constraints=PIPELINE)

    def refuse(*asked: object, **more: object) -> Search:
        raise PlaitError("nothing fits")

    monkeypatch.setattr("plait.planner.search.host_choice.search", refuse)
    assert with_best_host_order(found) is found and with_better_first_host(found) is None
