"""A log has its room before a disk is full; what it did not need is given back."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait import regular_file
from plait.regular_file import LOG_AHEAD_BYTES, SpaceAhead
from plait.report.sinks import MetricsFile, TensorBoard
from tests.report.test_report_metrics import step_report
from tests.small_file_system import small_file_system

LINES = 2000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB; needs the right to mount."""
    with small_file_system(tmp_path, "size=32m") as disk:
        yield disk


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            assert file.write(bytes(4096)) == 4096, os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("kind", [MetricsFile, TensorBoard])
def test_lines_go_on_while_the_disk_is_full(small_disk: Path, kind: type[MetricsFile] | type[TensorBoard]) -> None:
    sink = kind(small_disk / "log")
    sink.step(step_report(1))
    fill(small_disk)
    for step in range(2, LINES):
        sink.step(step_report(step))
    sink.close()
    (log,) = [path for path in (small_disk / "log", *small_disk.glob("log/*")) if path.is_file()]
    assert log.stat().st_size > 100 * LINES
    assert log.stat().st_blocks * 512 < log.stat().st_size + 8192, "the rest was given back"


def test_a_disk_without_room_is_asked_again_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def full(descriptor: int, offset: int, nbytes: int, *, size: str) -> bool:
        asked.append(offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(regular_file, "reserve_space", full)
    with (tmp_path / "log").open("ab", buffering=0) as file:
        space = SpaceAhead(file.fileno())
        for _ in range(LINES):
            space.require(100)
            file.write(bytes(100))
    assert 1 < len(asked) < LINES / 100


def test_a_file_system_that_cannot_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(regular_file, "reserve_space", lambda descriptor, offset, nbytes, *, size: asked.append(offset))
    with (tmp_path / "log").open("ab", buffering=0) as file:
        space = SpaceAhead(file.fileno())
        for _ in range(3):
            space.require(LOG_AHEAD_BYTES)
            file.write(bytes(LOG_AHEAD_BYTES))
    assert asked == [0]
