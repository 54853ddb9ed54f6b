"""`plait remove`: the run goes, and nothing else; what is at work, needed by others or elsewhere is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.errors import PlaitError
from plait.run_files.removal import removal_of, remove_run
from plait.run_files.running_runs import RunningRun, listed_as_running, registry_folder
from plait.run_files.summary import run_summaries
from plait.run_folder import RunFolder, lock_run_folder, run_names
from plait.working_folder import CURRENT_FOLDER, WorkingFolder
from tests.run_files.written_runs import written_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    written_run(CURRENT_FOLDER, "first")
    written_run(CURRENT_FOLDER, "second", steps_done=40)
    return CURRENT_FOLDER


def removed(run: str, working: WorkingFolder) -> None:
    remove_run(removal_of(run, working), working)


def left() -> set[str]:
    return {path.name for path in Path("runs").iterdir()}


@pytest.mark.parametrize("run", ["first", "runs/first", "./runs/first/"])
def test_a_run_goes_and_nothing_else(here: WorkingFolder, run: str) -> None:
    removed(run, here)
    assert left() == {"second"} and (here.runs / "second" / "metrics.jsonl").exists()


@pytest.mark.parametrize("file", ["recipe.toml", "plan.json"])
def test_half_written_and_damaged_runs_can_be_removed(here: WorkingFolder, file: str) -> None:
    (here.runs / "first" / file).unlink()
    (here.runs / "second" / file).write_text("{")
    removed("first", here)
    removed("second", here)
    assert left() == set()


def test_a_run_at_work_is_refused_by_its_lock_and_by_the_list(here: WorkingFolder) -> None:
    removal = removal_of("second", here)
    with lock_run_folder(RunFolder(here.runs / "second")):
        for attempt in (lambda: removal_of("second", here), lambda: remove_run(removal, here)):
            with pytest.raises(PlaitError, match="second is training just now; stop it first"):
                attempt()
    run = RunningRun(folder=str((here.runs / "second").resolve()), workers=1, threads=1, gpus=())
    with listed_as_running(run, registry_folder()):
        for attempt in (lambda: removal_of("second", here), lambda: remove_run(removal, here)):
            with pytest.raises(PlaitError, match="second is training just now; stop it first"):
                attempt()
    assert left() == {"first", "second"}


@pytest.mark.parametrize(
    "settings",
    [
        {"model.from": "{first}/exported", "model.size": "auto"},
        {"data.files": "{first}/texts/*.txt"},
        {"data.files": [{"path": "{first}/a.jsonl", "weight": 1.0}]},
        {"data.tokenizer": "{first}/tokenizer.json"},
        {"report.choices": "{first}/../first/questions.jsonl"},
    ],
)
def test_a_run_whose_files_another_run_uses_is_refused(here: WorkingFolder, settings: dict[str, object]) -> None:
    first = str((here.runs / "first").resolve())
    filled = json.loads(json.dumps(settings).replace("{first}", first))
    written_run(here, "tuned", settings=filled)
    with pytest.raises(PlaitError, match=r"runs/first is needed by the run tuned; remove what needs it first"):
        removal_of("first", here)
    recipe = here.runs / "tuned" / "recipe.toml"
    recipe.write_text(f"{recipe.read_text()}\nbroken = ")
    with pytest.raises(PlaitError, match="needed by the run tuned"):
        removal_of("first", here)
    removed("tuned", here)
    removed("first", here)
    assert left() == {"second"}


@pytest.mark.parametrize("path", ["tune.toml", "recipes/tune.toml"])
@pytest.mark.parametrize("source", ["runs/first", "run:first", "{here}/runs/first/exported"])
def test_a_run_that_a_recipe_goes_on_from_is_refused(here: WorkingFolder, path: str, source: str) -> None:
    Path("recipes").mkdir()
    Path(path).write_text(f'[model]\nfrom = "{source.format(here=Path.cwd())}"\n[data]\nfiles = "chats.jsonl"\n')
    with pytest.raises(PlaitError, match=f"runs/first is needed by the recipe {path}"):
        removal_of("first", here)
    removed("second", here)


def test_a_run_that_another_leads_into_by_a_link_is_refused(here: WorkingFolder) -> None:
    (here.runs / "second" / "checkpoints").symlink_to("../first/checkpoints")
    with pytest.raises(PlaitError, match="needed by the run second"):
        removal_of("first", here)


def test_what_plait_makes_is_not_told_and_a_link_to_the_run_needs_nothing(here: WorkingFolder) -> None:
    (here.runs / "first" / "rank-times.jsonl").write_text("")
    (here.runs / "link").symlink_to(here.runs / "first")
    removal = removal_of("first", here)
    assert not removal.other_files
    remove_run(removal, here)
    assert not (here.runs / "first").exists()


def test_links_go_and_what_they_lead_to_stays(here: WorkingFolder, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "step-10").mkdir(parents=True)
    (disk / "step-10" / "weights").write_text("kept")
    (tmp_path / "notes.txt").write_text("kept")
    (here.runs / "first" / "checkpoints").symlink_to(disk)
    (here.runs / "first" / "notes.txt").symlink_to(tmp_path / "notes.txt")
    removal = removal_of("first", here)
    assert list(removal.links) == [str(disk), str(tmp_path / "notes.txt")] and list(removal.other_files) == [
        "notes.txt"
    ]
    remove_run(removal, here)
    assert (disk / "step-10" / "weights").read_text() == (tmp_path / "notes.txt").read_text() == "kept"
    assert left() == {"second"}


def test_a_link_in_place_of_a_run_and_a_folder_elsewhere_are_refused(here: WorkingFolder, tmp_path: Path) -> None:
    elsewhere = WorkingFolder(tmp_path / "elsewhere")
    written_run(elsewhere, "far")
    (here.runs / "far").symlink_to(elsewhere.runs / "far")
    with pytest.raises(PlaitError, match=r"runs/far is a link to .*elsewhere/runs/far; delete that folder yourself"):
        removal_of("far", here)
    with pytest.raises(PlaitError, match=r"elsewhere/runs/far is not in .*runs; go to the folder"):
        removal_of("elsewhere/runs/far", here)
    for name in ("", ".", "..", "runs", "/", "nope", "../runs", "first/checkpoints", "x" * 5000):
        with pytest.raises(PlaitError):
            removal_of(name, here)
    assert left() == {"first", "second", "far"}


def test_a_folder_that_is_no_run_is_not_deleted(here: WorkingFolder) -> None:
    (here.runs / "notes").mkdir()
    (here.runs / "notes" / "todo.txt").write_text("kept")
    with pytest.raises(PlaitError):
        removal_of("notes", here)


def test_a_removal_that_is_killed_leaves_no_run_and_the_next_one_deletes_the_rest(here: WorkingFolder) -> None:
    code = """
import os, shutil, signal
shutil.rmtree = lambda *a, **b: os.kill(os.getpid(), signal.SIGKILL)
from plait.run_files.removal import remove_run, removal_of
from plait.working_folder import CURRENT_FOLDER
remove_run(removal_of("first", CURRENT_FOLDER), CURRENT_FOLDER)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    [aside] = left() - {"second"}
    assert re.fullmatch(r"\.first\.removed-\d+", aside) and (here.runs / aside / "plan.json").exists()
    assert [one.name for one in run_summaries(here)] == run_names(here) == ["second"]
    written_run(here, "first")
    removed("second", here)
    assert left() == {"first"}, "a later run of that name is left alone"


def test_one_that_is_gone_meanwhile_and_a_folder_that_cannot_be_renamed(here: WorkingFolder) -> None:
    removal = removal_of("first", here)
    shutil.rmtree(here.runs / "first")
    with pytest.raises(PlaitError, match="runs/first is gone already"):
        remove_run(removal, here)
    if os.geteuid() != 0:
        removal = removal_of("second", here)
        here.runs.chmod(0o500)
        with pytest.raises(PlaitError, match="cannot be removed"):
            remove_run(removal, here)
        here.runs.chmod(0o700)


def test_the_command_asks_and_without_a_terminal_needs_yes(here: WorkingFolder) -> None:
    refused = CliRunner().invoke(app, ["remove", "first"])
    assert isinstance(refused.exception, PlaitError) and "without a terminal, give --yes" in str(refused.exception)
    assert left() == {"first", "second"}
    done = CliRunner().invoke(app, ["remove", "first", "--yes"])
    assert done.exit_code == 0 and done.output.startswith("removed  runs/first: ")
    assert left() == {"second"}


def test_what_is_asked_names_what_goes(here: WorkingFolder) -> None:
    (here.runs / "first" / "exported").mkdir()
    (here.runs / "first" / "checkpoints" / "step-100").mkdir(parents=True)
    first, other = removal_of("first", here).lines()
    assert re.fullmatch(r"remove   runs/first: 1 checkpoint, 5 files, [\d.]+ KiB", first)
    assert other == "         with what plait did not make: exported"
