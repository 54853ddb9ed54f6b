"""A file system of a few MiB for tests that fill one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs below `folder` while the block lasts; `options` are mount's, as "size=8m". Skips the test where nothing
    may be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here; tests of /dev/full and of size limits cover writes that fail")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
