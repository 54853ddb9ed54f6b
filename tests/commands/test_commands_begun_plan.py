"""A begun run goes on by its own plan without measuring the machine; another machine or a new layout asks for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from plait.commands.planning.begun_plan import refuse_other_text, resumed_plan
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.machines.machine import Machine
from plait.machines.requested_workers import PeakNeed
from plait.planner.derive.intervals import EVALUATIONS_AT_MOST, with_evaluations_left, with_raised_budget
from plait.planner.plan import Plan
from plait.probing.survey import MachineSurvey
from plait.workers import HostWorkers
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe


class _MeasuredError(Exception):
    pass


def _survey(machine: Machine, peak: PeakNeed) -> MachineSurvey:
    if peak == "measured":
        raise _MeasuredError
    return MachineSurvey(machine=machine, peak_flops=None)


def _resumed(plan: Plan, machine: Machine, folder: Path, *, fresh: bool = False) -> Plan:
    corpus = cast(Corpus, SimpleNamespace(content_hash=plan.job.corpus_hash, folder=folder))
    workers = cast(HostWorkers, SimpleNamespace(fixed_workers=None))
    config = recipe(folder, "model.size=1M")
    return resumed_plan(config, plan, corpus, partial(_survey, machine), workers, fresh=fresh, log=lambda line: None)


def test_a_plan_that_stays_needs_no_survey(tmp_path: Path) -> None:
    plan = planned(recipe(tmp_path, "model.size=1M"), PLAYS, LAPTOP)
    assert _resumed(plan, LAPTOP, tmp_path).placement.layout == plan.placement.layout


@pytest.mark.parametrize("case", ["another machine", "a new plan was asked for"])
def test_a_plan_that_changes_asks_for_it(tmp_path: Path, case: str) -> None:
    plan = planned(recipe(tmp_path, "model.size=1M"), PLAYS, LAPTOP)
    moved = case == "another machine"
    with pytest.raises(_MeasuredError):
        _resumed(plan, replace(LAPTOP, cores=2 * LAPTOP.cores) if moved else LAPTOP, tmp_path, fresh=not moved)


def test_text_that_changed_is_refused_by_the_names_of_its_files(tmp_path: Path) -> None:
    def prepared(**texts: str) -> Corpus:
        for name, content in texts.items():
            (tmp_path / f"{name}.txt").write_text(content * 200)
        sources = tuple(Source(str(tmp_path / f"{name}.txt")) for name in texts)
        request = DataRequest(sources=sources, tokenizer="gpt2", vocabulary=None, holdout=0.1)
        return open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None))

    begun = prepared(a="one ", b="two ", c="three ")
    plan = planned(recipe(tmp_path, "model.size=1M"), PLAYS, LAPTOP)
    job = replace(plan.job, corpus=str(begun.folder), corpus_hash=begun.content_hash)
    refuse_other_text(prepared(a="one ", b="two ", c="three "), replace(plan, job=job))
    changed = prepared(a="one ", b="another ", d="four ", e="five ")
    sentence = "the text is not what this run was begun with: d.txt, e.txt are new, c.txt is gone, b.txt is different; "
    with pytest.raises(PlaitError, match=f"^{sentence}restore the files as they were, or choose another run.name$"):
        refuse_other_text(changed, replace(plan, job=job))
    lost = replace(plan, job=replace(job, corpus=str(tmp_path / "gone")))
    with pytest.raises(PlaitError, match=r"^the text \(or its tokenizer\) is not what .* begun with; restore"):
        refuse_other_text(changed, lost)


def test_a_run_that_is_continued_over_and_over_is_evaluated_ten_times_and_then_at_its_ends(tmp_path: Path) -> None:
    plan = planned(recipe(tmp_path, "model.size=1M", "train.budget=100 steps"), PLAYS, LAPTOP)
    plan = replace(plan, cadence=replace(plan.cadence, evaluate_every_steps=25))
    evaluated = [25, 50, 75, 100]
    for steps in (200, 1000, 5000, 20_000):
        config = recipe(tmp_path, "model.size=1M", f"train.budget={steps} steps")
        plan = with_evaluations_left(config, with_raised_budget(config, plan), evaluated)
        every = plan.cadence.evaluate_every_steps
        between = [] if not every else [step for step in range(evaluated[-1] + 1, steps) if step % every == 0]
        assert not between or len(evaluated) + len(between) < EVALUATIONS_AT_MOST
        evaluated += [*between, steps]
    named = recipe(tmp_path, "model.size=1M", "train.budget=30000 steps", "report.evaluate=25 steps")
    assert with_evaluations_left(named, plan, evaluated) == plan, "an interval that the recipe names stays"


def test_files_of_one_name_in_several_folders_and_an_old_index_are_told_apart(tmp_path: Path) -> None:
    def prepared(*names: str) -> Corpus:
        sources = tuple(Source(str(tmp_path / name)) for name in names)
        request = DataRequest(sources=sources, tokenizer="gpt2", vocabulary=None, holdout=0.1)
        return open_corpus(prepare_corpus(request, tmp_path / "cache", lambda *_: None))

    for folder, content in (("a", "one "), ("b", "two "), ("c", "three ")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(content * 200)
    begun, changed = prepared("a/x.txt", "b/x.txt"), prepared("c/x.txt", "b/x.txt")
    plan = planned(recipe(tmp_path, "model.size=1M"), PLAYS, LAPTOP)
    plan = replace(plan, job=replace(plan.job, corpus=str(begun.folder), corpus_hash=begun.content_hash))
    with pytest.raises(PlaitError, match=r"begun with: x\.txt is different; "):
        refuse_other_text(changed, plan)
    without_files = replace(changed, sources=tuple(replace(source, files=()) for source in changed.sources))
    with pytest.raises(PlaitError, match=r"^the text \(or its tokenizer\) is not what"):
        refuse_other_text(without_files, plan)
