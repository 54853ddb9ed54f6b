"""[run] devices, workers and threads: what they restrict of a plan, and what contradicts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.machines.cluster import read_cluster
from plait.planner.derive.resources import FixedWorkers, Resources, on_paper
from plait.planner.resolve.request import request_of
from plait.planner.resolve.resolve import draft
from plait.planner.resolve.worker_layouts import choose
from tests.planner.machines import EIGHT_H100, LAPTOP, PEAK_FLOPS, PLAYS, drafted, planned, recipe

SMALL = ("model.size=1M", "train.budget=100 steps")


def test_workers_and_threads_are_those_of_the_recipe_and_said(tmp_path: Path) -> None:
    outline = drafted(recipe(tmp_path, *SMALL, "run.workers=2", "run.threads=3"), PLAYS, LAPTOP)
    assert [(one.workers, one.placement.threads) for one in outline.layouts] == [(2, 3)]
    assert "only layouts of 2 workers: run.workers = 2" in outline.plan.reasons
    assert "3 threads for each worker: run.threads = 3" in outline.plan.reasons
    plan = planned(recipe(tmp_path, *SMALL, "run.threads=2"), PLAYS, LAPTOP)
    assert plan.placement.threads == 2 and plan.world_size * 2 <= LAPTOP.cores


def test_half_the_cores_are_half_the_arithmetic(tmp_path: Path) -> None:
    half, whole = (
        drafted(recipe(tmp_path, *SMALL, "run.workers=1", f"run.threads={threads}"), PLAYS, LAPTOP)
        for threads in (4, 8)
    )
    assert (
        half.plan.machines.peak_flops == PEAK_FLOPS[LAPTOP] / 2 and whole.plan.machines.peak_flops == PEAK_FLOPS[LAPTOP]
    )
    assert half.plan.forecast and whole.plan.forecast
    assert half.plan.forecast.step_s > 1.4 * whole.plan.forecast.step_s


def test_the_plan_names_the_gpus(tmp_path: Path) -> None:
    machine = replace(EIGHT_H100, devices=2, gpus=(5, 3))
    plan = planned(recipe(tmp_path, *SMALL, "run.devices=[5, 3]"), PLAYS, machine)
    assert plan.machines.gpus == (5, 3) and [plan.gpu_of(rank) for rank in (0, 1)] == [5, 3]
    assert "only GPU 5, 3 of this machine (run.devices, run.workers)" in plan.reasons
    everything = planned(recipe(tmp_path, *SMALL), PLAYS, EIGHT_H100)
    assert everything.machines.gpus == () and everything.gpu_of(7) == 7


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["run.workers=9"], "run.workers = 9 are more than this machine has, 8 cores"),
        (["run.threads=16"], "run.threads = 16 are more than this machine has, 8 cores"),
        (["run.workers=2", "layout.replicate=4"], "needs 4 workers, and run.workers = 2"),
        (["run.threads=3", "layout.replicate=4"], "want 12 cores, and this machine has 8; choose at most 2"),
    ],
)
def test_what_contradicts_the_machine_or_the_layout_is_refused(tmp_path: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(PlaitError, match=told):
        drafted(recipe(tmp_path, *SMALL, *overrides), PLAYS, LAPTOP)


def test_torchruns_workers_are_not_for_the_recipe_to_choose(tmp_path: Path) -> None:
    resources = Resources(machine=LAPTOP, peak_flops=4e11, fixed_workers=FixedWorkers(workers=4, threads=1))
    with pytest.raises(PlaitError, match="the launcher started 4 workers, and run"):
        request_of(recipe(tmp_path, *SMALL, "run.workers=2"), PLAYS, resources)
    (option,) = request_of(recipe(tmp_path, *SMALL, "run.threads=2"), PLAYS, resources).options
    assert (option.cluster.n_devices, option.threads) == (4, 2)


def test_on_paper_they_change_nothing_and_that_is_said(tmp_path: Path) -> None:
    paper = on_paper(read_cluster("8xH100"))
    plain, named = (
        draft(recipe(tmp_path, *SMALL, *more), PLAYS, paper, recipe_hash="") for more in ((), ("run.devices=0,1",))
    )
    assert choose(plain.layouts).layout == choose(named.layouts).layout
    assert "run.devices changes nothing here: they are about real machines" in named.plan.reasons
