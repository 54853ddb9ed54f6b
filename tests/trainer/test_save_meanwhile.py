"""Checkpoints that are written while training goes on: their bits, a rank that cannot write, and an older start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.checkpoint.generation import raise_generation, read_generation, require_newest
from plait.checkpoint.store import published_checkpoints, verify_checkpoint
from plait.errors import RunFailed
from tests.matrix import few_fast
from tests.trainer.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meanwhile")
    make_tiny(folder)
    return folder


def asked(folder: Path, new: Path, **more: object) -> str:
    new.mkdir(exist_ok=True)
    return json.dumps(
        {
            "folder": str(folder),
            "new": str(new),
            "generation": 1,
            "fails": -1,
            "now": False,
            "apart": False,
            "late": False,
            **more,
        }
    )


@pytest.mark.parametrize("late", few_fast([False, True], True))
def test_it_holds_the_bits_of_its_step_although_training_went_on(
    run_ranks, folder: Path, tmp_path: Path, late: bool
) -> None:
    """Also where a device copies in its own time, into memory that the second save uses again."""
    told = run_ranks("save_meanwhile", asked(folder, tmp_path / "new", late=late), 2)
    assert told[0]["ends"] == told[1]["ends"] == [[1, ""], [2, ""]]
    for step in (1, 2):
        still = {"folder": str(folder), "old": None, "new": str(tmp_path / f"still-{step}"), "steps": step}
        run_ranks("restore_and_save", json.dumps(still), 2)
        mine, theirs = (
            at / f"step-{step}" / "manifest.json" for at in (tmp_path / "new/checkpoints", tmp_path / f"still-{step}")
        )
        assert mine.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("rank", few_fast([0, 1], 1))
def test_where_a_rank_cannot_write_all_hear_of_it_and_the_next_save_goes_well(
    run_ranks, folder: Path, tmp_path: Path, rank: int
) -> None:
    told = run_ranks("save_meanwhile", asked(folder, tmp_path / "new", fails=rank), 2)
    assert told[0]["ends"] == told[1]["ends"]
    (first, why), second = told[0]["ends"]
    assert first == 1 and "could not save the checkpoint" in why and second == [2, ""]
    checkpoints = tmp_path / "new" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-2"]
    verify_checkpoint(checkpoints / "step-2")


@pytest.mark.slow
def test_a_rank_whose_refusal_arrives_nowhere_holds_nobody_up(run_ranks, folder: Path, tmp_path: Path) -> None:
    """As on a host with a folder of its own, whose disk is full: rank 0 waited a minute for its part, and all waited
    for rank 0."""
    told = run_ranks("save_meanwhile", asked(folder, tmp_path / "new", fails=1, apart=True), 2)
    (first, why), (second, again) = told[0]["ends"]
    assert (first, second) == (1, 2) and "File too large" in why and "File too large" in again
    assert told[0]["waited_s"] < 20 and not list((tmp_path / "new").glob("*/checkpoints/.*"))


def test_an_older_start_publishes_nothing(run_ranks, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert [raise_generation(tmp_path / "new"), raise_generation(tmp_path / "new")] == [1, 2]
    with pytest.raises(RunFailed, match=r"this start of the run \(1\) was given up for a later one \(2\)"):
        run_ranks("save_meanwhile", asked(folder, tmp_path / "new", now=True), 2)
    assert published_checkpoints(tmp_path / "new" / "checkpoints") == ()
    assert list((tmp_path / "new").glob("checkpoints/.*")) == [], "no rank wrote anything there"
    require_newest(tmp_path / "new", 2)


def test_two_starts_at_once_have_numbers_of_their_own_and_the_larger_counts(tmp_path: Path) -> None:
    """As two leaders on a disk whose locks they do not share: both have read the same number."""
    assert raise_generation(tmp_path) == 1
    (tmp_path / ".generation-2").touch()  # the other one, which has claimed it and written nothing yet
    assert raise_generation(tmp_path) == 3 and read_generation(tmp_path) == 3
    (tmp_path / ".generation").write_text("2\n")  # it writes last
    assert read_generation(tmp_path) == 3
    with pytest.raises(RunFailed, match=r"\(2\) was given up for a later one \(3\)"):
        require_newest(tmp_path, 2)
    require_newest(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".generation", ".generation-3"]


def test_a_generation_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == 0
    (tmp_path / ".generation").write_text("many")
    assert read_generation(tmp_path) == 0 and raise_generation(tmp_path) == 1
