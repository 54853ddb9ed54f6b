"""Long steps are timed by a few of their micro-batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.launch.values.job import Job, JobResult, Message
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.probing.steps import LONGEST_TIMED_STEP_S, time_plan
from plait.workers import OnMessage
from plait.working_folder import CURRENT_FOLDER
from tests.planner.machines import LAPTOP, PLAYS, drafted, recipe
from tests.plans import changed

ONCE_S, EACH_S = 0.7, 0.02


class Stopwatch:
    """Workers whose steps take as long as their micro-batches, and a while once."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def __init__(self) -> None:
        self.timed: list[int] = []

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        plan = read_plan(Path(json.loads(job.argument)["folder"]) / "plan.json")
        count = plan.job.batch_sequences // (
            plan.placement.layout.data_parallel_degree * plan.placement.micro_sequences
        )
        self.timed.append(count)
        on_message(Message(rank=0, kind="measured", values={"step_s": ONCE_S + EACH_S * count}))
        return JobResult(stopped_by="finished", wall_s=1.0)


def plan_with(folder: Path, step_s: float, layout: str = "layout.replicate=2", **changes: Any) -> Plan:
    named = ("model.layers=4", "model.width=64", "train.sequence=64", "train.batch_tokens=655360", layout)
    plan = drafted(recipe(folder, *named, "train.budget=3 steps"), PLAYS, LAPTOP).plan
    assert plan.forecast is not None
    return changed(plan, forecast=replace(plan.forecast, step_s=step_s), **changes)


def timed(folder: Path, plan: Plan) -> tuple[float, list[int]]:
    workers = Stopwatch()
    return time_plan(recipe(folder), plan, workers, least_s=0.1).step_s, workers.timed


def test_a_step_of_minutes_is_timed_by_a_few_of_its_micro_batches_and_foretold_in_full(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, step_s=600.0)
    micro_batches = plan.job.batch_sequences // (2 * plan.placement.micro_sequences)
    step_s, counts = timed(tmp_path, plan)
    assert counts == [4, 2] and micro_batches > 50
    assert step_s == pytest.approx(ONCE_S + EACH_S * micro_batches)


def test_a_step_of_seconds_is_timed_as_it_is(tmp_path: Path) -> None:
    whole = plan_with(tmp_path, step_s=LONGEST_TIMED_STEP_S)
    micro_batches = whole.job.batch_sequences // (2 * whole.placement.micro_sequences)
    assert timed(tmp_path, whole)[1] == [micro_batches]
    assert timed(tmp_path, plan_with(tmp_path, step_s=3 * LONGEST_TIMED_STEP_S))[1] == [micro_batches]
    assert len(timed(tmp_path, plan_with(tmp_path, step_s=5 * LONGEST_TIMED_STEP_S))[1]) == 2
    uneven = plan_with(tmp_path, step_s=600.0, shares=(whole.job.batch_sequences - 64, 64))
    assert timed(tmp_path, uneven)[1] == [micro_batches], "a person's shares are kept"


def test_a_pipeline_is_timed_full(tmp_path: Path) -> None:
    assert timed(tmp_path, plan_with(tmp_path, step_s=1e4, layout="layout.pipeline=4"))[1] == [16, 8]
    counts = timed(tmp_path, plan_with(tmp_path, step_s=6 * LONGEST_TIMED_STEP_S, layout="layout.pipeline=4"))[1]
    assert len(counts) == 2 and counts[0] > 16 and all(count % 4 == 0 for count in counts)
