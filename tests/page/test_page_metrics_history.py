"""The curves of a run: exact where there are few steps, exact means and extremes where there are many."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isclose, nan
from pathlib import Path

import pytest

from plait.page.metrics_history import COLUMNS, MOST_HISTORY_BUCKETS, SINGLE_STEPS_KEPT, VALUES, MetricsHistory
from plait.report.metrics import StepReport
from tests.report.test_report_metrics import eval_report, step_report

Row = dict[str, float | None]


def rows_of(history: MetricsHistory, after: int = 0) -> tuple[int, list[Row]]:
    history.update()
    begins_after, rows = history.rows(after)
    return begins_after, [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def varied(steps: int, seed: int = 1) -> list[StepReport]:
    drawn = random.Random(seed)
    return [
        replace(step_report(step), **{value: drawn.uniform(0.1, 9.0) for value in VALUES})
        for step in range(1, steps + 1)
    ]


def write(path: Path, reports: Sequence[StepReport]) -> None:
    with path.open("a") as file:
        file.writelines(report.to_line() for report in reports)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_few_steps_are_the_lines_themselves(path: Path) -> None:
    reports = varied(100)
    write(path, reports)
    begins_after, rows = rows_of(MetricsHistory(path))
    assert begins_after == 0 and len(rows) == 100
    for row, report in zip(rows, reports, strict=True):
        assert (row["first"], row["last"], row["tokens"]) == (report.step, report.step, report.tokens)
        for value in VALUES:
            assert row[value] == row[f"{value}_min"] == row[f"{value}_max"] == getattr(report, value)


@pytest.mark.parametrize(("steps", "chunk"), [(1025, 1), (2500, 7), (5000, 1000), (20_000, 20_000)])
def test_many_steps_are_buckets_however_they_arrive(path: Path, steps: int, chunk: int) -> None:
    reports, history = varied(steps), MetricsHistory(path)
    for begin in range(0, steps, chunk):
        write(path, reports[begin : begin + chunk])
        history.update()
    _, rows = rows_of(history)
    assert MOST_HISTORY_BUCKETS / 2 - 1 <= len(rows) <= MOST_HISTORY_BUCKETS + 1
    at = 0
    for row in rows:
        assert row["first"] == at + 1
        inside = reports[at : int(row["last"] or 0)]
        for value in VALUES:
            numbers = [getattr(one, value) for one in inside]
            assert row[f"{value}_min"] == min(numbers) and row[f"{value}_max"] == max(numbers)
            assert isclose(row[value] or 0, sum(numbers) / len(numbers), rel_tol=1e-9)
        assert row["tokens"] == inside[-1].tokens
        at += len(inside)
    assert at == steps
    assert isclose(history.stepping_s, sum(one.step_s for one in reports), rel_tol=1e-9)


def test_a_page_that_follows_gets_each_step_by_itself(path: Path) -> None:
    reports, history = varied(6000), MetricsHistory(path)
    write(path, reports)
    assert rows_of(history, after=5990) == (5990, rows_of(history, after=5990)[1])
    begins_after, rows = rows_of(history, after=5990)
    assert begins_after == 5990 and [row["loss"] for row in rows] == [one.loss for one in reports[5990:]]
    assert rows_of(history, after=6000) == (6000, [])
    oldest = 6000 - SINGLE_STEPS_KEPT
    assert len(rows_of(history, after=oldest)[1]) == SINGLE_STEPS_KEPT
    assert rows_of(history, after=oldest - 1)[0] == 0, "so old a step is known in a bucket alone: all are sent"


def test_what_is_not_finite_is_null_and_in_no_mean(path: Path) -> None:
    write(path, [replace(step_report(1), loss=nan, mfu=None), replace(step_report(2), grad_norm=inf)])
    first, second = rows_of(MetricsHistory(path))[1]
    assert first["loss"] is None and first["loss_max"] is None and first["mfu"] is None and second["grad_norm"] is None
    write(path, [step_report(step) for step in range(3, 2049)])
    row = rows_of(MetricsHistory(path))[1][0]
    assert row["last"] == 2 and row["loss"] == second["loss"] == row["loss_min"] and row["mfu"] == 0.5


def test_evaluations_stand_apart(path: Path) -> None:
    history = MetricsHistory(path)
    with path.open("w") as file:
        file.write(step_report(1).to_line() + eval_report(1).to_line() + step_report(2).to_line())
        file.write(replace(eval_report(2), eval_loss=nan).to_line())
    assert [row["last"] for row in rows_of(history)[1]] == [1, 2]
    assert history.evaluations == [{"step": 1, "eval_loss": 4.0, "eval_nats_per_byte": 1.6}]


def test_a_torn_last_line_waits_and_damaged_lines_are_counted(path: Path) -> None:
    line = step_report(3).to_line()
    path.write_text(f"{step_report(1).to_line()}what\n[1]\n{step_report(2).to_line()}{line[:40]}")
    history = MetricsHistory(path)
    assert [row["last"] for row in rows_of(history)[1]] == [1, 2] and history.damaged_lines == 2
    with path.open("a") as file:
        file.write(line[40:])
    assert [row["last"] for row in rows_of(history, after=2)[1]] == [3] and history.damaged_lines == 2
    whole = path.with_name("new")
    write(whole, [step_report(1)])
    whole.replace(path)
    assert len(rows_of(history)[1]) == 1 and history.damaged_lines == 0, "those of the file that is gone"


def test_a_run_that_went_back_begins_anew(path: Path) -> None:
    write(path, varied(50))
    history = MetricsHistory(path)
    rows_of(history)
    shorter = path.with_name("new")
    write(shorter, [step_report(step) for step in range(1, 21)])
    shorter.replace(path)
    _, rows = rows_of(history)
    assert history.version == 1 and len(rows) == 20 and rows[4]["loss"] == step_report(5).loss
    path.unlink()
    assert rows_of(history) == (0, []) and history.version == 2 and history.stepping_s == 0


def test_lines_of_earlier_versions_lack_keys(path: Path) -> None:
    path.write_text('{"step": 1, "tokens": 64, "loss": 2.5}\n')
    [row] = rows_of(MetricsHistory(path))[1]
    assert row["loss"] == 2.5 and row["mfu"] is None and row["step_s"] is None


@pytest.mark.slow
def test_a_million_lines_open_quickly(path: Path) -> None:
    """The bar is 1.5 s on a machine that does nothing else: of processor time, as the suite's machines are busy."""
    line = json.loads(step_report(1).to_line()) | {"loss": 2.345678901234567, "step_s": 0.6123456789012345}
    with path.open("w") as file:
        for step in range(1, 1_000_001):
            line |= {"step": step, "tokens": step * 6144}
            file.write(json.dumps(line) + "\n")
    history, began = MetricsHistory(path), time.process_time()
    history.update()
    rows = history.rows()[1]
    text = json.dumps(rows)
    spent_s = time.process_time() - began
    assert spent_s <= 1.5 and rows[-1][1] == 1_000_000 and len(text) < 1 << 20
