"""Before the first step a run is warned where its disk cannot hold its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.commands.monitoring.training import checkpoint_bytes, free_bytes, space_warning
from plait.model.shape import parameter_count
from plait.planner.plan import Plan
from plait.run_folder import RunFolder
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe

TINY = ("model.layers=2", "model.width=32", "model.heads=2", "train.sequence=16", "train.batch_tokens=112")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return planned(
        recipe(tmp_path, "train.budget=100 steps", *TINY, "layout.replicate=2", "optimizer.kind=adamw"), PLAYS, LAPTOP
    )


def test_it_is_as_many_as_stay_and_one_more(plan: Plan, tmp_path: Path) -> None:
    each, folder = checkpoint_bytes(plan), RunFolder(tmp_path)
    assert each == 12 * parameter_count(plan.job.shape)
    assert space_warning(folder, plan, lambda path: 3 * each) == ""
    said = space_warning(folder, plan, lambda path: 3 * each - 1)
    assert said.startswith("warning  3 checkpoints of ") and "checkpoint.keep" in said and "\n" not in said
    (tmp_path / "checkpoints" / "step-10").mkdir(parents=True)
    assert space_warning(folder, plan, lambda path: 3 * each - 1) == "", "one is there already"
    assert 0 < free_bytes(tmp_path) < float("inf") and free_bytes(tmp_path / "nowhere") == float("inf")
