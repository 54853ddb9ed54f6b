"""A file that another process writes: each line is read once, and none before it is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.report.growing_file import GrowingFile


def new_lines(file: GrowingFile) -> list[bytes]:
    return b"".join(file.blocks()).splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def test_each_line_comes_once_and_whole(path: Path) -> None:
    file = GrowingFile(path)
    assert new_lines(file) == [] and file.version == 0
    with path.open("wb", buffering=0) as writer:
        writer.write(b"one\ntw")
        assert new_lines(file) == [b"one"]
        writer.write(b"o")
        assert new_lines(file) == []
        writer.write(b"\nthree\n")
        assert new_lines(file) == [b"two", b"three"]
    assert file.version == 0


def test_what_was_read_is_not_read_again(path: Path) -> None:
    path.write_bytes(b"a\n" * 1000)
    file = GrowingFile(path)
    assert len(new_lines(file)) == 1000
    with path.open("r+b") as writer:  # changed where it was read already, which nobody who appends does
        writer.write(b"X")
        writer.seek(0, os.SEEK_END)
        writer.write(b"b\n")
    assert new_lines(file) == [b"b"]


@pytest.mark.parametrize("how", ["replaced", "cut", "deleted"])
def test_a_file_that_begins_anew_has_another_version(path: Path, how: str) -> None:
    path.write_bytes(b"one\ntwo\n")
    file = GrowingFile(path)
    new_lines(file)
    if how == "replaced":
        other = path.with_name("new")
        other.write_bytes(b"one\nother\n")
        other.replace(path)
        assert new_lines(file) == [b"one", b"other"]
    elif how == "cut":
        path.write_bytes(b"one\n")
        assert new_lines(file) == [b"one"]
    else:
        path.unlink()
        assert new_lines(file) == []
    assert file.version == 1


def test_a_line_without_an_end_takes_no_memory(path: Path) -> None:
    path.write_bytes(b"x" * (5 << 20))
    file = GrowingFile(path)
    assert new_lines(file) == []
    with path.open("ab") as writer:
        writer.write(b"\nwhole\n")
    assert new_lines(file)[-1] == b"whole"


def test_a_pipe_in_its_place_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="a named pipe"):
        new_lines(GrowingFile(path))
