"""What a pool's answer says: money, bounds, the choices shown, spot machines over time, and models for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.machines.pool import Pool, pool_from_toml, pool_of_short_form
from plait.planner.derive.published_rules import predicted_losses, reducible_loss
from plait.planner.pools.affordable import affordable_model
from plait.planner.pools.answer import aims_of, answer_of, forecast_error, pool_job, shown_choices
from plait.planner.pools.availability import generated_availability, read_availability, simulate_spot_run
from plait.planner.pools.choice import (
    INTERRUPTION_LOSS_S,
    Aims,
    PoolChoice,
    Work,
    best_choice,
    choices_of,
    frontier,
    missing,
)
from plait.planner.pools.choice_words import nearest_text
from plait.planner.pools.egress import bytes_between_zones, egress_cost
from plait.planner.pools.pricing import PoolPricer
from plait.planner.pools.rendered import answer_lines
from plait.planner.pools.selection import DeviceCounts, Selection
from plait.planner.search.enumeration import Constraints
from plait.planner.search.model_error import stated_error
from plait.planner.search.search import search
from plait.units import format_days
from tests.planner.machines import WEB, recipe
from tests.planner.test_planner_device_subsets import work

TWO_ZONES = pool_from_toml(
    b"""
    [[device]]
    name = "T4"
    count = 4
    per_node = 1
    zone = "a"
    price = 1.0
    spot_price = 0.25
    interruptions_per_day = 1
    [[device]]
    name = "T4"
    count = 4
    per_node = 1
    zone = "b"
    price = 2.0
    [[link]]
    from = "a"
    to = "b"
    bandwidth = 1e9
    egress_price = 0.1
    """,
    "two zones",
)
HOUR = Work(steps=3600, tokens=3_600_000)
"""An hour of steps of a second."""


def priced(counts: DeviceCounts, step_s: float, pool: Pool = TWO_ZONES, work: Work = HOUR) -> list[PoolChoice]:
    return choices_of(Selection(pool, counts), work, step_s=step_s, layout="", precision="bf16", sent={})


def test_money_is_devices_traffic_and_interruptions() -> None:
    sent = {("a", "b"): 1e9, ("b", "a"): 2e9}
    demand, spot = choices_of(Selection(TWO_ZONES, (2, 1)), HOUR, step_s=1.0, layout="", precision="bf16", sent=sent)
    assert demand.money and spot.money
    assert demand.wall_s == 3600
    assert (demand.money.devices, demand.money.restarts) == (2 * 1 + 1 * 2, 0)
    assert demand.money.egress == pytest.approx(3600 * 3 * 0.1)
    lost = 2 * INTERRUPTION_LOSS_S / 86400  # two spot machines, each taken back once a day
    assert spot.wall_s == pytest.approx(3600 / (1 - lost))
    assert spot.money.devices == 2 * 0.25 + 1 * 2
    assert spot.money.restarts == pytest.approx(2.5 * (1 / (1 - lost) - 1))
    assert "10 minutes lost at each interruption" in spot.assumed and demand.assumed == ()


def test_bounds_objectives_and_ties() -> None:
    slow, fast, dear = priced((0, 1), 4.0)[0], priced((0, 4), 1.1)[0], priced((0, 3), 1.105)[0]
    choices = [slow, fast, dear]
    assert best_choice(choices, Aims(objective="fastest")) is dear  # as fast within 1 %, and cheaper
    assert best_choice(choices, Aims(objective="cheapest")) is dear
    assert best_choice([slow, fast], Aims(objective="cheapest")) is slow
    assert best_choice([slow, fast], Aims(objective="cheapest", deadline_s=2 * 3600)) is fast
    assert best_choice([slow, fast], Aims(objective="fastest", max_cost=8.5)) is slow
    assert best_choice([slow, fast], Aims(objective="balanced")) is fast
    nothing = Aims(objective="fastest", deadline_s=3600, max_cost=1)
    assert missing(fast, nothing) == pytest.approx({"plan.deadline": 0.1, "plan.max_cost": 7.8})


def test_the_frontier_has_what_nothing_beats() -> None:
    choices = [priced((0, n), seconds)[0] for n, seconds in ((1, 4.0), (2, 2.1), (3, 2.2), (4, 1.2))]
    assert [one.selection.n_devices for one in frontier(choices)] == [4, 2, 1]
    many = [priced((0, 1), 4.0 / 1.2**n, work=HOUR)[0] for n in range(20)]
    many = [replace(one, money=replace(one.money, devices=1.3**n)) for n, one in enumerate(many) if one.money]
    shown = shown_choices(many, many[7])
    assert len(shown) == 6 and {many[0], many[7], many[19]} <= set(shown)
    assert shown == sorted(shown, key=lambda one: one.wall_s)


@pytest.mark.parametrize(
    ("degrees", "times"),
    [
        (Layout(replicate=4), 2 * 3 / 4 * 4),  # an all-reduce crosses from zone to zone at two hops of the ring
        (Layout(shard=4), 3 / 4 * (4 + 4)),  # gradients are scattered, parameters gathered
    ],
)
def test_traffic_between_zones_of_gradients(degrees: Layout, times: float) -> None:
    cluster = Selection(TWO_ZONES, (2, 2)).cluster
    knobs: dict[str, int | str] = {"shard_what": "optimizer"} if degrees.shard > 1 else {}
    job = replace(work(), precision="float32")
    found = search(job, cluster, constraints=Constraints(degrees=degrees, knobs=knobs))
    sent = bytes_between_zones(found, found.chosen, ("a", "a", "b", "b"), 1_000_000)
    assert sent == pytest.approx({("a", "b"): times * 1e6, ("b", "a"): times * 1e6})
    assert egress_cost(sent, {frozenset("ab"): 0.1}) == pytest.approx(2 * times * 1e6 / 1e9 * 0.1)
    assert bytes_between_zones(found, found.chosen, ("a",) * 4, 1_000_000) == {}


def test_traffic_between_zones_of_a_pipeline() -> None:
    cluster = Selection(TWO_ZONES, (1, 1)).cluster
    job = replace(work(), precision="float32")
    found = search(job, cluster, constraints=Constraints(degrees=Layout(pipeline=2), knobs={"schedule": "1f1b"}))
    sent = bytes_between_zones(found, found.chosen, ("a", "b"), 1_000_000)
    activations = 4.0 * job.batch_tokens * job.width
    assert sent == pytest.approx({("a", "b"): activations, ("b", "a"): activations})


def test_an_objective_follows_from_the_bounds(tmp_path: Path) -> None:
    pool = pool_of_short_form("8xH100")
    assert aims_of(recipe(tmp_path), pool) == Aims(objective="balanced")
    assert aims_of(recipe(tmp_path, "plan.deadline=3 days"), pool) == Aims(objective="cheapest", deadline_s=3 * 86400)
    assert aims_of(recipe(tmp_path, "plan.max_cost=500"), pool) == Aims(objective="fastest", max_cost=500)
    both = recipe(tmp_path, "plan.max_cost=5", "plan.deadline=1 hour", "plan.objective=balanced")
    assert aims_of(both, pool) == Aims(objective="balanced", deadline_s=3600, max_cost=5)


def test_without_prices_the_fastest_is_found_and_money_is_refused(tmp_path: Path) -> None:
    pool = pool_of_short_form("2xMI250X")
    assert aims_of(recipe(tmp_path), pool) == Aims(objective="fastest")
    for override in ("plan.objective=cheapest", "plan.max_cost=5"):
        with pytest.raises(PlaitError, match="neither the pool nor the catalogue has one for MI250X") as refused:
            aims_of(recipe(tmp_path, override), pool)
        assert refused.value.exit_code == 2


SMALL = ("model.size=125M", "train.sequence=1024", "train.batch_tokens=131072")


def test_where_nothing_meets_the_bounds_the_nearest_choice_is_named(tmp_path: Path) -> None:
    pool = pool_of_short_form("4xT4")
    config = recipe(tmp_path, *SMALL, "train.budget=2B tokens", "plan.max_cost=1", "plan.deadline=1 hour")
    job, aims = pool_job(config, WEB, pool), aims_of(config, pool)
    pricer = PoolPricer(job.config, WEB, job.sized, pool, job.steps)
    with pytest.raises(PlaitError) as refused:
        answer_of(job, pricer, pool, aims)
    text = str(refused.value)
    assert text.startswith("nothing in 4xT4 meets plan.deadline = 1 h 0 min and plan.max_cost = $1.00: the nearest is")
    assert 'write plan.deadline = "' in text and " and plan.max_cost = " in text
    # What it says to write is enough.
    hours, cost = text.split('plan.deadline = "')[1].split(" hours")[0], text.split("plan.max_cost = ")[2].split(",")[0]
    again = recipe(tmp_path, *SMALL, "train.budget=2B tokens", f"plan.max_cost={cost}", f"plan.deadline={hours} hours")
    found = answer_of(job, pricer, pool, aims_of(again, pool))
    assert not missing(found.best, found.aims)


def test_a_budget_of_time_becomes_the_same_work_for_all(tmp_path: Path) -> None:
    pool = pool_of_short_form("4xT4")
    job = pool_job(recipe(tmp_path, *SMALL, "train.budget=2 hours"), WEB, pool)
    assert job.config.train.budget.endswith(" tokens") and job.steps > 0
    assert job.notes[0].startswith("train.budget of 2 h 0 min is a time, but choices are compared by the same work")
    assert pool_job(recipe(tmp_path, *SMALL, "train.budget=20 steps"), WEB, pool).steps == 20


def test_the_answer_in_words(tmp_path: Path) -> None:
    pool = pool_of_short_form("1x4090+2xT4")
    config = recipe(tmp_path, *SMALL, "train.budget=2B tokens", "plan.objective=fastest")
    job, aims = pool_job(config, WEB, pool), aims_of(config, pool)
    pricer = PoolPricer(job.config, WEB, job.sized, pool, job.steps)
    answer = answer_of(job, pricer, pool, aims)
    lines = answer_lines(answer, 110)
    assert lines[1].startswith("take     your RTX 4090: ")
    assert any(line.strip().startswith("· T4 is not used: the best choice with it, ") for line in lines)
    assert any("→  1 × RTX 4090" in line for line in lines)
    assert any("RTX 4090 at $0.29 an hour (OpenRelay, 2026-09-20)" in line for line in lines)


# Models for a budget of money.


def test_differences_that_a_forecast_cannot_tell_are_left_out() -> None:
    found = search(work(), read_cluster("1xT4"))
    error = stated_error(found.workload, found.cluster)

    def forecast(count: int, step_s: float) -> PoolChoice:
        return replace(priced((0, count), step_s)[0], search=found)

    best, as_cheap, cheaper = forecast(4, 1.0), forecast(2, 2 - error), forecast(1, 4 / (1 + 2 * error))
    assert forecast_error(best, as_cheap) == error > 0
    assert shown_choices([best, as_cheap], best) == [best]
    assert shown_choices([best, as_cheap, cheaper], best) == [best, cheaper]
    assert nearest_text(as_cheap, best, (), error) == f"{format_days(as_cheap.wall_s - best.wall_s)} later"
    assert nearest_text(as_cheap, as_cheap, (), error) == "no difference that a forecast can tell"
    assert nearest_text(cheaper, best, (), error).endswith(" less")


def test_predicted_losses_are_those_of_the_laws() -> None:
    losses = predicted_losses(70e9, 1.4e12, 10**15)
    assert losses["Hoffmann 2022"] == pytest.approx(1.69 + 406.4 / 70e9**0.34 + 410.7 / 1.4e12**0.28)
    assert losses["Muennighoff 2023"] == pytest.approx(1.87 + reducible_loss(70e9, 1.4e12, 10**15))
    repeated = predicted_losses(1e9, 20e9, 10**9)
    assert all(repeated[law] > fresh for law, fresh in predicted_losses(1e9, 20e9, 10**15).items())


@pytest.mark.slow
def test_more_money_pays_for_a_larger_model_and_stays_within_it(tmp_path: Path) -> None:
    pool, found = pool_of_short_form("8xH100"), []
    for cost in (20, 1000):
        config = recipe(tmp_path, f"plan.max_cost={cost}", "plan.objective=balanced")
        aims = aims_of(config, pool)
        model = affordable_model(config, WEB, pool, aims)
        job = pool_job(model.config, WEB, pool)
        pricer = PoolPricer(job.config, WEB, job.sized, pool, job.steps)
        best = answer_of(job, pricer, pool, aims).best
        assert best.cost is not None and 0.9 * cost < best.cost <= cost
        assert 8 < model.tokens / model.parameters < 60
        found.append(model)
    assert found[0].parameters < found[1].parameters
    assert max(found[1].losses.values()) < min(found[0].losses.values())


@pytest.mark.parametrize(("cost", "amount"), [("1e-30", "less than one token"), ("1e-9", " tokens")])
def test_money_for_next_to_nothing_is_refused_in_one_sentence(cost: str, amount: str, tmp_path: Path) -> None:
    pool, config = pool_of_short_form("4090"), recipe(tmp_path, f"plan.max_cost={cost}", "plan.objective=balanced")
    with pytest.raises(PlaitError, match=rf"pays for training a \S+ model on .*{amount}, too few to learn from"):
        affordable_model(config, WEB, pool, aims_of(config, pool))


# Spot machines that come and go.


def spot_choices(counts: DeviceCounts) -> list[PoolChoice]:
    """Perfectly parallel T4 of zone a: a step takes 4 s on one."""
    return priced(counts, 4.0 / counts[0]) if counts[0] and not counts[1] else []


EXPLORED = [choice for n in (1, 2, 3, 4) for choice in spot_choices((n, 0))]
FASTEST = Aims(objective="fastest")
HEADER = "minute,zone,device,count\n"
NONE_IN_B = "0,b,T4,0\n"


def simulated(rows: str, explored: Sequence[PoolChoice] = EXPLORED, aims: Aims = FASTEST) -> tuple[float, ...]:
    there = read_availability(HEADER + NONE_IN_B + rows, "file", TWO_ZONES)
    run = simulate_spot_run(TWO_ZONES, explored, spot_choices, spot_choices, there, aims, checkpoint_s=60)
    return run.wall_s, run.cost, run.interruptions, run.replans, run.lost_steps, run.idle_s


def test_machines_that_stay_take_what_was_planned() -> None:
    assert simulated("0,a,T4,4\n") == pytest.approx((3600, 4 * 0.25, 0, 0, 0, 0))


def test_machines_that_go_cost_what_was_not_saved_and_a_restart() -> None:
    # 1,830 steps in 1,830 s on four, of which 1,800 were saved; then 600 s of restart and 1,800 steps on two.
    wall, cost, *counts = simulated("0,a,T4,4\n30.5,a,T4,2\n100000,a,T4,2\n")
    assert wall == pytest.approx(1830 + 600 + 1800 * 2)
    assert cost == pytest.approx((1830 * 4 + (600 + 3600) * 2) * 0.25 / 3600)
    assert counts == [1, 1, 30, 0]


def test_machines_that_come_are_taken_where_that_is_worth_a_restart() -> None:
    wall, *_, replans, lost, idle = simulated("0,a,T4,1\n60,a,T4,4\n100000,a,T4,4\n")
    assert (replans, lost, idle) == (1, 0, 0)
    assert wall == pytest.approx(3600 + 600 + 3600 - 900)
    short = "".join(f"{minute},a,T4,{3 + minute % 20 // 10}\n" for minute in range(0, 1000, 10))
    assert simulated(short)[3] == 0  # a quarter of ten minutes is less than a restart


def test_without_machines_nothing_is_paid_and_the_file_begins_again() -> None:
    wall, cost, *_, idle = simulated("0,a,T4,4\n30,a,T4,0\n60,a,T4,0\n")
    assert idle > 0 and wall > 3600 + idle
    assert cost == pytest.approx((wall - idle) * 4 * 0.25 / 3600)
    with pytest.raises(PlaitError, match="the run never ends"):
        simulated("0,a,T4,0\n30,a,T4,0\n")


def test_a_generated_day_is_the_same_for_a_seed_and_within_the_pool() -> None:
    one = generated_availability(1, TWO_ZONES)
    assert one == generated_availability(1, TWO_ZONES) != generated_availability(2, TWO_ZONES)
    assert len(one.states) == 24 and one.period_s == 86400
    assert all(1 <= count <= 4 for state in one.states for count in state)
    assert read_availability(HEADER + "0,a,T4,3\n0,b,T4,9\n", "file", TWO_ZONES).states == ((3, 4),)
    assert read_availability(HEADER + "0,a,T4,3\n0,b,T4,9\n", "file", TWO_ZONES).period_s == inf


BAD = {
    "minute,zone\n": "must begin with the line minute,zone,device,count",
    HEADER + "0,a,T4,4\n": "does not mention T4 in zone b at all; add a line for minute 0",
    HEADER + "5,a,T4,4\n0,b,T4,4\n": "does not mention T4 in zone a before minute 5",
    HEADER + "0,a,T4,-1\n": "line 2: minute = 0 and count = -1 must not be negative",
    HEADER + "-3,a,T4,1\n": "must not be negative",
    HEADER + "nan,a,T4,1\n": "must not be negative",
    HEADER + "0,a,T4,some\n": "minute and count must be numbers",
    HEADER + "0,a,T4\n": "line 2 has 3 values",
    HEADER.replace("\n", "\r") + "0,a,T4,1\r0,c,T4,1\r": "line 3: the pool has no T4 in zone c",
    # Python's csv has one limit for all readers of a process, so this may be refused as a field or as a row.
    HEADER + "0,a," + 200_000 * "T": "write minute,zone,device,count",
    HEADER + "0,c,T4,1\n": "the pool has no T4 in zone c",
    HEADER + "0,a,V100,1\n": "the pool has no V100 SXM2 in zone a",
    HEADER + "0,a,T4,1\n0,a,T4,2\n": "line 3: minute 0 of this device appears twice",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_bad_availability_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(PlaitError) as refused:
        read_availability(text, "there.csv", TWO_ZONES)
    assert BAD[text] in str(refused.value) and "\n" not in str(refused.value)
