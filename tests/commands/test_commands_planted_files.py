"""Links, pipes and endless files in runs/ and .plait/ that somebody else put there: nothing outside is written or
deleted, and no command waits for ever."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from plait.checkpoint.store import clean_staging, staging_for, verify_checkpoint
from plait.checkpoint.transfer import write_rank
from plait.data.index import read_index
from plait.data.preparation.fingerprint import exclusive_lock
from plait.errors import PlaitError, RunFailed
from plait.planner.plan_file import read_plan
from plait.probing.calibration_store import read_observations
from plait.regular_file import append_to_file, read_regular_file
from plait.report.metrics import read_metrics
from plait.report.receipt_file import read_receipt
from plait.report.shares_file import read_shares
from plait.report.sinks import MetricsFile
from plait.run_folder import RunFolder, lock_run_folder
from plait.working_folder import WorkingFolder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user's with a file, which nobody may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear all")
    return folder


@pytest.fixture(autouse=True)
def untouched(outside: Path):
    yield
    assert [path.name for path in outside.iterdir()] == ["letter.txt"]
    assert (outside / "letter.txt").read_text() == "dear all"


def test_a_staging_folder_that_is_a_link_is_taken_away_and_never_written(tmp_path: Path, outside: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    staging = staging_for(checkpoints, 20)
    staging.symlink_to(outside)
    with pytest.raises(RunFailed, match="is a link"):
        write_rank(staging, 0, {})
    clean_staging(checkpoints)
    assert not staging.is_symlink()
    write_rank(staging, 0, {})
    assert staging.is_dir()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "plan.json", "so-far.json", "shares.jsonl"])
def test_a_run_with_a_link_among_its_files_is_not_gone_on_with(tmp_path: Path, outside: Path, name: str) -> None:
    run = tmp_path / "runs" / "planted"
    run.mkdir(parents=True)
    (run / name).symlink_to(outside / "letter.txt")
    with pytest.raises(PlaitError, match=f'{name}" is a link'), lock_run_folder(RunFolder(run)):
        pass


def test_folders_of_a_run_may_be_links(tmp_path: Path) -> None:
    run, disk = tmp_path / "runs" / "large", tmp_path / "large-disk"
    run.mkdir(parents=True)
    disk.mkdir()
    (run / "checkpoints").symlink_to(disk)
    with lock_run_folder(RunFolder(run)) as require_present:
        require_present()


def test_what_is_appended_to_is_no_link(tmp_path: Path, outside: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(outside / "letter.txt")
    with pytest.raises(RunFailed, match="could not write"):
        MetricsFile(link)
    with pytest.raises(OSError, match="symbolic links"):
        append_to_file(link)
    with pytest.raises(OSError, match="symbolic links"), exclusive_lock(link, lambda: None):
        pass


def test_a_pipe_in_the_place_of_a_file_is_a_sentence_at_once(tmp_path: Path) -> None:
    for name in ("plan.json", "receipt.json", "so-far.json", "index.json", "metrics.jsonl", "shares.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(PlaitError, match="not a regular file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(PlaitError, match="not a regular file"):
        read_receipt(tmp_path / "receipt.json")
    with pytest.raises(PlaitError, match="not a regular file"):
        _ = RunFolder(tmp_path).totals
    with pytest.raises(PlaitError, match="are damaged"):
        read_index(tmp_path)
    with pytest.raises(PlaitError, match="not a regular file"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(PlaitError, match="not a regular file"):
        read_shares(tmp_path / "shares.jsonl")


def test_an_endless_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    sparse = tmp_path / "manifest.json"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlaitError, match="is larger than 256 MiB"):
        verify_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="larger than 0 MiB"):
        read_regular_file(sparse, 10)


def test_observations_that_are_a_pipe_count_as_missing(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    (working.cache / "calibration").mkdir(parents=True)
    os.mkfifo(working.cache / "calibration" / "key.json")
    assert read_observations("key", working) == ()


STEP = {
    "step": 1, "tokens": 10, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "step_s": 0.1, "tokens_per_s": 100.0,
    "mfu": None, "data_wait_s": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 10**400}, {"step": 10**400}, {"step": -1}, {"tokens": -5}, {"step": True}, {"loss": "\x1b[2J"},
        {"loss": float("inf")}, {"step_s": float("nan")}, {"lr": []}, {"step": 2**70},
    ],
)  # fmt: skip
def test_a_line_of_metrics_with_a_figure_that_cannot_be_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(STEP) + "\n" + json.dumps({**STEP, "step": 2, **change}) + "\n")
    with pytest.raises(PlaitError, match=r"metrics\.jsonl:2 is not a line of metrics"):
        read_metrics(path)


def test_shares_whose_last_line_is_deep_are_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "shares.jsonl"
    path.write_text("[" * 100_000)
    assert read_shares(path) == ()
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(PlaitError, match="is no line of shares"):
        read_shares(path)
