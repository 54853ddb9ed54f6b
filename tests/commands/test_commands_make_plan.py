"""For whom a plan was made: the recipe but for its name and place, the text, the machine and the workers, the roads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plait.commands.planning.make_plan import (
    MachineSurvey,
    kept_plan,
    make_plan,
    plan_key,
    proven_plan,
    replan,
    resources_of,
)
from plait.commands.planning.plan_report import training_section
from plait.commands.preparing.corpus import corpus_facts
from plait.data.preparation.synthetic import write_synthetic
from plait.data.shards import Corpus, open_corpus
from plait.errors import RunFailed
from plait.launch.values.job import Job, JobResult, Message
from plait.layout import Layout
from plait.machines.cluster import Cluster
from plait.planner.calibration.factors import Observation
from plait.planner.derive import training_job
from plait.planner.derive.resources import FixedWorkers, ProbeNeed
from plait.planner.plan import Forecast, Plan
from plait.planner.resolve import request, resolve
from plait.planner.resolve.resolve import draft
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.probing.calibration_store import add_observation
from plait.workers import PRODUCTS_ENTRY, OnMessage
from plait.working_folder import CURRENT_FOLDER
from tests.commands.other_values import OTHER_VALUES, base_recipe, changed_recipe
from tests.commands.product_answers import product_message, rates_of
from tests.planner.hosts import HOST, probed
from tests.planner.machines import LAPTOP, recipe

SLOW_BF16 = rates_of(LAPTOP, {"onednn": 0.7, "bf16": 0.5})


class NobodyYet:
    """Workers that only measure their products."""

    working_folder = CURRENT_FOLDER

    def __init__(self, given: FixedWorkers | None = None) -> None:
        self.fixed_workers = given

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        assert job.entry == PRODUCTS_ENTRY, "neither a key nor a named layout needs a worker"
        on_message(product_message(job, SLOW_BF16))
        return JobResult(stopped_by="finished", wall_s=1.0)


@pytest.mark.parametrize("key", sorted(OTHER_VALUES))
def test_name_and_place_do_not_count_and_all_else_does(tmp_path: Path, key: str) -> None:
    base, other = (
        plan_key(config, "text", LAPTOP, NobodyYet())
        for config in (base_recipe(tmp_path, key), changed_recipe(tmp_path, key))
    )
    assert (base == other) == (key in ("run.name", "data.files", "recover.give_up_after") or key.startswith("plan."))


def test_text_machine_and_given_workers_count(tmp_path: Path) -> None:
    config = base_recipe(tmp_path)
    keys = [
        plan_key(config, "text", LAPTOP, NobodyYet()),
        plan_key(config, "other text", LAPTOP, NobodyYet()),
        plan_key(config, "text", replace(LAPTOP, cores=7), NobodyYet()),
        plan_key(config, "text", replace(LAPTOP, versions=(("torch", "3"),)), NobodyYet()),
        plan_key(config, "text", LAPTOP, NobodyYet(FixedWorkers(workers=2, threads=1))),
        plan_key(config, "text", LAPTOP, NobodyYet(FixedWorkers(workers=3, threads=1))),
    ]
    assert len(set(keys)) == len(keys)
    assert plan_key(config, "text", LAPTOP, NobodyYet()) == keys[0]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A prepared text, in a folder of its own to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    return open_corpus(write_synthetic(tmp_path / "corpus", vocabulary=256, sequence=64, seed=1))


@pytest.mark.parametrize(("budget", "sizings"), [("9 steps", 1), ("1 minute", 2)])
def test_a_plan_is_sized_once_unless_its_budget_is_a_time(
    budget: str, sizings: int, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time is sized at a usual rate, and then at the one that the forecast promises."""
    calls = Counter[str]()

    def count(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, counted)

    count(training_job, "derive_run_size")
    count(request, "run_arithmetic")
    count(resolve, "request_of")
    config = recipe(tmp_path, "train.sequence=64", f"train.budget={budget}", "layout.replicate=2")
    make_plan(config, corpus, MachineSurvey(machine=LAPTOP, peak_flops=4e11), OneTooMany(), fresh=True, say=print)
    requests = 1 if budget == "9 steps" else 2
    assert calls == {"derive_run_size": sizings, "run_arithmetic": requests, "request_of": requests}


class OneTooMany:
    """Workers of which so many together fail, and the others take a second a step."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def __init__(self, *failing: int) -> None:
        self.failing = failing

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        if job.entry == PRODUCTS_ENTRY:
            on_message(product_message(job, SLOW_BF16))
            return JobResult(stopped_by="finished", wall_s=1.0)
        if job.world_size in self.failing:
            raise RunFailed("rank 1 was killed by SIGKILL; memory may be short")
        on_message(Message(rank=0, kind="measured", values={"step_s": 1.0}))
        return JobResult(stopped_by="finished", wall_s=1.0)


def test_a_layout_that_fails_leaves_the_proof_to_the_others(tmp_path: Path, corpus: Corpus) -> None:
    open_layout = ("model.size=1M", "train.sequence=64", "train.batch_tokens=4096", "train.budget=9 steps")
    config, site = recipe(tmp_path, *open_layout), MachineSurvey(machine=LAPTOP, peak_flops=4e11)
    timed: list[WorkerLayout] = []
    failed: list[WorkerLayout] = []

    def proven(*failing: int) -> Plan:
        workers = OneTooMany(*failing)
        return proven_plan(
            config,
            corpus,
            site,
            workers,
            count=4,
            on_timed=timed.append,
            on_failed=lambda split, _: failed.append(split),
        )[0]

    proven()
    counts = sorted({split.workers for split in timed})
    assert len(counts) > 1 and not failed
    timed.clear()
    plan = proven(*counts[1:])
    assert plan.world_size == counts[0] and {split.workers for split in timed} == {counts[0]} and failed
    with pytest.raises(RunFailed, match="killed by SIGKILL"):
        proven(*counts)


def test_a_plan_made_before_keeps_the_step_that_was_timed_whatever_runs_have_taught_since(
    tmp_path: Path, corpus: Corpus
) -> None:
    config = recipe(tmp_path, "model.size=1M", "train.sequence=64", "train.batch_tokens=4096", "train.budget=9 steps")
    site, workers, said = MachineSurvey(machine=LAPTOP, peak_flops=4e11), OneTooMany(), list[str]()

    def forecast() -> Forecast:
        found = make_plan(config, corpus, site, workers, fresh=False, say=said.append).forecast
        assert found is not None
        return found

    first = forecast()
    assert first.step_s == pytest.approx(1.0), "as the workers timed it"
    formulas_s = first.step_s / first.calibration.timed
    for _ in range(3):
        add_observation(first.calibration.ground, Observation(date="2026-11-23", compute=1.3, messages=None))
    again = forecast()
    assert "as made before" in said[-1]
    assert again.step_s == pytest.approx(1.0) and (again.calibration.runs, again.calibration.compute) == (3, 1.3)
    assert again.step_s / again.calibration.timed == pytest.approx(1.3 * formulas_s, rel=0.05)


def test_a_plan_on_paper_says_what_a_run_here_will_take(tmp_path: Path, corpus: Corpus) -> None:
    open_layout = ("model.size=1M", "train.sequence=64", "train.batch_tokens=4096", "train.budget=9 steps")
    config, site, workers = recipe(tmp_path, *open_layout), MachineSurvey(machine=LAPTOP, peak_flops=4e11), OneTooMany()
    layouts = draft(config, corpus_facts(corpus), resources_of(site, workers), recipe_hash="").layouts

    def section(kept: Plan | None, *, among: int = len(layouts), forecast: Layout = layouts[0].layout) -> str:
        return " / ".join(training_section(kept, layouts[:among], forecast).lines)

    assert len(layouts) > 1 and kept_plan(config, corpus, site, workers) is None
    assert f"times {len(layouts)} layouts on this machine, then chooses: " in section(None) and "forecast" in section(
        None
    )
    assert section(None, among=1) == "a new run takes one copy (1 worker × 8 threads)"

    proven, _ = proven_plan(
        config, corpus, site, workers, count=2, on_timed=lambda _: None, on_failed=lambda _, error: None
    )
    kept = kept_plan(config, corpus, site, workers)
    assert kept is not None and kept.placement.layout == proven.placement.layout
    assert make_plan(config, corpus, site, workers, fresh=False, say=lambda _: None) == kept
    assert "1 s a step, as timed here when it was planned; --replan plans again" in section(kept)
    assert "forecast" not in section(kept, among=1, forecast=kept.placement.layout)
    assert "forecast" in section(kept, among=1, forecast=Layout(tensor=2))
    assert "as planned before" in section(replace(kept, step_s=None))


def test_a_begun_run_whose_step_was_timed_has_it_timed_again_elsewhere(tmp_path: Path, corpus: Corpus) -> None:
    named = ("model.size=1M", "train.sequence=64", "train.batch_tokens=4096", "layout.replicate=2")
    site, said = MachineSurvey(machine=LAPTOP, peak_flops=4e11), list[str]()
    for budget, step_s in (("9 steps", None), ("2 minutes", 1.0)):  # what the second one keeps serves both
        config = recipe(tmp_path, *named, f"train.budget={budget}")
        begun = make_plan(config, corpus, site, OneTooMany(), fresh=False, say=said.append)
        again = replan(config, begun, corpus, site, OneTooMany(), said.append)
        assert begun.step_s == step_s == (again.step_s and round(again.step_s, 9))
        assert again.forecast is not None and again.forecast.calibration.is_measured == (step_s is not None)


def test_a_few_pages_of_memory_more_are_the_same_machine(tmp_path: Path) -> None:
    config = base_recipe(tmp_path)
    moved = replace(LAPTOP, memory_bytes=LAPTOP.memory_bytes + 40_960)
    assert plan_key(config, "text", moved, NobodyYet()) == plan_key(config, "text", LAPTOP, NobodyYet())


def test_a_plan_over_hosts_is_made_anew_once_a_look_finds_other_roads(tmp_path: Path, corpus: Corpus) -> None:
    config = changed_recipe(tmp_path, "run.name")
    hosts, wide, narrow = (1.0, 1.0, 1.0, 1.0), 1e9, 1e6
    said: list[str] = []
    looks: list[ProbeNeed] = []

    def planned(rate: float, fresh: bool = False) -> float:
        def look(need: ProbeNeed) -> Cluster:
            looks.append(need)
            return probed(*hosts, rate=rate)

        site, workers = (
            MachineSurvey(machine=HOST, peak_flops=None, probe=look),
            NobodyYet(FixedWorkers(workers=4, threads=1)),
        )
        forecast = make_plan(config, corpus, site, workers, fresh=fresh, say=said.append).forecast
        assert forecast is not None
        return forecast.step_s

    fast = planned(wide)
    assert not said
    assert planned(wide) == fast and "as made before" in said[-1]
    slow = planned(narrow)
    assert slow > 2 * fast and "made again" in said[-1]
    assert planned(narrow) == slow and "as made before" in said[-1]
    assert len(looks) == 4 and looks[1] == looks[0], "one look a start, for the same model"
