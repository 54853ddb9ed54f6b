"""Leaving devices out is a layout, the simplest: chosen where a step over all of them would take no less."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.commands.planning.plan_report import make_plan_report, plan_report_text
from plait.machines.cluster import read_cluster
from plait.model.sizes import named_shape
from plait.planner.derive.resources import FixedWorkers, Resources, on_paper
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.resolve.resolve import draft
from plait.planner.search.host_choice import natural_subsets
from tests.matrix import few_fast
from tests.planner.hosts import probed
from tests.planner.machines import EIGHT_H100, PEAK_FLOPS, PLAYS, recipe

SMALL = ("model.size=11M", "train.sequence=256", "train.batch_tokens=16384", "train.budget=500 steps")


def nodes_tried(cluster: str) -> list[tuple[tuple[int, ...], int]]:
    return [(one.nodes, one.cluster.n_devices) for one in natural_subsets(work(), read_cluster(cluster), PLAIT_PROFILE)]


def work() -> Workload:
    shape = named_shape("11M", vocabulary=4096, sequence=256)
    return workload_of(shape, sequence=256, batch_sequences=64, precision="bf16")


@pytest.mark.parametrize("cluster", ["1x4090+1x3080@1G", "1x3080+1x4090@1G"])
def test_a_machine_alone_is_chosen_where_both_together_take_longer(tmp_path: Path, cluster: str) -> None:
    report = make_plan_report(recipe(tmp_path, *SMALL), on_paper(read_cluster(cluster)), top=3)
    left = report.search.left_out
    assert left is not None
    assert report.search.cluster.n_devices == report.plan.world_size == 1
    assert report.search.chosen_step_s < left.whole.best_step_s
    text = " ".join(plan_report_text(report).split())
    assert text.startswith(f"plan 11.5M parameters on 1 × RTX 4090 of {cluster}")
    assert "leaving out 1 × RTX 3080" in text
    assert "left out: 1 × RTX 3080; a step over all devices would take" in text and "times as long" in text
    assert "between the machines it would be worth using all of them" in text


@pytest.mark.parametrize("cluster", few_fast(["2x(8xA100)+400G", "8xH100", "1x4090+1x3090+400G"], "8xH100"))
def test_all_devices_are_used_where_they_make_a_step_shorter(cluster: str, tmp_path: Path) -> None:
    config = recipe(tmp_path, "model.size=350M", "train.budget=7B tokens")
    report = make_plan_report(config, on_paper(read_cluster(cluster)), top=3)
    assert report.search.left_out is None and report.plan.world_size == read_cluster(cluster).n_devices


def test_of_equal_devices_fewer_are_taken(tmp_path: Path) -> None:
    """Two equal machines and a slow network; eight GPUs and a batch of one sequence."""
    two = make_plan_report(recipe(tmp_path, *SMALL), on_paper(read_cluster("2x(1x4090)@1G")), top=3)
    assert two.plan.world_size == 1
    single = recipe(tmp_path, "model.size=1M", "train.sequence=256", "train.batch_tokens=256", "train.budget=9 steps")
    resources = Resources(machine=EIGHT_H100, peak_flops=PEAK_FLOPS[EIGHT_H100])
    drafted = draft(single, PLAYS, resources, recipe_hash="")
    assert drafted.plan.world_size == 1 and drafted.plan.placement.host_order == ()
    assert drafted.plan.machines.peak_flops == pytest.approx(PEAK_FLOPS[EIGHT_H100] / 8)
    assert "left out: 7 × " in drafted.layouts[0].reasons[0]


def test_what_somebody_started_or_named_is_not_left_out(tmp_path: Path) -> None:
    named = recipe(tmp_path, *SMALL, "layout.replicate=2")
    assert make_plan_report(named, on_paper(read_cluster("1x4090+1x3080@1G")), top=0).plan.world_size == 2
    every = recipe(tmp_path, *SMALL, "layout.devices=all")
    assert make_plan_report(every, on_paper(read_cluster("1x4090+1x3080@1G")), top=0).plan.world_size == 2
    started = Resources(
        machine=EIGHT_H100,
        peak_flops=PEAK_FLOPS[EIGHT_H100],
        fixed_workers=FixedWorkers(workers=8, threads=1),
    )
    few = recipe(tmp_path, "model.size=1M", "train.sequence=256", "train.batch_tokens=2048", "train.budget=9 steps")
    assert draft(few, PLAYS, started, recipe_hash="").plan.world_size == 8


def test_measured_hosts_are_left_out_by_name_and_the_first_stays(tmp_path: Path) -> None:
    config = recipe(tmp_path, "model.size=1M", "train.sequence=256", "train.batch_tokens=4096", "train.budget=9 steps")
    cluster = probed(1.0, 0.05, rate=1e6)
    outline = draft(config, PLAYS, on_paper(cluster), recipe_hash="")
    assert outline.plan.placement.host_order == (0,) and outline.plan.world_size == 1
    assert outline.layouts[0].reasons[0].startswith("left out: b; ")
    assert all(one.nodes[0] == 0 for one in natural_subsets(work(), probed(0.1, 1.0, 1.0), PLAIT_PROFILE))
    write_plan(outline.plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == outline.plan


def test_the_natural_subsets() -> None:
    assert nodes_tried("1x4090+1x3080@1G") == [((0,), 1), ((1,), 1)]
    assert nodes_tried("1x3080+1x4090@1G") == [((1,), 1), ((0,), 1)]
    assert nodes_tried("8xH100") == [((0,), 1), ((0,), 2), ((0,), 4)]
    assert nodes_tried("2x(8xA100)+400G") == [((0,), 8), ((0,), 1), ((0,), 2), ((0,), 4)]
    many = nodes_tried("64xH100")
    assert [nodes for nodes, count in many if count >= 8] == [tuple(range(2**k)) for k in range(3)]
