"""Decides which start of a run may write its checkpoints: the newest, regardless of what an older, cut-off one still
does."""

from __future__ import annotations

import os
import re
from pathlib import Path

from plait.checkpoint.durable import write_durably
from plait.checkpoint.shared_disk import names_now, rename_for_all, sync_folder
from plait.errors import RunFailed
from plait.regular_file import read_regular_file

_FILE = ".generation"
_CLAIM = re.compile(r"\.generation-([1-9]\d{0,17})")
# Note [claims]: two plaits may begin a start of one run at the same moment, where its folder is on a disk whose locks
# hosts do not share. Each number is claimed by a file that only one of them can create, and the largest counts.


def raise_generation(run: Path) -> int:
    """Begin one more start of the run in this folder, and return its number, from 1; older ones write no more."""
    number = read_generation(run) + 1
    while not _claims(run, number):
        number += 1
    aside = run / f"{_FILE}.new"
    write_durably(aside, f"{number}\n".encode())
    rename_for_all(aside, run / _FILE)
    for older in [claim for claim in _claimed(run) if claim < number]:
        (run / f"{_FILE}-{older}").unlink(missing_ok=True)
    sync_folder(run)
    return number


def read_generation(run: Path) -> int:
    """The number of the newest start; 0 where there was none, or its number cannot be read."""
    try:
        names_now(run)  # a start on another host may have raised it a moment ago
        written = int(read_regular_file(run / _FILE))
    except (OSError, ValueError):
        written = 0
    return max([written, *_claimed(run)])


def require_newest(run: Path, generation: int) -> None:
    """Raise RunFailed where another start of the run has begun since `generation`."""
    newest = read_generation(run)
    if newest > generation:
        raise RunFailed(
            f"this start of the run ({generation}) was given up for a later one ({newest}), and writes no checkpoint; "
            "see plait status"
        )


def _claims(run: Path, number: int) -> bool:
    """Whether this process is the one that has this number from now on."""
    try:
        os.close(os.open(run / f"{_FILE}-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _claimed(run: Path) -> list[int]:
    try:
        names = os.listdir(run)  # noqa: PTH208  a list of names is all that is needed
    except OSError:
        return []
    return [int(found[1]) for name in names if (found := _CLAIM.fullmatch(name))]
