"""Replacing a file so that a reader, or a crash, sees the old text or the new one and nothing between."""

from __future__ import annotations

import os
from pathlib import Path

from plait.errors import RunFailed


def replace_file(path: Path, data: bytes) -> None:
    """Write aside, wait for the disk, rename; raises RunFailed, with the old file untouched, where the disk says no."""
    aside = path.with_name(f".{path.name}.new")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> RunFailed:
    """The sentence for a report file that the disk does not take."""
    return RunFailed(
        f"could not write {path} ({error.strerror}); "
        "free some space or mend the folder's rights, then give the same command again"
    )
