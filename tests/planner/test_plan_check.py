"""A plan that somebody edited, or made up, is refused with the field's name before anything is begun with it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from plait.checked_json import sealed_text
from plait.errors import PlaitError
from plait.partition.execution import RunArithmetic
from plait.planner.plan import Cadence, Machines, Placement, TrainingJob
from plait.planner.plan_file import plan_text, read_plan
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe

TWO = ("train.budget=100 steps", "model.layers=4", "model.width=64", "model.heads=2", "layout.replicate=2")
PARTS = {
    field.name: part
    for part, kind in {
        "job": TrainingJob,
        "placement": Placement,
        "arithmetic": RunArithmetic,
        "machines": Machines,
        "cadence": Cadence,
    }.items()
    for field in fields(kind)
}
"""The part of the plan in which each field stands."""
HOST = {"name": "a", "workers": 2, "threads": 4, "machine": "", "mark": ""}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The values of a plan for two workers."""
    return json.loads(plan_text(planned(recipe(tmp_path_factory.mktemp("plan"), *TWO), PLAYS, LAPTOP)))


def refusal(tmp_path: Path, values: dict[str, Any], changes: dict[str, Any]) -> str:
    """What is said of the plan with these values under dotted paths, and a hash made again."""
    edited = json.loads(json.dumps(values))
    del edited["sha256"]
    for path, value in changes.items():
        *parents, last = path.split(".")
        parents = [*([PARTS[first]] if (first := path.split(".")[0]) in PARTS else []), *parents]
        place = edited
        for parent in parents:
            place = place[parent]
        place[last] = value
    (tmp_path / "plan.json").write_text(sealed_text(edited))
    with pytest.raises(PlaitError) as refused:
        read_plan(tmp_path / "plan.json")
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"shape.layers": 10**12}, "the model's layers is 1000000000000; choose a whole number from 1 to 10,000"),
        ({"shape.heads": 2**62, "shape.kv_heads": 3}, "the model's heads is"),
        ({"shape.width": -64}, "the model's width is -64"),
        ({"sequence": 10**9}, "sequence is 1000000000 and must be 1 or more"),
        ({"batch_sequences": -1}, "batch_sequences is -1"),
        ({"batch_sequences": 1}, "batch_sequences is 1 for 2 data-parallel ranks"),
        ({"batch_sequences": 2**62}, "batch_sequences is 4611686018427387904"),
        ({"micro_sequences": 0}, "micro_sequences is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"threads": 2**62}, "threads is"),
        ({"report_every_steps": 0}, "report_every_steps is 0"),
        ({"evaluate_every_steps": -1}, "evaluate_every_steps is -1"),
        ({"checkpoint_keep": 0}, "checkpoint_keep is 0"),
        ({"checkpoint_every": {"value": -5.0, "unit": "steps"}}, "checkpoint_every is -5"),
        ({"budget": {"value": 0.0, "unit": "steps"}}, "budget is 0 and must be more than 0"),
        ({"step_s": 0.0}, "step_s is 0 and must be more than 0"),
        ({"peak_flops": -1.0}, "peak_flops is -1"),
        ({"optimizer.lr": -1.0}, "optimizer.lr is -1"),
        ({"optimizer.betas": [0.9, 1.5]}, "optimizer.betas 2 is 1.5"),
        ({"optimizer.clip": 0.0}, "optimizer.clip is 0"),
        ({"optimizer.warmup_steps": -3}, "optimizer.warmup_steps is -3"),
        ({"layout.replicate": 2**40}, "layout.replicate is"),
        ({"layout.replicate": 10**6, "layout.tensor": 10**6}, "the layout's number of ranks is 1000000000000"),
        ({"layout.stage_layers": [1, 2]}, "layout.stage_layers add up to 3, and the model's layers are 4"),
        ({"layout.stage_layers": [2, 2], "layout.pipeline": 3}, "has 2 stages for a pipeline of 3 ranks"),
        ({"shares": [1, 2, 3]}, "shares add up to 6"),
        ({"micro_limits": [1]}, "micro_limits are 1 numbers for 2 data-parallel ranks"),
        ({"hosts": [{**HOST, "workers": 2**62}]}, "hosts 1: workers is"),
        ({"hosts": [HOST, HOST]}, "hosts add up to 4, and the layout's ranks are 2"),
        ({"gpus": [-1]}, "count from 0, and -1 is among them"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_numbers_that_no_run_can_have(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], part: str
) -> None:
    assert part in refusal(tmp_path, values, changes)


def test_a_number_that_is_none_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    for word in ("NaN", "Infinity", "1e999"):
        text = json.dumps({key: value for key, value in values.items() if key != "sha256"})
        (tmp_path / "plan.json").write_text(text.replace('"steps": 100', f'"steps": {word}'))
        with pytest.raises(PlaitError, match=r"is not a usable plan \(it is not JSON: .*no number that plait writes"):
            read_plan(tmp_path / "plan.json")
