"""incidents.jsonl and starts.jsonl stay readable, whatever became of whoever wrote the line before."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from plait.errors import RunFailed
from plait.report import atomic
from plait.report.incidents import BackAtWork, StartLine, append_incident, append_start, read_incidents, read_starts


def line(generation: int) -> StartLine:
    return StartLine(generation=generation, steps_done=0, at="2026-11-25T22:00:00+00:00")


@pytest.mark.parametrize("left", [b'{"generation": 1, "back_af', b"x" * 10_000])
def test_half_a_line_of_one_that_was_killed_does_not_spoil_the_next(tmp_path: Path, left: bytes) -> None:
    """Glued together they were no incident, and the run could not go on until somebody took them out by hand."""
    path = tmp_path / "incidents.jsonl"
    for before, wanted in ((left, [2]), (b"", [2, 3]), (left, [2, 3, 4])):
        with path.open("ab") as file:
            file.write(before)
        append_incident(path, BackAtWork(generation=wanted[-1], back_after_s=0.5))
        assert [one.generation for one in read_incidents(path)[1]] == wanted


def test_what_a_full_disk_took_of_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "starts.jsonl", os.write
    append_start(path, line(1))
    room = [5]

    def has_room_for_five(descriptor: int, data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: room.pop()])

    with monkeypatch.context() as full:
        full.setattr(atomic.os, "write", has_room_for_five)
        with pytest.raises(RunFailed, match=r"could not write .*starts\.jsonl \(No space left on device\)"):
            append_start(path, line(2))
    assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().endswith(b"\n")
    append_start(path, line(3))
    assert [one.generation for one in read_starts(path)] == [1, 3]
