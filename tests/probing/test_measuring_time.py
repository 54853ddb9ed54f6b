"""Measuring before a run has a bound, and what earlier runs of similar models measured is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from plait.commands.planning.make_plan import make_plan
from plait.data.preparation.synthetic import write_synthetic
from plait.data.shards import Corpus, open_corpus
from plait.errors import OutOfTime
from plait.launch.values.copies import CopiesByStep
from plait.launch.values.job import Job, JobResult, Message
from plait.machines.measured import Arithmetic
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.probing.kept import KeptFactor, keep_timings, load_timings, nearest
from plait.probing.measuring_time import MeasuringTime, Timing, allowed_s
from plait.probing.steps import with_ratio_of_timed
from plait.probing.survey import MachineSurvey
from plait.trainer.time_steps import Pace, after_warm_up
from plait.units import Amount
from plait.workers import PRODUCTS_ENTRY, TIMING_ENTRY, OnMessage
from plait.working_folder import CURRENT_FOLDER, WorkingFolder
from tests.commands.product_answers import product_message, rates_of
from tests.planner.machines import LAPTOP, PLAYS, drafted, recipe

ADAMW = ("train.precision=float32", "optimizer.kind=adamw")
SMALL = ("model.size=1M", "train.sequence=64", "train.batch_tokens=4096")
FAST_BF16: Mapping[Arithmetic, float] = {"onednn": 2.0, "bf16": 5.0}


class Machine:
    """Workers of a laptop that take a second a step, half of one in bf16; a busy one finishes nothing in time."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def __init__(self, *, slow: tuple[str, ...] = (), granted: float = 1.0) -> None:
        self.site = MachineSurvey(machine=LAPTOP, peak_flops=4e11)
        self.slow, self.granted = slow, granted
        self.jobs: list[Job] = []
        self.timed: list[Plan] = []

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        self.jobs.append(job)
        if job.entry in self.slow:
            raise OutOfTime("the workers were not done")
        if job.entry == PRODUCTS_ENTRY:
            on_message(product_message(job, rates_of(LAPTOP, FAST_BF16)))
        else:
            plan = read_plan(Path(json.loads(job.argument)["folder"]) / "plan.json")
            self.timed.append(plan)
            step_s = 0.5 if plan.arithmetic.precision == "bf16" else 1.0
            on_message(Message(rank=0, kind="measured", values={"step_s": step_s, "granted": self.granted}))
        return JobResult(stopped_by="finished", wall_s=1.0)

    def copied_steps(self, lineage: int) -> tuple[()]:
        return ()

    def copies(self, lineage: int) -> CopiesByStep:
        return {}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    return open_corpus(write_synthetic(tmp_path / "corpus", vocabulary=256, sequence=64, seed=1))


def planned(
    folder: Path, corpus: Corpus, machine: Machine, *named: str, budget: str = "9 steps", timing: Timing = "bounded"
) -> Plan:
    config = recipe(folder, *SMALL, f"train.budget={budget}", *named)
    return make_plan(config, corpus, machine.site, machine, fresh=False, say=lambda line: None, timing=timing)


@pytest.mark.parametrize(("budget", "seconds"), [("4 minutes", 24.0), ("20 seconds", 2.0), ("1000 steps", 60.0)])
def test_measuring_may_take_a_tenth_of_a_time_and_else_a_minute(
    tmp_path: Path, corpus: Corpus, budget: str, seconds: float
) -> None:
    machine = Machine()
    planned(tmp_path, corpus, machine, budget=budget)
    assert machine.jobs and all(0 < job.limit_s <= seconds for job in machine.jobs)
    assert sum(job.limit_s for job in machine.jobs if job.entry == PRODUCTS_ENTRY) <= 0.3 * seconds + 0.1


def test_time_that_is_over_starts_nothing() -> None:
    now_s = 0.0
    time = MeasuringTime(limit_s=allowed_s(Amount(100, "seconds")), ends_at_s=10.0, clock=lambda: now_s)
    job = Job(entry="hello", argument="", world_size=1, threads=1)
    assert time.part(0.5).limited(job).limit_s == 5.0
    now_s = 9.9
    with pytest.raises(OutOfTime):
        time.limited(job)


@pytest.mark.parametrize(
    ("slow", "what"),
    [((PRODUCTS_ENTRY,), "the speed of matrix products"), ((TIMING_ENTRY,), "steps of 4 layouts")],
)
def test_what_a_busy_machine_could_not_measure_is_forecast_and_said(
    tmp_path: Path, corpus: Corpus, slow: tuple[str, ...], what: str
) -> None:
    plan = planned(tmp_path, corpus, Machine(slow=slow), budget="4 minutes")
    (sentence,) = [reason for reason in plan.reasons if reason.startswith("no time to measure (limit 24 s): ")]
    assert what in sentence and plan.job.steps > 1
    assert plan.arithmetic.precision == "float32"


def test_no_timing_times_nothing_and_says_so(tmp_path: Path, corpus: Corpus) -> None:
    machine = Machine()
    plan = planned(tmp_path, corpus, machine, timing="none")
    assert not machine.jobs and plan.step_s is None
    assert any(reason.startswith("not measured (--no-timing): ") for reason in plan.reasons)


def test_a_named_layout_and_steps_leave_nothing_to_compare(tmp_path: Path, corpus: Corpus) -> None:
    machine = Machine()
    planned(tmp_path, corpus, machine, "layout.replicate=2", "train.precision=float32")
    assert not machine.timed


def test_another_batch_and_a_similar_model_are_planned_by_what_was_timed(tmp_path: Path, corpus: Corpus) -> None:
    first = Machine()
    planned(tmp_path, corpus, first, *ADAMW)
    assert len({plan.world_size for plan in first.timed}) > 1
    for named in (("train.batch_tokens=8192",), ("model.width=160",), ("model.layers=5", "train.batch_tokens=2048")):
        later = Machine()
        plan = planned(tmp_path, corpus, later, *ADAMW, *named)
        assert not later.jobs and plan.forecast is not None and plan.forecast.calibration.is_measured
    other = Machine()
    planned(tmp_path, corpus, other, "train.precision=float32", "model.size=11M")
    assert other.timed, "three times as wide is not similar"


def test_steps_that_were_timed_beside_another_program_choose_a_layout_and_count_no_steps(
    tmp_path: Path, corpus: Corpus
) -> None:
    planned(tmp_path, corpus, Machine(granted=0.6), *ADAMW)
    later = Machine()
    plan = planned(tmp_path, corpus, later, *ADAMW, "train.batch_tokens=8192")
    assert not later.jobs and plan.step_s is None, "the forecast goes by them"
    counted = planned(tmp_path, corpus, later, *ADAMW, budget="4 minutes")
    assert len(later.timed) == 1 and counted.step_s == 1.0, "the layout that is chosen so is timed"


def test_a_busy_hour_does_not_replace_what_a_quiet_one_measured(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    for value, granted in ((1.0, 0.99), (3.0, 0.5), (1.1, 0.95)):
        factor = KeptFactor(name="step", sizes=(8,), value=value, granted=granted)
        keep_timings(working, LAPTOP, factors=[factor])
        (kept,) = load_timings(working, LAPTOP).factors
        assert kept.value == (value if granted > 0.9 else 1.0)


def test_what_several_processes_measure_at_once_is_all_kept(tmp_path: Path) -> None:
    working, together = WorkingFolder(tmp_path), Barrier(8)

    def keep(number: int) -> None:  # a lock belongs to an open file: threads lock each other out as processes do
        together.wait()
        keep_timings(working, LAPTOP, factors=[KeptFactor(name=f"step {number}", sizes=(8,), value=1.0)])

    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(keep, range(8)))
    assert {one.name for one in load_timings(working, LAPTOP).factors} == {f"step {number}" for number in range(8)}


def test_a_short_run_takes_bf16_by_one_quick_round_or_by_what_is_known(tmp_path: Path, corpus: Corpus) -> None:
    named = ("layout.replicate=2", "train.batch_tokens=16384", "model.size=11M")
    quick = Machine()
    short = planned(tmp_path, corpus, quick, *named, budget="15 steps")
    assert short.arithmetic.precision == "bf16" and len(quick.timed) <= 4
    known = Machine()
    again = planned(tmp_path, corpus, known, *named, budget="1 steps")
    assert again.arithmetic.precision == "bf16" and not known.timed
    assert any("as timed here before" in reason for reason in again.reasons)


def test_the_nearest_sizes_are_taken_and_none_that_are_not_similar() -> None:
    kept = [KeptFactor(name="a", sizes=sizes, value=value) for sizes, value in (((100, 8), 1.0), ((150, 8), 2.0))]
    assert nearest(kept, "a", (140, 8)) == kept[1] and nearest(kept, "a", (110, 9)) == kept[0]
    assert nearest(kept, "a", (310, 8)) is None is nearest(kept, "b", (100, 8)) is nearest(kept, "a", (100,))


def test_steps_are_timed_until_they_are_steady_or_the_time_is_short() -> None:
    pace = Pace(least_s=1.0, ends_at_s=100.0)
    assert not pace.is_enough([9.0, 9.0, 0.3, 0.3, 0.3], now_s=19.0)
    assert pace.is_enough([9.0, 9.0, 0.3, 0.3, 0.3, 0.3], now_s=20.0)
    unsteady = [9.0, 9.0, *[0.2, 0.4] * 3]
    assert not pace.is_enough(unsteady, now_s=20.0) and pace.is_enough([*unsteady, *unsteady[2:]], now_s=22.0)
    steady = [9.0, 0.5, 0.51, 0.49]
    assert pace.is_enough(steady, now_s=20.0) and after_warm_up(steady) == steady[1:], "the second was no slower"
    assert not pace.is_enough([9.0, 0.9, 0.5, 0.51], now_s=20.0) and after_warm_up([9.0, 0.9, 0.5]) == [0.5]
    short = replace(pace, ends_at_s=20.0)
    assert short.is_enough([9.0, 9.0], now_s=18.5), "a further one would end too late"
    assert not short.is_enough([12.0], now_s=12.0), "the first may have compiled, and times nothing"


def test_a_layout_that_was_not_timed_is_as_far_off_as_those_that_were(tmp_path: Path) -> None:
    found = drafted(recipe(tmp_path, "train.budget=1 minute", "model.size=1M"), PLAYS, LAPTOP)
    first, *others = found.layouts
    assert first.forecast and others
    compared = with_ratio_of_timed([replace(first, step_s=3 * first.forecast.step_s), *others])
    for before, after in zip(found.layouts, compared, strict=True):
        assert before.forecast and after.forecast
        assert after.forecast.step_s == pytest.approx(3 * before.forecast.step_s)
    assert with_ratio_of_timed(found.layouts) == list(found.layouts), "where none was timed"
