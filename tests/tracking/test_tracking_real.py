"""W&B, MLflow and Trackio themselves, offline: a run that is killed and goes on is one run there, each step once.

`make test-sinks` installs their newest versions beside .venv.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import STEPS, Place, ended, wait_while_running

pytestmark = pytest.mark.sinks
SITE = Path(os.environ.get("PLAIT_SINKS", ".sinks")).absolute()
TOOLS = ("wandb", "mlflow", "trackio")


class PlaceWithTools(Place):
    """Commands find the tools behind plait's own packages; whatever is kept is kept in the place."""

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        code = (
            "import sys; from pathlib import Path; "
            f"sys.path.append({str(SITE)!r}); from plait.cli import main; sys.argv[0] = 'plait'; main()"
        )
        kept = {"TRACKIO_DIR": str(self.folder / "trackio"), "HOME": str(self.folder)}
        return super().start(*arguments, module=("-c", code), environment=kept, **more)


def stored(tool: str, folder: Path) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("stored_runs.py")
    done = subprocess.run(
        [sys.executable, script, tool, folder],
        env={**os.environ, "PYTHONPATH": str(SITE), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("tool", TOOLS)
def test_a_killed_run_goes_on_as_the_same_run(tool: str, tmp_path: Path) -> None:
    assert SITE.is_dir(), "make test-sinks installs the tools"
    place = PlaceWithTools(tmp_path / "poems")
    asked = (f'report.to=["{tool}"]', "report.samples=3", "run.workers=2")
    process = place.start_training("first", *asked)
    wait_while_running(lambda: any(step >= 20 for step in place.checkpoints("first")), process)
    process.send_signal(signal.SIGKILL)
    ended(process, 60)
    run = place.train("first", *asked, within_s=300)
    assert run.code == 0 and "warning" not in run.out, run.out + run.err
    assert [line for line in run.out.splitlines() if line.startswith(tool)], run.out
    lines = stored(tool, place.path("first") if tool == "wandb" else place.folder)
    runs = {line["id"]: line for line in lines if "id" in line}
    assert len(runs) == 1, runs
    [run_line] = runs.values()
    assert run_line["name"] == "first"
    assert run_line["settings"].get("optimizer.kind") == "adamw"
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1)), version(tool)
    assert [line["step"] for line in lines if "eval_loss" in line] == [30, 60]
    assert [line["step"] for line in lines if "sample" in line] == [0, 20, 40, 60]
    own = [line["loss"] for line in place.lines("first") if "loss" in line]
    assert [line["loss"] for line in lines if "loss" in line] == own
    if tool == "mlflow":
        assert run_line["status"] == "FINISHED"


def test_a_server_that_is_not_there_does_not_stop_a_run(tmp_path: Path) -> None:
    place = PlaceWithTools(tmp_path / "poems")
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    try:
        run = place.train("first", 'report.to=["mlflow"]', "train.budget=20 steps", within_s=300)
    finally:
        del os.environ["MLFLOW_TRACKING_URI"]
    assert run.code == 0, run.err
    warnings = [line for line in run.out.splitlines() if "without MLflow" in line or "still receiving" in line]
    assert len(warnings) == 1, run.out
    assert len([line for line in place.lines("first") if "loss" in line]) == 20
