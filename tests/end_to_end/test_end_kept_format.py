"""A run that an earlier version began is read, continued and sampled by this one; the fixture stays as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from plait.planner.plan_file import PLAN_FORMAT, read_plan
from tests.end_to_end.command import Place

KEPT = Path(__file__).parents[1] / "fixtures" / "run-format-2"
BEGUN_IN = "/tmp/fix"
LOSS_AFTER_STEP_9 = 5.030458331108093
"""As the version that began the run went on with it."""


@pytest.fixture
def kept(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    recipe = tmp_path / "runs" / "kept" / "recipe.toml"  # it names the tokenizer's file in full
    recipe.write_text(recipe.read_text().replace(BEGUN_IN, str(tmp_path)))
    return place


def test_the_plan_of_a_kept_run_is_read_whole() -> None:
    written = json.loads((KEPT / "runs" / "kept" / "plan.json").read_text())
    plan = read_plan(KEPT / "runs" / "kept" / "plan.json")
    assert written["format"] == 2 < PLAN_FORMAT
    assert (plan.layout.replicate, plan.shares, plan.steps, plan.host_order) == (2, (5, 3), 6, ())
    assert plan.forecast is not None
    assert plan.forecast.embedding_cost_in_layers == written["forecast"]["lookup_layers"]
    assert plan.forecast.head_cost_in_layers == written["forecast"]["head_layers"]
    assert plan.forecast.probe_digest == written["forecast"]["probed"]


def test_a_kept_run_goes_on_where_it_stopped(kept: Place) -> None:
    ended = kept.run("train", "recipe.toml", "train.budget=9 steps", "--no-check")
    assert ended.code == 0, ended.err
    assert "resume   from step-6" in ended.out
    losses = {line["step"]: line["loss"] for line in kept.lines("kept") if "loss" in line}
    assert sorted(losses) == list(range(1, 10))
    assert losses[9] == pytest.approx(LOSS_AFTER_STEP_9, rel=1e-4)
    assert kept.plan("kept")["format"] == PLAN_FORMAT
    sampled = kept.run("sample", "kept", "--tokens", "5")
    assert sampled.code == 0 and sampled.out.strip()


def test_a_kept_run_is_finished_until_more_is_asked_for(kept: Place) -> None:
    finished = kept.run("train", "recipe.toml")
    assert finished.code == 0 and "is finished" in finished.out
