"""Where lessons lie, what watches a start, and what a run's end makes of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from plait.commands.monitoring.finish import finish_run
from plait.commands.monitoring.forecast_monitor import ForecastMonitor, Predicted
from plait.planner.calibration.factors import Calibration, Observation, StepItems
from plait.planner.plan import Forecast, HostShare
from plait.planner.resolve.resolve import updated_forecast
from plait.probing.calibration_store import add_observation, calibration_key, load_calibration, read_observations
from plait.report.metrics import StepReport
from plait.report.receipt_file import read_receipt
from plait.report.straggler import RankTimes
from plait.run_folder import RunFolder, RunTotals
from plait.screen.terminal import TerminalScreen
from plait.units import format_duration
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe

SAID = StepItems(compute_s=1.0, messages_s=0.2, optimizer_s=0.1)
GROUND = calibration_key([LAPTOP], "float32", "formulas")
FORETOLD = Predicted(items=SAID, calibration=Calibration(ground=GROUND), basis="formulas", error=0.05, tensor_bytes=1e8)


def report(step: int, step_s: float, data_wait_s: float = 0.0) -> StepReport:
    return StepReport(
        step=step,
        tokens=100 * step,
        loss=3.0,
        grad_norm=1.0,
        lr=1e-3,
        step_s=step_s,
        tokens_per_s=100 / step_s,
        mfu=None,
        data_wait_s=data_wait_s,
    )


def times(compute_s: float, wait_s: float) -> list[RankTimes]:
    """Of two ranks, the first of which has less to do and waits for the second."""
    first = RankTimes(rank=0, compute_s=compute_s / 2, wait_s=wait_s + compute_s / 2, data_s=0.0)
    return [first, RankTimes(rank=1, compute_s=compute_s, wait_s=wait_s, data_s=0.0)]


def watched(said: list[str], *, done: int = 0, every: int = 1, crowd: float | None = 1.0) -> ForecastMonitor:
    return ForecastMonitor(FORETOLD, done, every, log=said.append, load_per_core=lambda: crowd)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_lessons_come_back_the_last_ones_only_and_by_machine_precision_and_basis(here: Path) -> None:
    assert load_calibration(GROUND) == Calibration(ground=GROUND)
    for number in range(25):
        add_observation(GROUND, Observation(date="2026-11-21", compute=1 + number / 100, messages=None))
    assert [one.compute for one in read_observations(GROUND)] == [1 + number / 100 for number in range(5, 25)]
    assert load_calibration(GROUND).compute == pytest.approx(1.22)
    others = [
        calibration_key([replace(LAPTOP, cores=4)], "float32", "formulas"),
        calibration_key([replace(LAPTOP, versions=(("torch", "3"),))], "float32", "formulas"),
        calibration_key([LAPTOP, LAPTOP], "float32", "formulas"),
        calibration_key([LAPTOP], "bf16", "formulas"),
        calibration_key([LAPTOP], "float32", "clock"),
    ]
    assert len({GROUND, *others}) == 6
    assert all(load_calibration(other).runs == 0 for other in others)
    more, less = replace(LAPTOP, cores=16), replace(LAPTOP, cores=2)
    places = [(LAPTOP, more, less), (LAPTOP, less, more), (more, LAPTOP, less)]
    first, turned, led = (calibration_key(machines, "float32", "formulas") for machines in places)
    assert first == turned != led, "where the others stand is the plan's matter"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "lessons": []}',
        '{"format": 1, "lessons": [{"date": "x", "compute": -1, "messages": null}]}',
    ],
)
def test_a_file_that_is_none_of_ours_counts_as_not_there_and_is_replaced(here: Path, text: str) -> None:
    path = here / ".plait" / "calibration" / f"{GROUND}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert read_observations(GROUND) == ()
    add_observation(GROUND, Observation(date="2026-11-21", compute=1.1, messages=0.9))
    assert read_observations(GROUND) == (Observation(date="2026-11-21", compute=1.1, messages=0.9),)
    assert json.loads(path.read_text())["format"] == 1


def test_the_first_full_steps_are_told_once_and_by_the_rank_with_most_to_do() -> None:
    said: list[str] = []
    watch = watched(said)
    for step in range(1, 20):
        watch.add_step_report(report(step, 9.0 if step <= 3 else 1.3))
        watch.add_rank_times(step, times(1.0, 0.2))
    assert said == [
        "the plan said 1.3 s a step (1 s computing, 0.2 s messages, 0.1 s optimizer); 5 steps took 1.3 s each (1 s "
        "computing, 0.2 s messages, 0.1 s optimizer): as planned"
    ]
    came = watch.observed
    assert came is not None and came.steps == 16 and came.items is not None
    assert came.items.optimizer_s == pytest.approx(0.1)


def test_a_slow_start_says_what_is_off() -> None:
    said: list[str] = []
    watch = watched(said, done=100)
    for step in range(101, 110):
        watch.add_step_report(report(step, 2.3))
        watch.add_rank_times(step, times(2.0, 0.2))
    assert len(said) == 2 and said[0].endswith("77% slower")
    assert said[1].startswith("computing takes 2 s, and the plan said 1 s: another program may be running")


def test_steps_that_share_a_report_with_the_first_ones_do_not_count() -> None:
    said: list[str] = []
    watch = watched(said, every=10)
    for step in range(1, 11):
        watch.add_step_report(report(step, 5.0))
    assert watch.observed is None and not said
    for step in range(11, 21):
        watch.add_step_report(report(step, 1.3))
    assert not said and watch.observed is not None and watch.observed.steps == 10
    for step in range(11, 21):
        watch.add_rank_times(step, times(1.0, 0.2))
    watch.add_step_report(report(21, 1.3))
    assert len(said) == 1 and "10 steps took 1.3 s each (1 s computing" in said[0]


def test_what_ranks_tell_may_come_late_and_if_never_whole_steps_are_told() -> None:
    said: list[str] = []
    watch = watched(said)
    for step in range(1, 15):
        watch.add_step_report(report(step, 1.3))
    for step in range(1, 15):
        watch.add_rank_times(step, times(1.0, 0.2))
    assert not said
    watch.add_step_report(report(15, 1.3))
    assert len(said) == 1 and "5 steps took 1.3 s each (1 s computing" in said[0]
    alone: list[str] = []
    watch = watched(alone)
    for step in range(1, 40):
        watch.add_step_report(report(step, 1.3))
    assert len(alone) == 1 and alone[0].endswith("5 steps took 1.3 s each: as planned")


def test_a_start_of_few_steps_is_told_at_its_end() -> None:
    said: list[str] = []
    watch = watched(said)
    for step in range(1, 6):
        watch.add_step_report(report(step, 1.3))
        watch.add_rank_times(step, times(1.0, 0.2))
    assert not said
    watch.finish()
    watch.finish()
    assert len(said) == 1 and "; 2 steps took 1.3 s each (1 s computing" in said[0]
    nothing: list[str] = []
    watched(nothing).finish()
    assert not nothing, "the first steps warm up"


def test_memory_is_told_once() -> None:
    said: list[str] = []
    watch = watched(said)
    for _ in range(3):
        watch.add_memory_peaks([int(1.1e8), int(1.3e8)])
    assert len(said) == 1 and said[0].startswith("tensors take up to 124 MiB")
    watched(said).add_memory_peaks([int(0.9e8), int(1.02e8)])
    assert len(said) == 1


def finished(
    here: Path,
    watch: ForecastMonitor | None,
    steps: list[StepReport],
    hosts: tuple[HostShare, ...] = (),
    gpu: str = "",
    forecast: Forecast | None = None,
    step_s: float | None = None,
) -> str:
    """Conclude a run of these steps; returns what it printed."""
    plan = planned(recipe(here, "layout.replicate=2", "train.budget=20 steps"), PLAYS, LAPTOP)
    if gpu:
        plan = replace(
            plan,
            machines=replace(
                plan.machines, device="cuda", fingerprint={**plan.machines.fingerprint, "name": gpu}, hosts=hosts
            ),
        )
    plan = replace(plan, forecast=forecast or plan.forecast, step_s=step_s)
    folder = RunFolder(here / "run")
    folder.path.mkdir(exist_ok=True)
    folder.metrics.write_text("".join(one.to_line() for one in steps))
    folder.write_totals(RunTotals(wall_s=30.0, device_s=60.0, peak_tensor_bytes=(10**8,), peak_rss_bytes=(5 * 10**8,)))
    screen = StringIO()
    shown = TerminalScreen(Console(file=screen, width=400))
    finish_run(recipe(here, "train.budget=20 steps"), folder, plan, 0, shown, watch, details=["receipt"])
    return screen.getvalue()


def a_run(step_s: float, wait_s: float, steps: int = 30) -> tuple[ForecastMonitor, list[StepReport]]:
    watch, reports = watched([]), [report(step, step_s) for step in range(1, steps + 1)]
    for one in reports:
        watch.add_step_report(one)
        watch.add_rank_times(one.step, times(step_s - wait_s - 0.1, wait_s))
    return watch, reports


def test_a_quiet_run_teaches_the_next_plan_and_its_receipt_compares_item_by_item(
    here: Path,
) -> None:
    watch, reports = a_run(1.6, 0.4)
    told = finished(here, watch, reports)
    assert "computing took 1.09 and messages 2.00 times what the formulas said: the next plan here takes it in" in told
    [one] = read_observations(GROUND)
    assert one.compute == pytest.approx(1.2 / 1.1) and one.messages == pytest.approx(2.0)
    receipt = read_receipt(here / "run" / "receipt.json")
    assert receipt.measured_items is not None and receipt.predicted_items is not None
    assert receipt.measured_items["waiting_s"] == pytest.approx(0.4)
    assert receipt.predicted_items == SAID.measurable_items()
    assert receipt.one_device_from == "formulas" and receipt.taught_by_runs == 0
    assert "step time" in told and "computing 1.1 s (forecast 1 s)" in told


def test_a_receipt_holds_the_timed_step_against_the_run_and_tells_what_formulas_said(here: Path) -> None:
    plan = planned(recipe(here, "layout.replicate=2", "train.budget=20 steps"), PLAYS, LAPTOP)
    assert plan.forecast is not None
    forecast = updated_forecast(plan.forecast, plan.forecast.calibration, 1.25)
    told = finished(here, None, [report(step, 1.0) for step in range(1, 30)], forecast=forecast, step_s=1.25)
    assert "than timed" not in told, "said already"
    formulas = format_duration(plan.forecast.step_s)
    assert (
        f"1.25 s a step (timed before the run, formulas said {formulas}): the run was 20.0% faster than forecast"
        in told
    )
    receipt = read_receipt(here / "run" / "receipt.json")
    assert receipt.predicted_step_s == pytest.approx(1.25) and receipt.step_error == pytest.approx(0.25)
    assert receipt.untimed_step_s == pytest.approx(plan.forecast.step_s)
    told = finished(here, None, [report(step, 1.0) for step in range(1, 30)], step_s=1.25)
    assert "; timed before the run 1.25 s: 20.0% faster than timed" in told, "a probe's forecast stands beside it"
    assert read_receipt(here / "run" / "receipt.json").untimed_step_s is None


def test_steps_slower_than_those_that_were_timed_are_not_laid_to_the_formulas() -> None:
    said: list[str] = []
    foretold = replace(FORETOLD, calibration=Calibration(ground=GROUND, timed=0.5))
    watch = ForecastMonitor(foretold, 0, 1, log=said.append, load_per_core=lambda: 1.0)
    for step in range(1, 10):
        watch.add_step_report(report(step, 2.3))
        watch.add_rank_times(step, times(2.0, 0.2))
    assert "--replan, which times steps again" in said[1] and "formulas" not in said[1]


def test_a_disturbed_or_a_short_run_teaches_nothing_and_says_why(here: Path) -> None:
    watch = watched([])
    reports = [report(step, 1.3 if step % 3 else 2.6) for step in range(1, 40)]
    for one in reports:
        watch.add_step_report(one)
    assert "this run does not change later forecasts here: the times of its steps " in finished(here, watch, reports)
    crowded = watched([], crowd=1.9)
    even = [report(step, 1.3) for step in range(1, 40)]
    for one in even:
        crowded.add_step_report(one)
    assert "other programs were running" in finished(here, crowded, even)
    short, few = a_run(1.6, 0.4, steps=8)
    assert "it had fewer than 10 steps" in finished(here, short, few)
    assert read_observations(GROUND) == ()


def test_without_a_forecast_nothing_is_compared(here: Path) -> None:
    told = finished(here, None, [report(step, 1.0) for step in range(1, 30)])
    assert "learn" not in told
    assert read_receipt(here / "run" / "receipt.json").predicted_items is None


def test_unlike_hosts_are_named_and_have_no_common_price(here: Path) -> None:
    steps, gpu = [report(step, 1.0) for step in range(1, 30)], "NVIDIA GeForce RTX 4090"
    kinds = {"alike": ("one", "one"), "unlike": ("one", "other")}
    receipts = {}
    for name, (first, second) in kinds.items():
        hosts = (
            HostShare(name="new", workers=1, threads=1, machine=first),
            HostShare(name="old", workers=1, threads=1, machine=second),
        )
        finished(here, None, steps, hosts, gpu)
        receipts[name] = read_receipt(here / "run" / "receipt.json")
    alike, unlike = receipts["alike"], receipts["unlike"]
    assert alike.device == f"2 × {gpu}" and alike.cost_usd > 0 and alike.energy_wh > 0
    assert unlike.device == "new (1 worker) + old (1 worker)" and unlike.cost_usd is None and unlike.energy_wh is None
