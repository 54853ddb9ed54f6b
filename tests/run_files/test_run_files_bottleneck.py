"""What limits a run, read from the files in its folder: healthy, starved, torn, of another plan, and as it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.planner.bottleneck.fitted_model import priced_plan
from plait.report.rank_times_file import RankTimesLine
from plait.run_files.bottleneck import bottleneck_if_known, bottleneck_of, measured_run
from plait.run_folder import RunFolder, RunTotals
from plait.working_folder import CURRENT_FOLDER, WorkingFolder
from tests.report.test_report_metrics import step_report
from tests.run_files.written_runs import usual_recipe_and_plan, write_rank_times, written_run


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return CURRENT_FOLDER


@pytest.fixture
def healthy(working: WorkingFolder) -> RunFolder:
    """A thousand steps of 50 ms, nearly all of it computing."""
    folder = written_run(working, "healthy", steps_done=1000, steps=1000, step_s=0.05)
    write_rank_times(folder, steps=1000, compute_s=0.047)
    folder.write_totals(RunTotals(wall_s=53.0, start_s=1.5))
    return folder


def test_a_thousand_healthy_steps_have_no_remedy(healthy: RunFolder) -> None:
    assert priced_plan(healthy.saved_plan()) is not None, "the plan can be priced: there are remedies to refuse"
    found = bottleneck_of(healthy)
    assert found is not None and found.remedies == () and found.share > 0.2
    out = CliRunner().invoke(app, ["status", "healthy"]).stdout
    [line] = [line for line in out.splitlines() if line.startswith("limits   ")]
    assert found.sentence in line and "times as fast" not in out


def test_only_the_last_half_of_the_times_counts(healthy: RunFolder) -> None:
    healthy.rank_times.unlink()
    write_rank_times(healthy, steps=400, compute_s=0.01, data_s=0.03)
    write_rank_times(healthy, steps=1000, compute_s=0.047)  # it went back to its beginning
    found = bottleneck_of(healthy)
    assert found is not None and found.cause != "data"


def test_what_is_left_of_a_step_is_found_from_the_steps_of_a_line() -> None:
    """The second step warms caches up, and the machine becomes slow after the tenth."""
    _, plan = usual_recipe_and_plan()
    seconds = [0.5, 0.2] + [0.05] * 8 + [0.31] * 30
    steps = [step_report(step, step_s=step_s) for step, step_s in enumerate(seconds, 1)]
    lines = [times_line(2, 1, 0.19), times_line(10, 8, 0.04), times_line(30, 20, 0.3), times_line(40, 10, 0.3)]
    early, late = (measured_run(plan, steps[:end], some, 0.0) for end, some in ((10, lines[:2]), (40, lines)))
    assert early is not None and late is not None
    assert (early.step_s, early.rest_s) == (pytest.approx(0.05), (pytest.approx(0.01),))
    assert (late.step_s, late.rest_s) == (pytest.approx(0.31), (pytest.approx(0.01),))
    mixed = [times_line(2, 1, 0.19), times_line(14, 12, (8 * 0.04 + 4 * 0.3) / 12), times_line(40, 26, 0.3)]
    for known in (steps, steps[35:]):  # of a long run only the last steps are read
        assert measured_run(plan, known, mixed, 0.0) == late
    assert measured_run(plan, [], lines, 0.0) is None and measured_run(plan, steps[:5], lines[3:], 0.0) is None


def times_line(step: int, steps: int, compute_s: float) -> RankTimesLine:
    """The times of a single rank that never waits."""
    return RankTimesLine(step=step, steps=steps, compute_s=(compute_s,), wait_s=(0,), inside_s=(0,), data_s=(0,))


def test_a_starved_run_says_so_in_every_place(working: WorkingFolder) -> None:
    folder = written_run(working, "starved", step_s=0.05)
    write_rank_times(folder, steps=100, compute_s=0.02, data_s=0.025)
    found = bottleneck_of(folder)
    assert found is not None and (found.cause, found.share) == ("data", pytest.approx(0.5))
    out = CliRunner().invoke(app, ["status", "starved"]).stdout
    assert "limits   Waiting for training data takes 50% of each step." in out and "2 times as fast" in out
    shown = json.loads(CliRunner().invoke(app, ["status", "starved", "--json"]).stdout)["bottleneck"]
    assert (shown["cause"], shown["remedies"][0]["gain"]) == ("data", pytest.approx(2.0))
    CliRunner().invoke(app, ["report", "starved", "--md", "starved.md"])
    assert "Waiting for training data takes 50% of each step." in Path("starved.md").read_text()


def test_nothing_is_known_before_the_first_times(working: WorkingFolder) -> None:
    folder = written_run(working, "young", steps_done=5)
    assert bottleneck_of(folder) is None
    folder.rank_times.write_text('{"step": 3')
    assert bottleneck_of(folder) is None


def test_times_of_another_number_of_ranks_do_not_count(working: WorkingFolder) -> None:
    folder = written_run(working, "moved", steps_done=50)
    line = {"step": 10, "steps": 10, "compute_s": [0.1, 0.1], "wait_s": [0, 0], "inside_s": [0, 0], "data_s": [9, 9]}
    folder.rank_times.write_text(json.dumps(line) + "\n")
    assert bottleneck_of(folder) is None


def test_a_damaged_file_hides_it_from_those_who_show_something_else(working: WorkingFolder) -> None:
    folder = written_run(working, "damaged", steps_done=50)
    write_rank_times(folder, steps=50, compute_s=0.04)
    assert bottleneck_if_known(folder) is not None
    folder.plan.write_text("{")
    assert bottleneck_if_known(folder) is None
