"""Durable writes: neither a crash nor a full disk damages earlier files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.errors import RunFailed
from plait.units import format_bytes

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def clean_stop(staging: Path) -> Iterator[None]:
    """Context for everything that writes into `staging`: on an error it removes the folder and raises RunFailed."""
    try:
        yield
    except (OSError, ValueError, RecursionError, RunFailed) as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, RunFailed):
            raise
        why = f"{error.strerror}: {error.filename or staging}" if isinstance(error, OSError) else str(error)
        full = isinstance(error, OSError) and error.errno in _NO_SPACE
        raise RunFailed(
            f"could not save the checkpoint ({why}); {earlier_checkpoints(staging.parent)}: "
            f"{'free some space' if full else 'mend the cause'} and give the same command again"
        ) from error


def require_space(folder: Path, nbytes: int) -> None:
    """Raise RunFailed unless `nbytes` more fit on the disk of `folder`."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        raise RunFailed(
            f"saving needs {format_bytes(nbytes)} ({nbytes} bytes) in {folder.parent}, where {format_bytes(free)} "
            f"({free} bytes) are free; {earlier_checkpoints(folder.parent)}: free some space and give the same command "
            "again"
        )


def earlier_checkpoints(folder: Path) -> str:
    """What a failed save leaves in a run's `folder` of checkpoints, as part of a sentence.

    A host that joined may have none of those that host 0 has.
    """
    if any(folder.glob("step-*")):
        return "earlier checkpoints are whole"
    return "earlier checkpoints, if there are any, are whole"


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
