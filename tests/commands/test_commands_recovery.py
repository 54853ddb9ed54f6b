"""What a failure is written down as: where the run goes on, and how much is lost by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.commands.monitoring.recovery import Recovery
from plait.commands.monitoring.session import Session, Start
from plait.commands.monitoring.starting import newest_checkpoint
from plait.errors import PlaitError
from plait.launch.values.failure import FailureFacts, WorkersFailed
from plait.launch.values.job import DETAIL, Message
from plait.recipe.schema import RecoverSection
from plait.report.incidents import read_incidents
from plait.report.metrics import StepReport
from plait.run_folder import RunFolder, run_folder
from plait.screen.screen import SilentScreen
from tests.checkpoint.conftest import save_state
from tests.end_to_end.command import flip_bit
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe

KILLED = WorkersFailed("rank 1 was killed by SIGKILL", FailureFacts(cause="killed", rank=1))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run at step 25, saved after steps 10 and 20."""
    monkeypatch.chdir(tmp_path)
    config = recipe(tmp_path, "train.budget=100 steps", "layout.replicate=1", "model.size=1M")
    made = run_folder("x")
    made.checkpoints.mkdir(parents=True)
    made.save_config_and_plan(config, planned(config, PLAYS, LAPTOP))
    for step in (10, 20):
        save_state(made.checkpoints, step)
    report = StepReport(
        step=1, tokens=9, loss=1.0, grad_norm=1.0, lr=0.1, step_s=0.5, tokens_per_s=1.0, mfu=None, data_wait_s=0.0
    )
    made.metrics.write_text("".join(replace(report, step=step, tokens=9 * step).to_line() for step in range(1, 26)))
    return made


def failed(folder: RunFolder) -> tuple[Recovery, Session]:
    plan = folder.saved_plan()
    recovery = Recovery(RecoverSection(), folder, plan, lambda: None)
    session = Session(folder, SilentScreen().steps(100), None, 1, require_present=lambda: None)
    session.saved_step, session.last_step, session.has_stepped = 20, 25, True
    session.step_times = dict.fromkeys(range(21, 26), 0.5)
    recovery.begins(Start(generation=1, lineage=1))
    return recovery, session


def test_a_failure_costs_the_steps_since_the_newest_checkpoint(folder: RunFolder) -> None:
    recovery, session = failed(folder)
    state = newest_checkpoint(folder)
    sentence = recovery.after(KILLED, session, Start(generation=1, lineage=1), state)
    assert "going on from step-20 of 100; 5 steps done again" in sentence
    (told,), _ = read_incidents(folder.incidents)
    assert (told.resumed_from, told.steps_lost, told.lost_s) == (20, 5, 2.5)
    assert state.checkpoint is not None and state.checkpoint.path.name == "step-20"


def test_where_the_newest_is_damaged_it_costs_those_since_the_one_before(folder: RunFolder) -> None:
    flip_bit(folder.checkpoints / "step-20" / "rank-00000.safetensors")
    recovery, session = failed(folder)
    state = newest_checkpoint(folder)
    sentence = recovery.after(KILLED, session, Start(generation=1, lineage=1), state)
    assert "going on from step-10 of 100; 15 steps done again" in sentence
    (told,), _ = read_incidents(folder.incidents)
    assert (told.resumed_from, told.steps_lost, told.lost_s) == (10, 15, 7.5)
    assert (
        state.checkpoint is not None and state.checkpoint.path.name == "step-10" and len(state.checkpoint.skipped) == 1
    )


def test_where_none_is_whole_the_run_ends_with_that_sentence_and_the_failure_is_kept(folder: RunFolder) -> None:
    for step in (10, 20):
        flip_bit(folder.checkpoints / f"step-{step}" / "rank-00000.safetensors")
    recovery, session = failed(folder)
    with pytest.raises(PlaitError, match="none of the 2 checkpoints"):
        recovery.after(KILLED, session, Start(generation=1, lineage=1), newest_checkpoint(folder))
    (told,), _ = read_incidents(folder.incidents)
    assert (told.decision, told.cause) == ("ended", "killed")
    never = Recovery(RecoverSection(mode="never"), folder, folder.saved_plan(), lambda: None)
    with pytest.raises(WorkersFailed, match="killed by SIGKILL"):
        never.after(KILLED, session, Start(generation=2, lineage=2), newest_checkpoint(folder))


def test_a_detail_is_read_by_who_asked_for_it(folder: RunFolder) -> None:
    details: list[str] = []
    silent = Session(folder, SilentScreen().steps(100), None, 1, require_present=lambda: None)
    asked = Session(folder, SilentScreen().steps(100), None, 1, require_present=lambda: None, on_detail=details.append)
    for session in (silent, asked):
        session.on_message(Message(rank=0, kind=DETAIL, values={"text": "a copy took 1 s"}))
    assert details == ["a copy took 1 s"]
