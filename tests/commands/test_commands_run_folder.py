"""A run's folder: who may write it, what may change, and what is kept of earlier plans."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from plait.errors import PlaitError, RunFailed
from plait.layout import Layout
from plait.planner.derive.intervals import balance_every_steps, with_new_intervals
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan, write_plan
from plait.recipe.load import flat_values, load_recipe
from plait.recipe.schema import RunConfig
from plait.report.metrics import read_metrics
from plait.report.shares_file import SharesLine, append_shares, read_shares
from plait.run_folder import CHANGEABLE_KEYS, RunFolder, check_changes, find_run, lock_run_folder, run_folder
from tests.commands.other_values import OTHER_VALUES, base_recipe, changed_recipe
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunConfig, Plan]:
    monkeypatch.chdir(tmp_path)
    config = recipe(tmp_path, "train.budget=100 steps", "layout.replicate=1", "model.size=1M")
    return config, planned(config, PLAYS, LAPTOP)


def test_a_folder_that_one_process_holds_is_refused_to_the_next(made) -> None:
    folder = run_folder("x")
    with (
        lock_run_folder(folder),
        pytest.raises(PlaitError, match="another plait is training in"),
        lock_run_folder(folder),
    ):
        pass
    with lock_run_folder(folder):
        pass


def test_a_run_that_did_not_begin_leaves_nothing_and_one_that_did_keeps_all(made) -> None:
    with pytest.raises(PlaitError, match="no"), lock_run_folder(run_folder("x")):
        raise PlaitError("no")
    assert not Path("runs/x").exists()
    with lock_run_folder(run_folder("x")):
        Path("runs/x/plan.json").write_text("{}")
    assert sorted(path.name for path in Path("runs/x").iterdir()) == [".lock", "plan.json"]


def test_who_opened_a_lock_that_its_holder_then_took_away_is_refused(made, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken_away(lock: TextIO, refusal: str) -> None:
        Path("runs/x/.lock").unlink()

    monkeypatch.setattr("plait.run_folder.hold_lock", taken_away)
    with pytest.raises(PlaitError, match="another plait is training in"), lock_run_folder(run_folder("x")):
        pass


def test_a_lock_dies_with_its_process(made) -> None:
    folder = run_folder("x")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with lock_run_folder(folder):
            os.write(write, b"held")
            os._exit(0)
    os.read(read, 4)
    os.waitpid(child, 0)
    with lock_run_folder(folder):
        pass


def test_a_disk_that_says_no_is_told_in_a_sentence_and_our_bugs_are_not(made) -> None:
    with (
        pytest.raises(PlaitError, match=r"^here: No space left on device; free some space"),
        lock_run_folder(run_folder("x")),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here")
    with pytest.raises(FileNotFoundError), lock_run_folder(run_folder("x")):
        Path("nothing").read_text()
    Path("runs").mkdir(exist_ok=True)
    Path("runs/y").write_text("a file where the folder should be")
    with pytest.raises(PlaitError, match=r"cannot be written"), lock_run_folder(run_folder("y")):
        pass


@pytest.mark.parametrize("then", ["moved", "deleted", "replaced"])
@pytest.mark.parametrize("failure", [None, FileNotFoundError(errno.ENOENT, "gone"), RunFailed("could not save")])
def test_a_folder_that_goes_while_it_is_held_is_told_and_not_made_anew(
    made, then: str, failure: Exception | None
) -> None:
    folder = run_folder("x")
    with pytest.raises(RunFailed, match='"runs/x" was moved or deleted while'), lock_run_folder(folder) as require_here:
        require_here()
        Path("runs/x").rename("moved")
        if then == "deleted":
            shutil.rmtree("moved")
        if then == "replaced":
            Path("runs/x").mkdir()
            Path("runs/x/.lock").write_text("another's")
        if failure:
            raise failure
        require_here()
    assert Path("runs/x/.lock").exists() == (then == "replaced")


def test_a_plan_that_the_disk_does_not_take_is_refused_before_anything_begins(made, tmp_path: Path) -> None:
    config, plan = made
    (tmp_path / "file").touch()
    inside_a_file = RunFolder(tmp_path / "file" / "run")
    for write in (
        lambda: write_plan(plan, tmp_path / "none" / "plan.json"),
        lambda: inside_a_file.save_config_and_plan(config, plan),
    ):
        with pytest.raises(PlaitError, match=r"could not write .*; check the folder and the disk") as told:
            write()
        assert told.value.exit_code == 2


def test_recipe_and_plan_read_back_and_earlier_plans_are_kept(made) -> None:
    config, plan = made
    folder = run_folder("x")
    with lock_run_folder(folder):
        assert not folder.has_begun
        folder.save_config_and_plan(config, plan)
        assert folder.has_begun and folder.saved_config() == config and folder.saved_plan() == plan
        folder.save_config_and_plan(config, plan)
        assert not list(folder.path.glob("plan-*.json"))
        second, third = replace(plan, job=replace(plan.job, steps=200)), replace(plan, job=replace(plan.job, steps=300))
        folder.save_config_and_plan(config, second)
        folder.save_config_and_plan(config, third)
    assert folder.saved_plan() == third
    assert read_plan(folder.path / "plan-1.json") == plan and read_plan(folder.path / "plan-2.json") == second
    assert sorted(path.name for path in folder.path.iterdir() if path.name != ".lock") == [
        "plan-1.json", "plan-2.json", "plan.json", "recipe.toml",
    ]  # fmt: skip


def test_a_run_without_checkpoint_begins_anew_with_empty_metrics(made) -> None:
    folder = run_folder("x")
    with lock_run_folder(folder):
        folder.save_config_and_plan(*made)
        folder.metrics.write_text('{"step": 1, "eval_loss": 1.0, "eval_nats_per_byte": 1.0}\n')
        assert folder.prepare_resume() is None
        assert read_metrics(folder.metrics) == ([], [])


def test_runs_are_found_by_name_and_by_path(made) -> None:
    with pytest.raises(PlaitError, match=r'there is no run "x" in /.*/runs; .* train one with: plait train RECIPE'):
        find_run("x")
    folder = run_folder("x")
    with lock_run_folder(folder):
        folder.save_config_and_plan(*made)
    assert find_run("x") == folder and find_run("runs/x") == folder
    assert find_run(str(folder.path.resolve())) == RunFolder(folder.path.resolve())
    with pytest.raises(PlaitError, match=r'there is no run "z" in /.*/runs; the runs there: x'):
        find_run("z")


def test_a_run_in_a_closed_folder_is_not_said_to_be_missing(made) -> None:
    closed = Path("closed")
    (closed / "runs" / "x").mkdir(parents=True)
    closed.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # nobody: root may read everything
        with pytest.raises(
            PlaitError, match=r"^closed/runs/x cannot be read \(Permission denied\); check the permissions"
        ):
            find_run("closed/runs/x")
    finally:
        os.seteuid(user)
        closed.chmod(0o700)


@pytest.mark.parametrize("key", sorted(OTHER_VALUES))
def test_only_what_is_promised_may_change_of_a_begun_run(tmp_path: Path, key: str) -> None:
    old, new = base_recipe(tmp_path, key), changed_recipe(tmp_path, key)
    may = key == "data.files" or key.startswith(CHANGEABLE_KEYS)
    if may:
        assert check_changes(old, new) == [key]
        return
    with pytest.raises(PlaitError, match=rf"^{key} was .* when this run began and is .* now; change it back"):
        check_changes(old, new)


def test_all_keys_that_may_not_change_are_named_at_once(tmp_path: Path) -> None:
    old, new = (
        base_recipe(tmp_path),
        recipe(tmp_path, "run.name=base", "model.size=2M", "optimizer.lr=0.1", "train.budget=7 steps"),
    )
    with pytest.raises(PlaitError) as refused:
        check_changes(old, new)
    told = str(refused.value)
    assert told.endswith("; change them back, or choose another run.name")
    assert "optimizer.lr was " in told and "model.size was " in told and "train.budget" not in told


def test_a_run_of_0_2_0_that_named_no_optimizer_goes_on_with_its_own(tmp_path: Path) -> None:
    old = recipe(tmp_path, "run.name=base", "optimizer.kind=adamw")
    assert check_changes(old, recipe(tmp_path, "run.name=base")) == []
    with pytest.raises(PlaitError, match=r"optimizer.kind was \"adamw\""):
        check_changes(old, recipe(tmp_path, "run.name=base", "optimizer.kind=muon"))


def test_nothing_changed_is_nothing_changed(tmp_path: Path) -> None:
    config = base_recipe(tmp_path)
    assert check_changes(config, config) == []
    assert flat_values(load_recipe(tmp_path / "base.toml")) == flat_values(config)


@pytest.fixture
def shared(made):
    config, plan = made
    return config, replace(
        plan, placement=replace(plan.placement, layout=Layout(replicate=2)), job=replace(plan.job, batch_sequences=16)
    )


LINE = SharesLine(step=21, shares=(11, 5), reason="as a test wrote", speeds=(2.0, 1.0))


def test_recorded_shares_stay_with_their_layout(shared) -> None:
    (config, plan), folder, line = shared, run_folder("x"), LINE
    with lock_run_folder(folder):
        folder.save_config_and_plan(config, plan)
        append_shares(folder.shares, line)
        folder.save_config_and_plan(config, replace(plan, job=replace(plan.job, steps=plan.job.steps + 1)))
        assert read_shares(folder.shares) == (line,)
        folder.save_config_and_plan(
            config, replace(plan, placement=replace(plan.placement, layout=Layout(replicate=4)))
        )
        assert not folder.shares.exists() and read_shares(folder.path / "shares-2.jsonl") == (line,)
        append_shares(folder.shares, line)
        with pytest.raises(PlaitError, match="take the file away"):
            folder.save_config_and_plan(
                config, replace(plan, placement=replace(plan.placement, layout=Layout(replicate=4)))
            )


def test_a_plan_that_was_asked_for_afresh_begins_with_its_own_shares(shared) -> None:
    """Though it says what the old one said: the shares that were recorded since would be obeyed in its place."""
    (config, plan), folder, line = shared, run_folder("x"), LINE
    with lock_run_folder(folder):
        folder.save_config_and_plan(config, plan)
        for number in (1, 2):
            append_shares(folder.shares, line)
            folder.save_config_and_plan(config, plan, is_replanned=True)
            assert not folder.shares.exists() and read_shares(folder.path / f"shares-{number}.jsonl") == (line,)


def test_a_begun_run_may_be_balanced_otherwise(made) -> None:
    config, plan = made
    often = RunConfig.model_validate({**config.model_dump(by_alias=True), "balance": {"every": "20 steps"}})
    assert check_changes(config, often) == ["balance.every"]
    begun = replace(plan, cadence=replace(plan.cadence, balance_every_steps=50))
    assert with_new_intervals(often, begun).cadence.balance_every_steps == 20
    assert with_new_intervals(config, begun).cadence.balance_every_steps == 50
    assert balance_every_steps(config, "alike") == 0 and balance_every_steps(config, "unequal") == 50
    by_clock = RunConfig.model_validate({**config.model_dump(by_alias=True), "balance": {"every": "5 minutes"}})
    with pytest.raises(PlaitError, match=r"under \[balance\] must count steps"):
        balance_every_steps(by_clock, "unequal")
