"""Whom the folders of runs and data let in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from plait.private_folder import make_private_folder


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
