"""How often the state is copied into memory, what the copies take, and when there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.model.shape import parameter_count
from plait.planner.memory.state_copies import COPIES, COPIES_SHARE, COPY_RATE, copy_bytes, with_copies
from plait.planner.plan import Plan
from plait.recipe.schema import RecoverSection
from plait.units import Every
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe
from tests.plans import changed

STEPS = ("train.budget=100 steps",)
TINY = ("model.layers=2", "model.width=32", "model.heads=2", "train.sequence=16", "train.batch_tokens=112")
AUTO = RecoverSection()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return planned(recipe(tmp_path, *STEPS, *TINY, "layout.replicate=2", "optimizer.kind=adamw"), PLAYS, LAPTOP)


def test_a_plan_says_how_often_and_how_much(plan: Plan) -> None:
    state = 12 * parameter_count(plan.job.shape)
    assert plan.cadence.copy_bytes == COPIES * copy_bytes(plan, 1) and copy_bytes(plan, 1) == state // 2
    assert plan.cadence.copy_every.unit == "steps" and plan.cadence.copy_every.cost_share == 0.02
    (reason,) = (one for one in plan.reasons if "recover.state_every" in one)
    assert reason.startswith("each worker's state is copied into memory that outlives it, every ")


def test_the_forecast_is_the_fewest_steps_that_cost_the_copies_share(plan: Plan) -> None:
    copy_s = copy_bytes(plan, 1) / COPY_RATE
    every = with_copies(AUTO, replace(plan, step_s=copy_s / COPIES_SHARE / 4.5), 1)[0].cadence.copy_every
    assert every == Every(5, "steps", 0.02)
    assert with_copies(AUTO, replace(plan, step_s=1e9), 1)[0].cadence.copy_every.value == 1


def test_each_host_holds_what_its_own_workers_need(plan: Plan) -> None:
    four = replace(plan, placement=replace(plan.placement, layout=replace(plan.placement.layout, replicate=4)))
    assert copy_bytes(four, 1) * 4 == copy_bytes(four, 2) * 2, "each host the whole state"
    tensor = replace(
        plan, placement=replace(plan.placement, layout=replace(plan.placement.layout, replicate=1, tensor=4))
    )
    assert copy_bytes(tensor, 1) == copy_bytes(tensor, 2), "each host its workers' parts alone"


@pytest.mark.parametrize("asked", [RecoverSection(mode="never"), RecoverSection(state_every="never")])
def test_who_wants_none_gets_none_and_saving_gets_its_share(plan: Plan, tmp_path: Path, asked: RecoverSection) -> None:
    without, reason = with_copies(asked, plan, 1)
    assert without.cadence.copy_every == Every(0, "steps") and without.cadence.copy_bytes == 0 and reason == ""
    override = "recover.mode=never" if asked.mode == "never" else "recover.state_every=never"
    config = recipe(tmp_path, *STEPS, *TINY, "layout.replicate=2", override)
    assert planned(config, PLAYS, LAPTOP).cadence.checkpoint_every.cost_share == 0.02
    assert plan.cadence.checkpoint_every.cost_share == 0.01


def test_a_number_is_obeyed_without_a_reason(plan: Plan) -> None:
    chosen, reason = with_copies(RecoverSection(state_every=7), plan, 1)
    assert chosen.cadence.copy_every == Every(7, "steps") and reason == "" and chosen.cadence.copy_bytes > 0


def test_what_does_not_fit_is_not_copied_and_the_plan_says_so(plan: Plan) -> None:
    assert plan.forecast is not None
    memory = 2 * plan.forecast.bytes_per_device + 2 * COPIES * copy_bytes(plan, 1) - 1
    small = replace(
        plan, machines=replace(plan.machines, fingerprint={**plan.machines.fingerprint, "memory_bytes": memory})
    )
    without, reason = with_copies(AUTO, small, 1)
    assert without.cadence.copy_every.value == 0 and reason.startswith(
        "the state is not copied into memory: 3 copies need"
    )
    enough = changed(small, fingerprint={**plan.machines.fingerprint, "memory_bytes": memory + 1})
    assert with_copies(AUTO, enough, 1)[0].cadence.copy_every.value > 0
