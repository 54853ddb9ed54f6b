"""Sizes that a recipe leaves open: batches that divide well, the same on any number of devices, and models of a size
that the time budget's own forecast bears out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.commands.planning.plan_report import make_plan_report
from plait.machines.cluster import read_cluster
from plait.model.shape import parameter_count
from plait.planner.derive.published_rules import EXPECTED_MFU, divisible_batch
from plait.planner.derive.resources import on_paper
from plait.planner.resolve.request import request_of
from tests.planner.machines import WEB, recipe


@pytest.mark.parametrize(
    ("usual", "taken"),
    [(912, 1024), (800, 768), (896, 1024), (360, 384), (208, 192), (7, 8), (5, 6), (3.4, 3), (1, 1), (0.2, 1)],
)
def test_a_derived_batch_is_a_multiple_of_a_power_of_two(usual: float, taken: int) -> None:
    assert divisible_batch(usual) == taken


def test_a_derived_batch_stays_near_what_the_rules_say() -> None:
    for usual in range(1, 5000):
        taken = divisible_batch(usual)
        unit = taken & -taken
        assert 4 / 5 <= taken / usual <= 6 / 5 and taken <= 3 * unit, usual


@pytest.mark.parametrize("overrides", [("model.size=7B",), ("train.budget=20B tokens",), ("train.budget=4000 steps",)])
def test_the_number_of_devices_never_changes_a_derived_batch(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = recipe(tmp_path, *overrides)
    one = read_cluster("1xH100")
    [node] = one.islands
    clusters = [
        replace(one, islands=(replace(node, nodes=count),)) for count in (*range(1, 17), *range(95, 4096, 500), 4096)
    ]
    batches = {request_of(config, WEB, on_paper(cluster)).job.batch_sequences for cluster in clusters}
    assert len(batches) == 1
    if overrides == ("model.size=7B",):
        assert batches == {1024}


def test_a_time_budget_is_sized_by_the_rate_that_the_plan_itself_forecasts(tmp_path: Path) -> None:
    """Small models on many GPUs are far from the usual share of the peak."""
    config = recipe(tmp_path, "train.budget=5 minutes")
    report = make_plan_report(config, on_paper(read_cluster("64xH100")), top=0)
    plan, forecast = report.plan, report.plan.forecast
    assert forecast is not None and plan.machines.peak_flops is not None
    trained = 6 * parameter_count(plan.job.shape) * plan.batch_tokens / forecast.step_s
    assert trained < EXPECTED_MFU * plan.machines.peak_flops / 2, "else this test shows nothing"
    wanted = 20 * parameter_count(plan.job.shape) ** 2 * 6 / trained
    assert wanted == pytest.approx(300, rel=0.7), "seconds for 20 tokens a parameter"
    [reason] = [note for note in report.notes if note.startswith("model ")]
    assert "FLOP/s as forecast)" in reason


def test_named_sizes_keep_their_model(tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.budget=5 minutes", "model.size=50M")
    few, many = (make_plan_report(config, on_paper(read_cluster(f"{n}xH100")), top=0).plan for n in (1, 8))
    assert few.job.shape == many.job.shape
