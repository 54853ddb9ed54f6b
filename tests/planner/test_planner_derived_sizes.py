"""Sizes that a recipe leaves open: batches that divide well, the same on any number of devices, and models of a size
that the time budget's own forecast bears out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from plait.commands.planning.plan_report import make_plan_report
from plait.errors import PlaitError
from plait.machines.cluster import read_cluster
from plait.model.shape import parameter_count
from plait.model.sizes import MODEL_SIZES
from plait.planner.derive.model_size import CorpusFacts
from plait.planner.derive.published_rules import (
    compute_optimal_parameters,
    divisible_batch,
    reducible_loss,
    useful_parameters,
    useful_tokens,
)
from plait.planner.derive.resources import Resources, on_paper
from plait.planner.plan import Plan
from plait.planner.resolve.request import request_of
from plait.planner.resolve.resolve import draft, settle
from plait.planner.resolve.worker_layouts import choose
from plait.recipe.schema import RunConfig
from plait.units import parse_amount
from tests.matrix import few_fast, slow
from tests.planner.machines import LAPTOP, PEAK_FLOPS, WEB, corpus, recipe

MACHINES: Mapping[str, Callable[[], Resources]] = {
    "laptop": lambda: Resources(machine=LAPTOP, peak_flops=PEAK_FLOPS[LAPTOP]),
    "4090": lambda: on_paper(read_cluster("4090")),
    "8xH100": lambda: on_paper(read_cluster("8xH100")),
    "64xH100": lambda: on_paper(read_cluster("64xH100")),
}
SMALLEST_PARAMETERS = 2.5 * 10**6
"""Of the smallest named size with the larger vocabulary."""


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


@pytest.mark.parametrize("flops", [1e12, 1e15, 1e18, 1e21, 1e24])
def test_fresh_text_is_shared_out_at_twenty_tokens_a_parameter(flops: float) -> None:
    parameters = compute_optimal_parameters(flops=flops, unique_tokens=10**15)
    assert flops / (6 * parameters) / parameters == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("unique", [20_000, 10**6, 10**9, 10**12])
def test_no_budget_makes_a_model_larger_than_its_text_can_train(unique: int) -> None:
    sizes = [compute_optimal_parameters(flops=10.0**power, unique_tokens=unique) for power in range(9, 30)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == useful_parameters(unique) < unique


@pytest.mark.parametrize("machine", few_fast(["laptop", "4090", "8xH100"], "laptop", "8xH100"))
@pytest.mark.parametrize("budget", ["4 minutes", "1 hour", "10 days"])
@pytest.mark.parametrize("kilobytes", few_fast([50, 750, 5_000, 500_000, 50_000_000], 50, 5_000))
def test_a_size_that_plait_chooses_is_never_refused(tmp_path: Path, kilobytes: int, budget: str, machine: str) -> None:
    text = corpus(kilobytes * 250, max(1, kilobytes // 100), 1024 if kilobytes < 1000 else 32768)
    config, machines = recipe(tmp_path, f"train.budget={budget}"), MACHINES[machine]()
    found = draft(config, text, machines, recipe_hash="")
    assert parameter_count(found.plan.job.shape) <= max(text.train_tokens, SMALLEST_PARAMETERS)


@pytest.mark.parametrize(
    ("machine", "kilobytes", "budget"),
    [
        slow(("laptop", 5_000, "4 minutes")),
        ("4090", 500_000, "1 minute"),
        slow(("64xH100", 50_000_000, "5 minutes")),
    ],
)
def test_no_other_size_would_learn_more_at_its_own_forecast(
    tmp_path: Path, machine: str, kilobytes: int, budget: str
) -> None:
    """Small models, and those on many GPUs, are far from the usual share of the peak."""
    text, machines = corpus(kilobytes * 250, 100, 4096 if kilobytes < 50_000 else 32768), MACHINES[machine]()
    seconds = parse_amount(budget).value

    def plan_and_loss(*overrides: str) -> tuple[Plan, float]:
        plan = draft(recipe(tmp_path, f"train.budget={budget}", *overrides), text, machines, recipe_hash="").plan
        assert plan.forecast is not None
        assert overrides or any("FLOP/s as forecast)" in reason for reason in plan.reasons)
        tokens = min(seconds * plan.batch_tokens / plan.forecast.step_s, useful_tokens(text.train_tokens))
        return plan, reducible_loss(parameter_count(plan.job.shape), tokens, text.train_tokens)

    chosen, loss = plan_and_loss()
    for size in MODEL_SIZES:
        try:
            other, other_loss = plan_and_loss(f"model.size={size}")
        except PlaitError:
            continue
        useful = parameter_count(other.job.shape) <= useful_parameters(text.train_tokens)
        assert not useful or other_loss > 0.98 * loss, (size, chosen.job.shape)


def test_a_size_that_does_not_go_with_the_recipe_is_no_candidate(tmp_path: Path) -> None:
    """The next smaller size has two layers."""
    config = recipe(tmp_path, "train.budget=4 minutes", "layout.pipeline=4")
    found = draft(config, corpus(1_500_000, 1, 4096), on_paper(read_cluster("4x4090")), recipe_hash="")
    assert found.plan.job.shape.layers >= 4


def test_the_largest_model_that_fits_is_taken_where_the_best_one_does_not(tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.budget=300 days")
    found = draft(config, WEB, on_paper(read_cluster("4090")), recipe_hash="")
    assert parameter_count(found.plan.job.shape) == pytest.approx(1e9, rel=0.1)
    [reason] = [note for note in found.request.notes if note.startswith("model ")]
    assert "the largest that fits (no layout holds 1.3B)" in reason


def test_a_size_that_was_asked_for_is_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match="fits no layout of"):
        draft(recipe(tmp_path, "model.size=13B"), WEB, on_paper(read_cluster("4090")), recipe_hash="")


def test_a_small_text_ends_a_run_before_its_time_is_over(tmp_path: Path) -> None:
    config, text = recipe(tmp_path, "train.budget=1 hour"), corpus(300_000, 1)
    report = make_settled(config, text)
    job = report.job
    assert job.ends_with_its_text
    assert job.steps * job.batch_tokens == pytest.approx(16.4 * text.train_tokens, rel=0.02)
    [reason] = [one for one in report.reasons if "this text is small" in one]
    assert "16 passes, " in reason and "training for 1 h 0 min would only memorise it" in reason


def test_the_text_ends_no_run_whose_size_was_asked_for(tmp_path: Path) -> None:
    job = make_settled(recipe(tmp_path, "train.budget=1 hour", "model.size=1M"), corpus(300_000, 1)).job
    assert job.most_tokens is None and job.steps * job.batch_tokens > 20 * 300_000


def make_settled(config: RunConfig, text: CorpusFacts) -> Plan:
    found = draft(config, text, on_paper(read_cluster("4090")), recipe_hash="")
    return settle(config, found, [choose(found.layouts)])


def test_named_sizes_keep_their_model(tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.budget=5 minutes", "model.size=50M")
    few, many = (make_plan_report(config, on_paper(read_cluster(f"{n}xH100")), top=0).plan for n in (1, 8))
    assert few.job.shape == many.job.shape
