"""Blocks of a file taken beforehand: what has no room says so before a byte is written."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from plait.regular_file import reserve_space


def test_blocks_are_taken(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        if not reserve_space(file.fileno(), 0, 1 << 20):
            pytest.skip("this file system cannot reserve")
        assert (tmp_path / "file").stat().st_blocks * 512 >= 1 << 20
        assert reserve_space(file.fileno(), 0, 0)


def test_what_has_no_room_is_an_error(tmp_path: Path) -> None:
    code = (
        "import sys; from plait.regular_file import reserve_space\n"
        f"file = open({str(tmp_path / 'file')!r}, 'wb')\n"
        "try: reserve_space(file.fileno(), 0, 1 << 20)\n"
        "except OSError as error: sys.exit(str(error))"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # noqa: E731
    ended = subprocess.run([sys.executable, "-c", code], preexec_fn=limit, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "File too large" in ended.stderr
