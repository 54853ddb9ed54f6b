"""Plans for whole examples: budgets in epochs, the length of a window, and what becomes of examples that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.data.samples.sizes import CorpusSizes
from plait.errors import PlaitError
from plait.planner.derive.intervals import steps_in_budget, with_raised_budget
from plait.planner.plan import Plan
from plait.units import Amount, parse_amount, parse_every
from tests.planner.machines import LAPTOP, corpus, planned, recipe

SIZES = CorpusSizes(examples=(((200, 50, 1000), (56, 10, 1000), (700, 400, 3)),), heldout=((90, 20, 40),))
FACTS = replace(corpus(258_103, 2003), layout="whole", sizes=SIZES)
SMALL = ("model.size=1M", "train.batch_tokens=7K")


def plan_of(folder: Path, *overrides: str) -> Plan:
    return planned(recipe(folder, *SMALL, *overrides), FACTS, LAPTOP)


def test_a_budget_in_epochs_reads_every_window_so_often(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.budget=3 epochs", "train.sequence=1024", "train.batch_tokens=7168")
    windows = SIZES.packed(1024, "refuse").windows
    assert plan.job.budget == Amount(3, "epochs") and plan.job.budget.epoch_tokens == windows * 1024
    assert plan.job.batch_sequences == 7 and plan.job.steps == -(-3 * windows // 7)
    assert plan.job.documents == "mask"
    assert str(plan.job.budget) == "3 epochs" and str(Amount(1, "epochs")) == "1 epoch"
    full = SIZES.packed(1024, "refuse").share
    assert f"windows {full:.1%} full: whole examples, packed by best fit into {windows} of them" in plan.reasons


def test_steps_are_exact_for_a_part_of_an_epoch() -> None:
    def steps(epochs: str, windows: int, batch: int) -> int:
        return steps_in_budget(replace(parse_amount(epochs), epoch_tokens=windows * 10), batch * 10, step_s=None)

    assert [steps("1 epoch", windows, 4) for windows in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert steps("0.1 epochs", 30, 3) == 1 and steps("0.1 epochs", 31, 3) == 2
    assert steps("2.5 epochs", 4, 5) == 2


def test_a_text_in_epochs_counts_the_windows_of_its_shards(tmp_path: Path) -> None:
    facts = replace(corpus(3003, 1), sizes=CorpusSizes(stream_tokens=(1001, 2002)))
    plan = planned(recipe(tmp_path, *SMALL, "train.budget=2 epochs", "train.sequence=100"), facts, LAPTOP)
    assert plan.job.budget.epoch_tokens == (10 + 20) * 100


@pytest.mark.slow
def test_epochs_of_a_begun_run_may_only_grow(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.budget=2 epochs")
    longer = with_raised_budget(recipe(tmp_path, "train.budget=4 epochs"), plan)
    assert longer.job.steps in (2 * plan.job.steps, 2 * plan.job.steps - 1) and longer.job.budget.epoch_tokens
    with pytest.raises(PlaitError, match=r"train\.budget = 1 epochs is less than the 2 epochs that this run has"):
        with_raised_budget(recipe(tmp_path, "train.budget=1 epoch"), plan)
    steps = plan_of(tmp_path, "train.budget=20 steps")
    with pytest.raises(PlaitError, match=r"this run counts in steps; raise train\.budget in steps too"):
        with_raised_budget(recipe(tmp_path, "train.budget=4 epochs"), steps)
    with pytest.raises(PlaitError, match="is not an interval"):
        parse_every("2 epochs")


def test_a_window_is_long_enough_for_the_longest_example(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "train.budget=3 epochs").job.sequence == 704
    assert plan_of(tmp_path, "train.budget=3 epochs", "data.overlong=drop").job.sequence == 256


def test_examples_that_do_not_fit_are_refused_or_counted(tmp_path: Path) -> None:
    with pytest.raises(
        PlaitError, match=r"3 examples are longer than a window of 512 tokens \(the longest has 700\); give"
    ):
        plan_of(tmp_path, "train.sequence=512")
    for overlong, words in (("drop", "left out"), ("cut", "cut at a window's end")):
        plan = plan_of(tmp_path, "train.sequence=512", f"data.overlong={overlong}")
        assert f"3 examples of more than 512 tokens {words} (data.overlong)" in plan.reasons
    held = replace(FACTS, sizes=replace(SIZES, heldout=((900, 20, 1),)))
    with pytest.raises(PlaitError, match=r"1 example is longer than a window of 800 tokens \(the longest has 900\)"):
        planned(recipe(tmp_path, *SMALL, "train.sequence=800"), held, LAPTOP)


def test_examples_never_see_each_other(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"examples never see each other; take data\.mask_documents = false out"):
        plan_of(tmp_path, "train.sequence=1024", "data.mask_documents=false")
