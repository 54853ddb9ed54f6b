"""A process passes a run on to a tool: it ends with the run, and its failure stays its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.run_folder import RunFolder
from plait.tracking.processes import tools_behind, tracked
from plait.working_folder import WorkingFolder
from tests.end_to_end.command import wait_until
from tests.run_files.written_runs import written_run
from tests.tracking.file_tracker import lines_of
from tests.tracking.test_tracking_follow import train

TOOLS = Path(__file__).with_name("tools")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    folder = written_run(WorkingFolder(tmp_path / "poems"), "first", steps_done=0)
    folder.metrics.unlink()
    return folder


def kept(tmp_path: Path) -> list[dict[str, object]]:
    return lines_of(tmp_path / "poems-first.jsonl")


def passed_on(folder: RunFolder, work: Callable[[], None]) -> list[str]:
    said: list[str] = []
    with tracked(["tensorboard", "trackio"], folder.path, said.append):
        work()
    return said


def test_a_run_and_its_resume_arrive_and_the_process_ends(folder: RunFolder, tmp_path: Path) -> None:
    said = passed_on(folder, lambda: train(folder, range(1, 6), evaluated=4, sampled=(4,)))
    assert said == ["trackio  trackio show --project poems"]
    passed_on(folder, lambda: train(folder, range(4, 8), evaluated=4, sampled=(4,)))
    begun, *lines = kept(tmp_path)
    assert begun["resume"] == "never" and begun["config"]
    assert [line["resume"] for line in lines if "resume" in line] == ["allow"]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 8))
    assert [(line["step"], line["sample"]) for line in lines if "sample" in line] == [(4, "Now 4")]
    assert len([line for line in lines if "finished" in line]) == 2
    assert "goes to the log" in (folder.path / "tracker-trackio.log").read_text()


def test_a_tool_that_fails_is_said_and_gets_the_rest_later(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_FAILS_AT", "3")
    said = passed_on(folder, lambda: train(folder, range(1, 6)))
    assert said[1:] == [
        "warning  the run goes on without Trackio: the disk of the tool is full; "
        "the missing steps are sent when the run is resumed"
    ]
    monkeypatch.delenv("TRACKIO_FAILS_AT")
    passed_on(folder, lambda: None)
    assert sorted({line["step"] for line in kept(tmp_path) if "loss" in line}) == [1, 2, 3, 4, 5]
    assert tools_behind(["csv", "trackio"], folder.path, 5) == []
    assert tools_behind(["csv", "trackio", "wandb"], folder.path, 6) == ["trackio", "wandb"]


def test_the_process_sends_the_rest_and_ends_when_its_command_is_killed(folder: RunFolder, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from plait.tracking.processes import tracked\n"
        "with tracked(['trackio'], Path(sys.argv[1]), print):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    train(folder, range(1, 4))
    path = ":".join([str(TOOLS), str(Path(__file__).parents[2])])
    environment = {"PYTHONPATH": path, "TRACKIO_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code, folder.path], env=environment, check=False)
    assert done.returncode == -9
    wait_until(lambda: any("finished" in line for line in kept(tmp_path)), within_s=60)
    assert [line["step"] for line in kept(tmp_path) if "loss" in line] == [1, 2, 3]
