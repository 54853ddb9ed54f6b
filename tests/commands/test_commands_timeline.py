"""`plait timeline` before any worker starts: which plan the next step follows, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.commands.timeline import plan_after, record_from_checkpoint
from plait.errors import PlaitError
from plait.layout import Layout
from plait.planner.plan import HostShare
from plait.report.shares_file import SharesLine, append_shares
from plait.screen.screen import ignore_progress
from plait.working_folder import WorkingFolder
from tests.run_files.written_runs import written_run


def test_the_newest_shares_and_stages_up_to_the_next_step_apply(tmp_path: Path) -> None:
    layout = Layout(pipeline=2, stage_layers=(2, 2))
    folder = written_run(WorkingFolder(tmp_path), "first", layout=layout, batch_sequences=8)
    plan = folder.saved_plan()
    assert plan_after(plan, folder, 5) == plan
    for step, shares, layers in ((10, (8,), (1, 3)), (20, (8,), ()), (30, (8,), (3, 1))):
        line = SharesLine(step=step, shares=shares, reason="a test", speeds=(1.0, 1.0), stage_layers=layers)
        append_shares(folder.shares, line)
    assert plan_after(plan, folder, 8).placement.layout.stage_layers == (2, 2)
    assert plan_after(plan, folder, 9).placement.layout.stage_layers == (1, 3)
    found = plan_after(plan, folder, 28).placement
    assert (found.layout.stage_layers, found.shares) == ((1, 3), (8,))
    assert plan_after(plan, folder, 29).placement.layout.stage_layers == (3, 1)


def test_what_cannot_be_recorded_here_is_a_sentence(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    hosts = tuple(HostShare(name=name, workers=1, threads=1) for name in "ab")
    several = written_run(working, "several", layout=Layout(replicate=2), hosts=hosts)
    with pytest.raises(PlaitError, match="this run uses several machines, so it must record its steps itself"):
        record_from_checkpoint(several, 3, ignore_progress, working)
    gpus = written_run(working, "gpus", layout=Layout(replicate=64), batch_sequences=64, device="cuda")
    with pytest.raises(PlaitError, match=r"takes 64 GPUs but torch sees \d+ here"):
        record_from_checkpoint(gpus, 3, ignore_progress, working)
    without_text = written_run(working, "without-text")
    with pytest.raises(PlaitError):
        record_from_checkpoint(without_text, 3, ignore_progress, working)
