"""Durable writes: neither a crash nor a full disk damages earlier files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.errors import RunFailed, is_out_of_space
from plait.units import format_bytes


class NoRoom(RunFailed):
    """A checkpoint could not be saved because a disk is full: the same save may go well once there is room."""


def is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for want of room, or of the user's share of it."""
    return isinstance(error, NoRoom) or (isinstance(error, OSError) and is_out_of_space(error))


@contextmanager
def clean_stop(staging: Path, own: Collection[str] = ()) -> Iterator[None]:
    """Context for everything that writes into `staging`: on an error it removes the folder and raises RunFailed.

    Where the disk is full it raises NoRoom, and removes only its `own` files, if they are named: what other ranks have
    written there may still be wanted.
    """
    try:
        yield
    except (OSError, ValueError, RecursionError, RunFailed) as error:
        full = is_full_disk(error)
        if full and own:
            for name in own:
                (staging / name).unlink(missing_ok=True)
            with suppress(OSError):  # it holds other ranks' files
                staging.rmdir()
        else:
            shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, RunFailed):
            raise
        why = f"{error.strerror}: {error.filename or staging}" if isinstance(error, OSError) else str(error)
        raise (NoRoom if full else RunFailed)(
            f"could not save the checkpoint ({why}); {earlier_checkpoints(staging.parent)}: "
            f"{'free some space' if full else 'fix the cause'} and give the same command again"
        ) from error


def require_space(folder: Path, nbytes: int) -> None:
    """Raise NoRoom unless `nbytes` more fit on the disk of `folder`."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        raise NoRoom(
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
