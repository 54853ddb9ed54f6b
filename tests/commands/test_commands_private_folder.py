"""Whom the folders of runs and data let in."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from plait.errors import PlaitError, RunFailed
from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import RankContext
from plait.private_folder import job_folder, make_private_folder
from plait.probing.steps import time_plan
from plait.workers import TIMING_ENTRY, ForkedWorkers
from tests.trainer.tiny import make_tiny


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_made_is_private_and_what_exists_keeps_its_rights(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o770)
        for _ in range(2):
            make_private_folder(shared / "runs" / "x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (shared, shared / "runs", shared / "runs" / "x")]
    assert modes == [0o770, 0o700, 0o700]


def test_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(OSError, match="runs"):
        make_private_folder(tmp_path / "runs")
    with pytest.raises(OSError, match="runs"):
        make_private_folder(tmp_path / "runs" / "x")


def crash(context: RankContext, argument: str) -> None:
    raise ZeroDivisionError("one by nought")


@pytest.mark.slow
def test_the_log_that_the_sentence_of_a_crash_names_is_there(tmp_path: Path) -> None:
    """Timing works in a temporary folder, of which that log alone stays."""
    config, plan = make_tiny(tmp_path)
    table = EntryTable(functions={TIMING_ENTRY: "tests.commands.test_commands_private_folder:crash"})
    with ForkServer(table, threads=1) as server, pytest.raises(RunFailed, match="one by nought") as failed:
        time_plan(config, plan, ForkedWorkers(server), least_s=0.1)
    log = Path(str(failed.value).rpartition("full traceback in ")[2])
    try:
        assert "ZeroDivisionError: one by nought" in log.read_text()
        assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
        assert [path.name for path in log.parent.iterdir()] == ["rank-0.log"]
    finally:
        shutil.rmtree(log.parent)


@pytest.mark.parametrize("error", [RunFailed("rank 1 was killed by SIGKILL"), PlaitError("no"), KeyboardInterrupt()])
def test_a_folder_whose_logs_nobody_names_is_gone(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), job_folder("plait-", tmp_path) as folder:
        (folder / "rank-1.log").write_text("text")
        (folder / "corpus").mkdir()
        raise error
    with job_folder("plait-", tmp_path) as folder:
        (folder / "rank-1.log").write_text("text")
    assert not list(tmp_path.iterdir())
