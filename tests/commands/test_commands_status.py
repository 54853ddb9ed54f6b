"""What plait status says of a run's saves and of how it went on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import write_rank
from plait.commands.monitoring.status import status
from plait.report.incidents import Incident, append_incident
from plait.working_folder import WorkingFolder
from tests.checkpoint.conftest import MODEL, state
from tests.run_files.written_runs import written_run


def incident(step: int, resumed_from: int, *, from_copies: bool) -> Incident:
    about = {"cause": "killed", "what": "SIGKILL", "rank": 1, "host": None, "device": None, "place": "", "stack": ""}
    times = {"at": "2026-11-28T10:00:00.000", "generation": 1, "lost_s": 0.1, "found_after_s": 0.0}
    values = {**about, **times, "step": step, "resumed_from": resumed_from, "from_copies": from_copies}
    return Incident(**values, decision="started again", sentence="rank 1 was killed by SIGKILL")


def saved(checkpoints: Path, step: int, cursor: int) -> None:
    staging, final = staging_for(checkpoints, step), checkpoint_for(checkpoints, step)
    for rank, tensors in enumerate(state(step)):
        write_rank(staging, rank, tensors)
    publish(staging, final, step=step, cursor=cursor, model=MODEL, world_size=2)


def test_the_step_that_is_saved_stands_beside_the_step_that_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    working = WorkingFolder(tmp_path)
    folder = written_run(working, "play", steps_done=47, steps=100)
    lines = list(status("play", working=working))
    assert "step 47 of 100; nothing saved yet; " in lines[0]
    folder.checkpoints.mkdir(exist_ok=True)
    for step in (30, 40):
        saved(folder.checkpoints, step, cursor=step * folder.saved_plan().job.batch_sequences)
    two_hours_ago = time.time() - 7200
    os.utime(folder.checkpoints / "step-40" / "manifest.json", (two_hours_ago, two_hours_ago))
    for one in (incident(44, 43, from_copies=True), incident(45, 40, from_copies=False)):
        append_incident(folder.incidents, one)
    append_incident(folder.incidents, incident(3, 0, from_copies=False))
    text = "\n".join(status("play", working=working))
    assert "step 47 of 100; step 40 saved 2 h 0 min ago; " in text
    assert "went on from copies in memory of step 43, 1 step done again" in text
    assert "went on from the checkpoint of step 40, 5 steps done again" in text
    assert "went on from the beginning, 3 steps done again" in text
    [line] = status("play", form="json", working=working)
    account = json.loads(line)
    assert account["step_saved"] == 40 and account["saved_at"].endswith("+00:00")
