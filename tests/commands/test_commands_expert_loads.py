"""How unequal experts' loads were is measured by a run, kept, and taken by the next plan; else it is assumed."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from plait.commands.monitoring.finish import finish_run
from plait.machines.cluster import read_cluster
from plait.model.parts.mixture import MixtureShape
from plait.planner.problem.workload import Workload
from plait.planner.resolve.request import request_of
from plait.probing.calibration_store import read_expert_load, store_expert_load
from plait.probing.survey import resources_on_paper
from plait.report.metrics import StepReport
from plait.run_folder import RunFolder, RunTotals
from plait.screen.terminal import TerminalScreen
from plait.working_folder import WorkingFolder
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe

MIXTURE = ("model.size=1M", "model.experts=8", "layout.replicate=2", "train.budget=20 steps")
LOADS = [4.0 - 0.1 * step for step in range(20)]
"""Of 20 steps: 4 at the first, 2.1 at the last, 2.55 in the middle of the second half."""


def finished(here: Path, loads: list[float]) -> MixtureShape:
    """Conclude a run of these loads, and return its mixture."""
    plan = planned(recipe(here, *MIXTURE), PLAYS, LAPTOP)
    folder = RunFolder(here / "run")
    folder.path.mkdir(exist_ok=True)
    steps = [
        StepReport(
            step=step, tokens=100 * step, loss=3.0, grad_norm=1.0, lr=1e-3, step_s=1.0, tokens_per_s=100.0, mfu=None,
            data_wait_s=0.0, expert_load_max=load,
        )
        for step, load in enumerate(loads, 1)
    ]  # fmt: skip
    folder.metrics.write_text("".join(one.to_line() for one in steps))
    folder.write_totals(RunTotals(wall_s=30.0, device_s=60.0, peak_tensor_bytes=(10**8,), peak_rss_bytes=(5 * 10**8,)))
    screen = TerminalScreen(Console(file=StringIO(), width=400))
    finish_run(recipe(here, *MIXTURE), folder, plan, 0, screen, working=WorkingFolder(here))
    assert plan.job.shape.mixture is not None
    return plan.job.shape.mixture


def workload(here: Path, cluster: str = "2x(1xdesktop)@1G") -> Workload:
    config = recipe(here, *MIXTURE)
    return request_of(config, PLAYS, resources_on_paper(read_cluster(cluster), WorkingFolder(here))).workload


def test_a_run_measures_what_the_next_plan_takes(tmp_path: Path) -> None:
    assert (workload(tmp_path).expert_load, workload(tmp_path).expert_load_from) == (1.25, "bias")
    mixture = finished(tmp_path, LOADS)
    assert read_expert_load(mixture, WorkingFolder(tmp_path)) == pytest.approx(2.55)
    assert workload(tmp_path).expert_load == pytest.approx(2.55)
    assert workload(tmp_path, "2xH100").expert_load_from == "measured"


def test_a_short_run_measures_nothing(tmp_path: Path) -> None:
    mixture = finished(tmp_path, LOADS[:9])
    assert read_expert_load(mixture, WorkingFolder(tmp_path)) is None


def test_loads_are_those_of_one_mixture_and_damaged_files_count_as_none(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    mixture = MixtureShape(experts=8, experts_per_token=2, expert_ffn=64, balance=("bias",))
    store_expert_load(mixture, 1.5, working)
    assert read_expert_load(mixture, working) == 1.5
    assert read_expert_load(replace(mixture, balance=()), working) is None
    [path] = (tmp_path / ".plait" / "calibration").iterdir()
    for damaged in (
        "{",
        '{"format": 1, "expert_load": "x"}',
        '{"format": 1, "expert_load": 0.5}',
        '{"format": 9}',
        "[]",
    ):
        path.write_text(damaged)
        assert read_expert_load(mixture, working) is None
