"""Which start of a run may write its checkpoints: the newest, whatever an older one that was cut off still does."""

from __future__ import annotations

from pathlib import Path

from plait.checkpoint.durable import write_durably
from plait.checkpoint.shared_disk import names_now, rename_for_all, sync_folder
from plait.errors import RunFailed
from plait.regular_file import read_regular_file

_FILE = ".generation"


def raise_generation(run: Path) -> int:
    """Begin one more start of the run in this folder, and return its number, from 1; older ones write no more."""
    number = read_generation(run) + 1
    aside = run / f"{_FILE}.new"
    write_durably(aside, f"{number}\n".encode())
    rename_for_all(aside, run / _FILE)
    sync_folder(run)
    return number


def read_generation(run: Path) -> int:
    """The number of the newest start; 0 where there was none, or its number cannot be read."""
    try:
        names_now(run)  # a start on another host may have raised it a moment ago
        return int(read_regular_file(run / _FILE))
    except (OSError, ValueError):
        return 0


def require_newest(run: Path, generation: int) -> None:
    """Raise RunFailed where another start of the run has begun since `generation`."""
    newest = read_generation(run)
    if newest > generation:
        raise RunFailed(
            f"this start of the run ({generation}) was given up for a later one ({newest}), and writes no checkpoint; "
            "see plait status"
        )
