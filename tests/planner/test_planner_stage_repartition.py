"""When layers move between a pipeline's stages: for what lasts, soon; for noise, spikes and equal machines, never."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plait.layout import Layout
from plait.planner.plan import HostShare, Plan
from plait.planner.rebalancing.batch_rebalance import StepObservation, why_rebalancing_cannot_help
from plait.planner.rebalancing.stage_repartition import StageCosts, repartition, stage_costs_of
from tests.commands.other_values import base_recipe
from tests.planner.machines import LAPTOP, corpus, planned
from tests.plans import changed

LOOKUP, HEAD = 0.1, 0.5
MICROS = 32


def stages(count: int) -> StageCosts:
    return StageCosts(
        names=tuple(f"host {chr(ord('a') + stage)}" for stage in range(count)),
        ranks=tuple((stage,) for stage in range(count)),
        embedding_cost_in_layers=LOOKUP,
        head_cost_in_layers=HEAD,
        micros=MICROS,
    )


def steps_of(
    layers: Sequence[int], speeds: Sequence[float], count: int, seed: int, sigma: float
) -> list[StepObservation]:
    """Steps as real ones are: lognormal noise, and one stage in a hundred that takes two or three times as long."""
    draw, found = random.Random(seed), list[StepObservation]()
    work = stages(len(layers)).work(layers)
    for _ in range(count):
        compute = [
            done / speed * draw.lognormvariate(0, sigma) * (draw.uniform(2, 3) if draw.random() < 0.01 else 1)
            for done, speed in zip(work, speeds, strict=True)
        ]
        found.append(
            StepObservation(compute_s=tuple(compute), step_s=(sum(compute) + (MICROS - 1) * max(compute)) / MICROS)
        )
    return found


def plan_of(folder: Path, **layout: object) -> Plan:
    plan = planned(base_recipe(folder), corpus(1_500_000, 1), LAPTOP)
    return replace(
        plan,
        placement=replace(plan.placement, layout=Layout(**layout)),
        cadence=replace(plan.cadence, balance_every_steps=50),
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [(3, 3), (11, 11), (6, 6, 5, 5)])
def test_equal_machines_keep_their_layers_for_a_thousand_steps(layers: tuple[int, ...]) -> None:
    most = (sum(layers),) * len(layers)
    for seed in range(40):
        steps = steps_of(layers, [1.0] * len(layers), 1000, seed, 0.08)
        for end in range(20, 1001, 20):
            assert repartition(layers, steps[max(0, end - 100) : end], stages(len(layers)), most) is None, (
                f"seed {seed}"
            )


@pytest.mark.parametrize(
    ("before", "speeds", "after"),
    [
        ((17, 5), (1.0, 0.4), (16, 6)),  # 16, and 6.5 / 0.4 = 16.25, in place of 17
        ((11, 11), (1.0, 0.4), (16, 6)),
        ((8, 8, 3, 3), (1.0, 1.0, 0.25, 0.5), (8, 8, 2, 4)),
        ((5, 5, 6, 6), (1.0, 1.0, 0.25, 0.5), (8, 8, 2, 4)),
        ((8, 4, 2, 8), (1.0, 1.0, 1.0, 1.0), (6, 6, 5, 5)),
    ],
)
def test_layers_go_where_the_last_stage_is_done_as_early_as_can_be(
    before: tuple[int, ...], speeds: tuple[float, ...], after: tuple[int, ...]
) -> None:
    most = (sum(before),) * len(before)
    for seed in range(10):
        change = repartition(before, steps_of(before, speeds, 20, seed, 0.01), stages(len(before)), most)
        assert change is not None and sum(change.shares) == sum(before)
        work = stages(len(before)).work
        last = [max(w / s for w, s in zip(work(cut), speeds, strict=True)) for cut in (change.shares, after)]
        assert last[0] <= 1.02 * last[1], (seed, change.shares)
        assert change.gain == pytest.approx(
            1 - trip(work(change.shares), speeds) / trip(work(before), speeds), abs=0.03
        )


def trip(work: Sequence[float], speeds: Sequence[float]) -> float:
    seconds = [done / speed for done, speed in zip(work, speeds, strict=True)]
    return sum(seconds) + (MICROS - 1) * max(seconds)


def test_what_does_not_last_or_is_not_worth_it_moves_nothing() -> None:
    most, two = (22, 22), stages(2)
    slow, usual = (steps_of((11, 11), speeds, 10, 1, 0.01) for speeds in ((1.0, 0.4), (1.0, 1.0)))
    assert repartition((11, 11), [*usual, *slow], two, most) is None  # half of the window only
    assert repartition((11, 11), [*slow, *slow], two, most) is not None
    assert repartition((11, 11), slow, two, most) is None  # too few steps
    # 16 and 6 are best for both; the same cut again is no change.
    assert repartition((16, 6), steps_of((16, 6), (1.0, 0.4), 20, 1, 0.01), two, most) is None


def test_no_stage_gets_more_than_it_can_hold() -> None:
    steps = steps_of((11, 11), (1.0, 0.4), 20, 2, 0.01)
    change = repartition((11, 11), steps, stages(2), (14, 22))
    assert change is not None and change.shares == (14, 8)
    assert repartition((11, 11), steps, stages(2), (11, 11)) is None
    for most in ((3, 11), (0, 500)):  # there is not even room for what is there, or for a layer to arrive
        assert repartition((11, 11), steps, stages(2), most) is None


def test_the_reason_names_the_host_and_the_layers() -> None:
    change = repartition((11, 11), steps_of((11, 11), (1.0, 0.4), 20, 3, 0.01), stages(2), (22, 22))
    assert change is not None
    assert change.reason == "host b is 2.5 times slower than host a: its share goes from 11 to 6 of 22 layers"


def test_which_pipelines_can_be_cut_anew(tmp_path: Path) -> None:
    lone = plan_of(tmp_path, pipeline=2, stage_layers=(1, 1))
    hosts = (HostShare(name="old", workers=1, threads=1), HostShare(name="new", workers=1, threads=1))
    found = stage_costs_of(changed(lone, hosts=hosts))
    assert found is not None and found.names == ("host old", "host new") and found.ranks == ((0,), (1,))
    assert found.head_cost_in_layers > 0 and found.micros == -(
        -lone.job.batch_sequences // lone.placement.micro_sequences
    )
    assert why_rebalancing_cannot_help(lone) is None
    two_and_one = (replace(hosts[0], workers=2), hosts[1])
    assert [changed(lone, hosts=two_and_one).workers_beside(rank) for rank in range(3)] == [2, 2, 1]
    assert lone.workers_beside(1) == 2
    wide = stage_costs_of(plan_of(tmp_path, pipeline=2, stage_layers=(1, 1), tensor=2))
    assert wide is not None and wide.ranks == ((0, 1), (2, 3)) and wide.names == ("ranks 0 and 1", "ranks 2 and 3")
    interleaved = plan_of(tmp_path, pipeline=2, stage_layers=(1, 1, 1, 1), schedule="interleaved")
    assert stage_costs_of(interleaved) is None and "cut again" in (why_rebalancing_cannot_help(interleaved) or "")
    assert stage_costs_of(plan_of(tmp_path, pipeline=2, stage_layers=(1, 1), replicate=2)) is None  # its shares follow
    assert stage_costs_of(plan_of(tmp_path, tensor=2)) is None


def test_the_ends_of_a_pipeline_cost_what_they_were_priced_at(tmp_path: Path) -> None:
    lone = plan_of(tmp_path, pipeline=2, stage_layers=(1, 1))
    assert lone.forecast is not None and lone.forecast.head_cost_in_layers is not None
    priced = replace(lone.forecast, embedding_cost_in_layers=0.25, head_cost_in_layers=0.4)
    found, untold = stage_costs_of(replace(lone, forecast=priced)), stage_costs_of(replace(lone, forecast=None))
    assert found is not None and found.work((8, 1)) == [8.25, 1.4]
    by_weights = replace(lone.forecast, head_cost_in_layers=None)  # a plan of an earlier version
    assert untold is not None and untold == stage_costs_of(replace(lone, forecast=by_weights))
    assert untold.embedding_cost_in_layers == 0 and untold.head_cost_in_layers > 0
