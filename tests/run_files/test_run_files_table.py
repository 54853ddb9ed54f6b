"""`plait runs` on terminals of any width: every run, and a command that can be copied."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.run_files.summary import RunSummary
from plait.run_files.table import age_text, runs_text
from plait.working_folder import CURRENT_FOLDER
from tests.run_files.written_runs import written_run

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
FIRST = RunSummary(
    name="first",
    path=Path("runs/first"),
    state="finished",
    step=60,
    step_saved=60,
    steps=60,
    tokens=61440,
    loss=2.014389,
    loss_text="held out",
    loss_unit="nats per byte",
    tokens_per_s=11642.3,
    parameters=315584,
    workers=1,
    updated=NOW - timedelta(minutes=10),
    command="plait train runs/first/recipe.toml 'train.budget=120 steps'",
)
SECOND = replace(
    FIRST, name="second", state="stopped", step=383, step_saved=350, steps=4000, loss=5.1972, loss_text="last step",
    loss_unit="nats per token", updated=NOW - timedelta(days=3), command="plait train runs/second/recipe.toml",
)  # fmt: skip
LEFT = replace(
    FIRST, name="left", state="not begun", step=0, step_saved=None, steps=None, loss=None, loss_text=None,
    loss_unit=None, tokens_per_s=None, parameters=None, command="", updated=NOW,
)  # fmt: skip
OLD = replace(
    LEFT, name="old", state="unreadable", problem='"runs/old/plan.json" is of another version; take another name'
)
RUNS = [LEFT, FIRST, SECOND, OLD]
TABLE = """\
run     state       step                       loss                         tokens/s  size  changed
left    not begun                                                                           now
  nothing was trained; plait remove left deletes what is left
first   finished    60 of 60                   2.014 per byte               11.6K     316K  10 min ago
  plait train runs/first/recipe.toml 'train.budget=120 steps'
second  stopped     383 of 4,000 (saved: 350)  5.197 per token (last step)  11.6K     316K  3 days ago
  plait train runs/second/recipe.toml
old     unreadable                                                                          now
  "runs/old/plan.json" is of another version; take another name"""
NARROW = """\
left
  not begun, now
  nothing was trained; plait remove
  left deletes what is left
first
  finished, step 60 of 60, loss 2.014
  per byte, 11.6K tokens/s, 316K
  parameters, 10 min ago
  plait train runs/first/recipe.toml 'train.budget=120 steps'
second
  stopped, step 383 of 4,000 (saved:
  350), loss 5.197 per token (last
  step), 11.6K tokens/s, 316K
  parameters, 3 days ago
  plait train runs/second/recipe.toml
old
  unreadable, now
  "runs/old/plan.json" is of another
  version; take another name"""


@pytest.mark.parametrize("columns", [None, 110])
def test_a_table_where_there_is_room(columns: int | None) -> None:
    assert runs_text(RUNS, now=NOW, columns=columns) == TABLE


def test_a_few_lines_for_each_run_on_a_narrow_terminal_and_commands_stay_whole() -> None:
    assert runs_text(RUNS, now=NOW, columns=38) == NARROW
    assert max(len(line) for line in NARROW.splitlines() if "plait train" not in line) <= 38


@pytest.mark.parametrize("columns", range(10, 130, 7))
def test_every_run_is_there_on_any_width(columns: int) -> None:
    shown = runs_text(RUNS, now=NOW, columns=columns)
    assert all(one.name in shown and one.command in shown for one in RUNS)


def test_ages() -> None:
    ages = {0: "now", -5: "now", 12: "12 s ago", 100: "2 min ago", 7200: "2 h ago", 90_000: "25 h ago"}
    assert {seconds: age_text(seconds) for seconds in ages} == ages
    assert age_text(400 * 86400) == "400 days ago"


def test_status_without_a_name_says_what_runs_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    empty = CliRunner().invoke(app, ["runs"])
    assert empty.output == f"no runs in {tmp_path}/runs; train one with: plait train RECIPE\n" and empty.exit_code == 0
    assert CliRunner().invoke(app, ["runs", "--json"]).output == "[]\n"
    written_run(CURRENT_FOLDER, "first")
    runs, status = (CliRunner().invoke(app, [command, "--json"]).output for command in ("runs", "status"))
    assert runs == status and [one["name"] for one in json.loads(runs)] == ["first"]
    assert CliRunner().invoke(app, ["status"]).output.startswith("run    state")
    refused = CliRunner().invoke(app, ["status", "--ledger"])
    assert str(refused.exception) == "--ledger needs one run; name it: plait status RUN --ledger"
