"""The runs of a folder: each has its row, whatever became of it, and none hides the others."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.checked_json import parse_json
from plait.layout import Layout
from plait.planner.plan import HostShare
from plait.report.incidents import StartLine, append_start
from plait.run_files.summary import RunSummary, run_summaries, summary_of
from plait.run_folder import RunFolder, lock_run_folder
from plait.working_folder import CURRENT_FOLDER, WorkingFolder
from tests.report.test_report_metrics import step_report
from tests.run_files.written_runs import STEPS, fail, write_metrics, written_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return CURRENT_FOLDER


def only(working: WorkingFolder) -> RunSummary:
    [one] = run_summaries(working)
    return one


def test_a_finished_run(here: WorkingFolder) -> None:
    written_run(here, "first")
    one = only(here)
    assert (one.name, one.state, one.step, one.steps, one.problem) == ("first", "finished", STEPS, STEPS, "")
    assert (one.loss, one.loss_text, one.loss_unit) == (1.5, "held out", "nats per byte")
    assert one.tokens_per_s == 1024 / 0.05 and one.parameters and 5e5 < one.parameters < 2e6
    assert shlex.split(one.command) == ["plait", "train", "runs/first/recipe.toml", "train.budget=200 steps"]
    assert plait.runs() == [one]


def test_a_stopped_run_tells_the_loss_of_its_last_step_and_what_is_saved(here: WorkingFolder) -> None:
    folder = written_run(here, "first", steps_done=40, held_out=None)
    for step in (10, 30):
        (folder.checkpoints / f"step-{step}").mkdir(parents=True)
        (folder.checkpoints / f"step-{step}" / "manifest.json").touch()
    one = only(here)
    assert (one.state, one.step, one.step_saved, one.steps) == ("stopped", 40, 30, STEPS)
    assert (one.loss, one.loss_text, one.loss_unit) == (2.0, "last step", "nats per token")
    assert one.command == "plait train runs/first/recipe.toml" and one.tokens == 40 * 1024


def test_a_run_at_work_is_told_by_its_lock(here: WorkingFolder) -> None:
    folder = written_run(here, "first", steps_done=40)
    with lock_run_folder(folder):
        assert only(here).state == "training"
    with lock_run_folder(RunFolder(here.runs / "new")):
        assert {one.name: one.state for one in run_summaries(here)} == {"first": "stopped", "new": "starting"}
    assert only(here).state == "stopped", "of the one that did not begin, nothing is left"


def test_to_look_does_not_refuse_a_run_that_begins(here: WorkingFolder) -> None:
    folder = written_run(here, "first", steps_done=40)
    for _ in range(50):
        run_summaries(here)
        with lock_run_folder(folder):
            pass


def test_a_run_that_failed_until_it_is_started_again(here: WorkingFolder) -> None:
    folder = written_run(here, "first", steps_done=40)
    fail(folder, generation=1, step=40)
    assert only(here).state == "failed"
    append_start(folder.starts, StartLine(generation=2, steps_done=0, at="2026-11-28T10:02:00+00:00"))
    assert only(here).state == "stopped"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("plan.json", '{"format": 2}'),
        ("plan.json", "{"),
        ("recipe.toml", "what = "),
        ("metrics.jsonl", "no line\n"),
        ("receipt.json", "{}"),
        ("incidents.jsonl", "{}\n"),
    ],
)
def test_a_damaged_or_older_run_is_a_row_that_says_so_and_hides_no_other(
    here: WorkingFolder, file: str, damage: str
) -> None:
    written_run(here, "good")
    folder = written_run(here, "bad", steps_done=40)
    (folder.path / file).write_text(damage)
    rows = {one.name: one for one in run_summaries(here)}
    assert rows["good"].state == "finished" and rows["bad"].state == "unreadable"
    assert f"runs/bad/{file}" in rows["bad"].problem and rows["bad"].command == ""
    assert file == "metrics.jsonl" or rows["bad"].step == 40, "what can be read is there"


def test_a_torn_last_line_is_left_out(here: WorkingFolder) -> None:
    folder = written_run(here, "first", steps_done=40)
    with folder.metrics.open("a") as file:
        file.write(step_report(41).to_line()[:-5])
    assert (only(here).step, only(here).problem) == (40, "")


def test_half_written_folders_and_what_is_no_run(here: WorkingFolder) -> None:
    for path in (
        "runs/only-lock/.lock",
        "runs/only-plan/plan.json",
        "runs/notes/todo.txt",
        "runs/.removed-x/plan.json",
    ):
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text("")
    Path("runs/file").write_text("")
    Path("runs/bad\nname").mkdir()
    Path("runs/bad\nname/plan.json").write_text("")
    assert {one.name: one.state for one in run_summaries(here)} == dict.fromkeys(
        ("only-lock", "only-plan"), "not begun"
    )


def test_a_run_that_is_deleted_while_it_is_read_has_no_row(here: WorkingFolder) -> None:
    folder = written_run(here, "gone")
    shutil.rmtree(folder.path)
    assert summary_of(folder, here) is None


def test_no_runs_and_no_folder(here: WorkingFolder) -> None:
    assert plait.runs() == []
    Path("runs").touch()
    assert plait.runs() == []


def test_a_renamed_run_is_told_that_its_command_would_begin_another(here: WorkingFolder) -> None:
    written_run(here, "first", steps_done=40).path.rename("runs/second")
    one = only(here)
    assert (one.name, one.state, one.command) == ("second", "stopped", "") and "holds the run first" in one.problem


def test_the_command_of_a_run_on_several_hosts(here: WorkingFolder) -> None:
    hosts = tuple(HostShare(name=name, workers=1, threads=4) for name in ("ada", "bob"))
    written_run(here, "first", steps_done=40, hosts=hosts, layout=Layout(replicate=2))
    assert only(here).command == "plait train runs/first/recipe.toml --hosts 2" and only(here).workers == 2


def test_the_command_of_a_run_elsewhere_is_whole(here: WorkingFolder, tmp_path: Path) -> None:
    elsewhere = WorkingFolder(tmp_path / "my runs")
    written_run(elsewhere, "first", steps_done=40)
    assert only(elsewhere).command == f"cd '{elsewhere.path}' && plait train runs/first/recipe.toml"


def test_an_evaluation_further_back_than_the_steps_that_are_read(here: WorkingFolder) -> None:
    folder = written_run(here, "first", steps_done=0, held_out=None, steps=5000)
    write_metrics(folder, [3.0] * 400, 1.25)
    with folder.metrics.open("a") as file:
        file.writelines(step_report(step).to_line() for step in range(401, 1200))
    one = only(here)
    assert (one.step, one.loss, one.loss_text) == (1199, 1.25, "held out")


def test_a_million_steps_take_no_longer(here: WorkingFolder) -> None:
    folder = written_run(here, "first", steps_done=0, held_out=None, steps=2_000_000)
    block = "".join(step_report(step).to_line() for step in range(1, 1001))
    with folder.metrics.open("w") as file:
        file.writelines(block for _ in range(100))
    before = os.times()
    assert only(here).step == 1000
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.5, "a hundred thousand lines"


def test_what_another_user_keeps_closed_is_a_row(here: WorkingFolder) -> None:
    written_run(here, "first")
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    Path("runs/first").chmod(0)
    try:
        assert only(here).state == "unreadable"
    finally:
        Path("runs/first").chmod(0o700)


def test_the_row_as_json(here: WorkingFolder) -> None:
    written_run(here, "first")
    values = only(here).to_dict()
    assert parse_json(json.dumps(values)) == values
    assert {"name", "state", "step", "steps", "loss", "tokens_per_s", "updated", "command"} <= values.keys()


def test_reading_imports_no_torch(here: WorkingFolder) -> None:
    written_run(here, "first")
    code = "import sys, plait; print(len(plait.runs()), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "False"]
