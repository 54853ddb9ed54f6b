"""A run is passed on step by step, each step once, through kills, resumes and failures of the tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.planner.settings import run_settings
from plait.recipe.load import flat_values
from plait.report.metrics import trim_metrics
from plait.report.samples_file import SampleReport
from plait.report.sinks import MetricsFile, SamplesFile
from plait.run_folder import RunFolder
from plait.tracking.follow import follow, read_arrived
from plait.tracking.trackers import TrackedRun, Tracker, refuse_missing_tools, tracking_tools_of
from plait.working_folder import WorkingFolder
from tests.report.test_report_metrics import eval_report, step_report
from tests.run_files.written_runs import written_run
from tests.tracking.file_tracker import file_tool, lines_of


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = written_run(WorkingFolder(tmp_path / "poems"), "first", steps_done=0)
    folder.metrics.unlink()
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def train(folder: RunFolder, steps: range, *, evaluated: int = 0, sampled: tuple[int, ...] = ()) -> None:
    """What rank 0 writes of these steps, after a checkpoint of the step before."""
    trim_metrics(folder.metrics, steps.start - 1)
    metrics, samples = MetricsFile(folder.metrics), SamplesFile(folder.samples, steps.start - 1)
    for step in steps:
        metrics.step(step_report(step, mfu=None))
        if step == evaluated:
            metrics.evaluation(eval_report(step))
        if step in sampled:
            samples.sample(SampleReport(step=step, prompt="Now", text=f" {step}"))
    metrics.close()


def followed(folder: RunFolder, store: Path, *works: Callable[[], None], fails_at: int | None = None) -> list[str]:
    """What is said while a process follows the run; the works happen between its looks."""
    rest, said = list(works), list[str]()

    def wait(seconds: float) -> bool:
        if not rest:
            return True
        rest.pop(0)()
        return False

    follow(folder, "wandb", file_tool(store, fails_at), wait, said.append)
    return said


def steps_of(store: Path, key: str = "loss") -> list[int]:
    [file] = store.glob("*.jsonl")
    return [line["step"] for line in lines_of(file) if key in line]


def test_steps_evaluations_and_samples_arrive_in_order(folder: RunFolder, store: Path) -> None:
    said = followed(
        folder,
        store,
        lambda: train(folder, range(1, 5), evaluated=2, sampled=(2,)),
        lambda: train(folder, range(5, 7), sampled=(6,)),
    )
    assert steps_of(store) == [1, 2, 3, 4, 5, 6]
    assert (steps_of(store, "eval_loss"), steps_of(store, "text")) == ([2], [2, 6])
    first, *_, last = lines_of(store / "run-1.jsonl")
    assert (first["name"], first["project"], last) == ("first", "poems", {"ended": "stopped"})
    assert first["settings"] == run_settings(flat_values(folder.saved_config()), folder.saved_plan())
    assert said == [f"wandb    at {store}"]


def test_a_resumed_run_goes_on_in_the_same_one_without_repeating_steps(folder: RunFolder, store: Path) -> None:
    followed(folder, store, lambda: train(folder, range(1, 8), evaluated=5, sampled=(5,)))
    # Killed after step 7, it goes on from the checkpoint of step 4.
    followed(folder, store, lambda: train(folder, range(5, 10), evaluated=5, sampled=(5, 9)))
    assert steps_of(store) == list(range(1, 10))
    assert (steps_of(store, "eval_loss"), steps_of(store, "text")) == ([5], [5, 9])


def test_workers_that_go_back_meanwhile_repeat_nothing(folder: RunFolder, store: Path) -> None:
    followed(folder, store, lambda: train(folder, range(1, 8)), lambda: train(folder, range(3, 6)), lambda: None)
    followed(folder, store, lambda: train(folder, range(6, 9)))
    assert steps_of(store) == list(range(1, 9))


def test_a_tool_that_fails_is_said_once_and_gets_the_rest_at_the_next_start(folder: RunFolder, store: Path) -> None:
    said = followed(folder, store, lambda: train(folder, range(1, 4)), lambda: train(folder, range(4, 9)), fails_at=5)
    assert said[1:] == [
        "warning  the run goes on without W&B: the network is unreachable; "
        "the missing steps are sent when the run is resumed"
    ]
    assert read_arrived(folder.path / "tracker-wandb.json").step == 3
    followed(folder, store, lambda: train(folder, range(9, 11)))
    assert sorted(set(steps_of(store))) == list(range(1, 11))


def test_passwords_in_addresses_are_not_printed(folder: RunFolder) -> None:
    def open_run(run: TrackedRun, run_id: str) -> Tracker:
        raise ConnectionError("http://ada:secret@server/api is unreachable")

    said: list[str] = []
    follow(folder, "mlflow", open_run, lambda _: True, said.append)
    assert [one.partition(";")[0] for one in said] == [
        "warning  the run goes on without MLflow: http://…@server/api is unreachable"
    ]


def test_a_damaged_note_begins_a_new_run_in_the_tool(folder: RunFolder, store: Path) -> None:
    followed(folder, store, lambda: train(folder, range(1, 4)))
    (folder.path / "tracker-wandb.json").write_text("{")
    followed(folder, store, lambda: train(folder, range(4, 6)))
    assert len(list(store.glob("*.jsonl"))) == 2


def test_numbers_that_are_none_are_left_out(folder: RunFolder, store: Path) -> None:
    folder.metrics.write_text('{"step": 1, "loss": null, "lr": 1, "auxiliary_losses": {"layer_2": 4.5}}\ntorn')
    followed(folder, store)
    assert lines_of(store / "run-1.jsonl")[1] == {"step": 1, "lr": 1.0, "auxiliary_losses/layer_2": 4.5}


def test_settings_hold_no_auto_and_nothing_about_where_a_run_writes(folder: RunFolder) -> None:
    plan = folder.saved_plan()
    settings = run_settings(flat_values(folder.saved_config()), plan)
    assert settings["optimizer.lr"] == plan.job.optimizer.lr and settings["steps"] == plan.job.steps
    assert "auto" not in settings.values() and not any(key.startswith("report.") for key in settings)
    json.dumps(settings, allow_nan=False)


def test_a_tool_that_is_not_installed_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio").mkdir()  # a folder of that name is no package
    monkeypatch.syspath_prepend(str(tmp_path))
    refuse_missing_tools(["tensorboard", "csv"])
    assert tracking_tools_of(["tensorboard", "mlflow", "csv"]) == ["mlflow"]
    with pytest.raises(PlaitError, match=r'report.to names "trackio".*pip install.*plait\[trackio\]'):
        refuse_missing_tools(["tensorboard", "trackio"])
