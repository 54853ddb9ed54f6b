"""Who may write a run's folder: one process, for as long as the folder stays where it is."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from plait.commands.planning.run_folder import RunFolder
from plait.errors import PlaitError, RunFailed, disk_advice
from plait.private_folder import make_private_folder
from plait.regular_file import append_to_file

_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


class FolderTaken(PlaitError):
    """Another process works in a folder; it may end."""


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def lock_run_folder(folder: RunFolder) -> Iterator[Callable[[], None]]:
    """Hold the run's folder for this process; raises PlaitError when another one trains in it, or the disk says no.

    Yields a function that raises RunFailed if the folder was moved, deleted or replaced since; so does the block where
    it fails for that reason. Of a run that did not begin nothing is left.
    """
    path = folder.path / ".lock"
    is_first = not folder.path.parent.exists()
    try:
        make_private_folder(folder.path)
        _refuse_links(folder.path)
        lock = append_to_file(path)
    except OSError as error:
        raise PlaitError(f'"{folder.path}" cannot be written ({error.strerror}); choose another place') from None
    with lock:
        taken = f'another plait is training in "{folder.path}"; wait for it, or choose another run.name'
        hold_lock(lock, taken)
        if not _is_same_file(path, lock):
            raise FolderTaken(taken)  # its holder took the file away after we had opened it
        for left in folder.path.glob(".*.new"):  # by a plait that was killed
            left.unlink(missing_ok=True)

        def require_present() -> None:
            if not _is_same_file(path, lock):
                raise RunFailed(
                    f'"{folder.path}" was moved or deleted while its run worked, which was therefore ended; move it '
                    "back to go on from its newest checkpoint, or give the same command again to start over"
                )

        try:
            yield require_present
        except (OSError, PlaitError) as error:
            require_present()
            if isinstance(error, PlaitError) or error.errno not in _DISK_ERRNOS:
                raise
            raise PlaitError(
                f"{error.filename or folder.path}: {error.strerror}; "
                f"{disk_advice(error)}, then give the same command again"
            ) from error
        finally:
            if _is_same_file(path, lock):
                _remove_if_only_lock(folder.path)
                if is_first:
                    with suppress(OSError):  # with a run in it, it stays
                        folder.path.parent.rmdir()


def _refuse_links(folder: Path) -> None:
    """Raise PlaitError for a link in the place of one of the run's files: what it leads to would be overwritten.

    Its folders, such as checkpoints/ on a larger disk, may be links.
    """
    for path in folder.iterdir():
        if path.is_symlink() and not path.is_dir():
            raise PlaitError(f'"{path}" is a link, and plait would write where it leads; put the file itself there')


def _is_same_file(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_if_only_lock(path: Path) -> None:
    """Delete a run's folder that holds nothing but its lock."""
    with suppress(OSError):
        if [held.name for held in path.iterdir()] == [".lock"]:
            (path / ".lock").unlink()
            path.rmdir()


def hold_lock(lock: TextIO, refusal: str) -> None:
    """Lock an open file until it is closed or the process ends; raises FolderTaken(`refusal`) if it is locked, and
    PlaitError where its disk has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise PlaitError(
                f'the disk of "{lock.name}" has no locks ({error.strerror}), and two runs could write one folder; have '
                "it mounted with locks (Lustre: -o flock, NFS: a server with lockd), or make runs/ a link elsewhere"
            ) from None
        raise FolderTaken(refusal) from None
