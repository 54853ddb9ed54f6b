"""Plans are made once and kept: what is measured again, what may change of a begun run, and what may not."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.command import STEPS, Ended, Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm


def begun_and_stopped(place: Place, name: str, *arguments: str) -> Ended:
    """Start a run and stop it as soon as its plan stands."""
    process = place.start_training(name, *arguments)
    wait_while_running((place.path(name) / "plan.json").exists, process)
    kill_group(process, signal.SIGINT)
    return ended(process)


@pytest.fixture(scope="module")
def stopped(place: Place) -> str:
    """A run of two workers that was stopped somewhere on its way."""
    name = "halfway"
    process = place.start_training(name)
    wait_while_running(lambda: bool(place.checkpoints(name)), process)
    kill_group(process, signal.SIGTERM)
    assert ended(process).code == 143
    assert 10 <= place.checkpoints(name)[-1] < STEPS
    return name


@pytest.mark.slow
def test_a_time_budget_is_measured_once_for_all_names_until_replan(place: Place, run_warm: RunWarm) -> None:
    budget = "train.budget=10 minutes"  # of which measuring may take a tenth: enough on a busy machine
    first = begun_and_stopped(place, "timed", budget)
    assert first.code == 130 and "as made before" not in first.out
    plan = place.plan("timed")
    assert plan["step_s"] > 0 and abs(plan["steps"] * plan["step_s"] / 600 - 1) < 0.1
    assert any(reason.startswith(f"{plan['steps']} steps: 10 min at ") for reason in plan["reasons"])

    other = begun_and_stopped(place, "timed-other", budget)
    assert other.code == 130 and "as made before" in other.out
    assert place.plan("timed-other") == plan  # a second measurement would have found another time
    paper = run_warm(place, "plan", "tiny.toml", budget)
    assert paper.code == 0 and "a step, as timed here when it was planned" in " ".join(paper.out.split())

    fresh = begun_and_stopped(place, "timed-fresh", budget, "--replan")
    assert fresh.code == 130 and "as made before" not in fresh.out
    assert place.plan("timed-fresh")["step_s"] != plan["step_s"]


@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_a_new_plan(
    place: Place, stopped: str, reference: Callable[[int], str]
) -> None:
    name = "wider"
    place.copy_run(stopped, name)
    old, done = place.plan(name), place.checkpoints(name)[-1]
    before = place.numbers(name)
    run = place.train(name, "layout.replicate=3")
    assert run.code == 0 and not run.err
    assert f"{STEPS} steps in all, as before" in run.out and f"resume   from step-{done}" in run.out
    assert place.plan(name, "plan-1.json") == old
    new = place.plan(name)
    assert new["layout"]["replicate"] == 3 and new["steps"] == old["steps"]
    assert new["batch_sequences"] == old["batch_sequences"] and new["optimizer"] == old["optimizer"]
    assert place.numbers(name)[: len(before)] == before
    assert_close(place, name, reference(2))
    assert json.loads((place.path(name) / "receipt.json").read_text())["world_size"] == 3


def assert_close(place: Place, name: str, reference: str) -> None:
    """The same training up to the order in which three workers add instead of two."""
    for mine, other in zip(place.numbers(name), place.numbers(reference), strict=True):
        assert mine == pytest.approx(other, rel=2e-4)


@pytest.mark.slow
def test_a_raised_budget_continues_and_another_machine_makes_a_new_plan(
    place: Place, reference: Callable[[int], str]
) -> None:
    name = "longer"
    folder = place.copy_run(reference(2), name)
    plan = json.loads((folder / "plan.json").read_text())
    plan["machines"]["fingerprint"]["cores"] += 62
    del plan["sha256"]  # as a person must who edits a plan
    (folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
    run = place.train(name, f"train.budget={STEPS + 8} steps")
    assert run.code == 0 and not run.err
    assert "this machine is not the one it was made for" in run.out and f"{STEPS + 8} steps in all" in run.out
    assert json.loads((folder / "plan-1.json").read_text()) == plan
    assert place.plan(name)["fingerprint"]["cores"] == plan["machines"]["fingerprint"]["cores"] - 62
    steps = [line["step"] for line in place.lines(name) if "loss" in line]
    assert steps == list(range(1, STEPS + 9))
    assert json.loads((folder / "receipt.json").read_text())["steps"] == STEPS + 8
    assert place.checkpoints(name)[-1] == STEPS + 8


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "logs"]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.lr=0.1", "optimizer.lr was"),
        ("train.budget=12 steps", "train.budget = 12 steps is less than"),
        ("data.files=other.txt", "the text is not what this run was begun with: other.txt is new, play.txt is gone"),
    ],
)
def test_what_may_not_change_of_a_begun_run(
    place: Place, stopped: str, run_warm: RunWarm, override: str, told: str
) -> None:
    (place.folder / "other.txt").write_bytes((place.folder / "play.txt").read_bytes() + b"one more line\n")
    before = snapshot(place.path(stopped))
    run = run_warm(place, "train", "tiny.toml", f"run.name={stopped}", override)
    assert run.code == 2
    assert told in run.sentence()
    assert "data  " not in run.out or override.startswith("data."), "refused before text and machine are looked at"
    assert snapshot(place.path(stopped)) == before
