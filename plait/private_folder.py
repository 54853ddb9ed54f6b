"""Folders that only their owner can enter: runs and prepared data hold people's text, and models that learned it."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from plait.errors import PlaitError, RunFailed

RUNS, CACHE = "runs", ".plait"
"""The folders that plait makes in a working folder."""

# Note [folders of others]: in a folder where several people write (/tmp, /scratch), another user may have made `runs`
# or `.plait` before us. Whoever owns a folder can rename and replace what is in it, and can read what a loose umask
# leaves open. So plait writes only into folders that belong to this user, to root, or to a group that shares them on
# purpose: closed to other users, writable by a group of ours, and in a working folder that is closed to other users as
# well, so that only that group can have made them. Root may also work in somebody's own folder. A link must belong to
# this user, root or the working folder's owner; what it leads to is judged in the same way.


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; one that exists stays as it is.

    What lies in it is out of reach for others whatever its own rights are, so a `chmod` of one folder shares it. Raises
    PlaitError where another user made it, or the `runs` or `.plait` that it lies in: see Note [folders of others].
    """
    _refuse_folders_of_others(folder)
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # an error where something else has the name


def open_to_everybody(folders: Iterable[Path]) -> list[Path]:
    """The folders in which every user of the machine can rename and delete."""
    found = []
    for folder in folders:
        with suppress(OSError):
            mode = folder.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                found.append(folder)
    return found


def _refuse_folders_of_others(folder: Path) -> None:
    place = folder.absolute()
    inside = [each for each in (place, *place.parents) if each.name in (RUNS, CACHE)]
    top = inside[-1] if inside else place
    looked_at = [one for one in reversed((place, *place.parents)) if one.is_relative_to(top)]
    if top.name == RUNS:  # its data will be prepared later, when workers have started
        looked_at += [top.parent / CACHE, top.parent / CACHE / "data"]
    for each in looked_at:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            own, is_ours = each.lstat(), _is_trusted(each.lstat(), top.parent.stat())
            if is_ours and stat.S_ISLNK(own.st_mode):
                own, is_ours = each.stat(), _is_trusted(each.stat(), each.resolve().parent.stat())
            if not is_ours and os.access(each, os.W_OK):  # else writing fails with its own sentence
                raise PlaitError(
                    f"{each} belongs to another user ({_user_name(own.st_uid)}), who could read or move what plait "
                    "writes there; work in a folder of your own, or have it removed"
                )


def _is_trusted(folder: os.stat_result, around: os.stat_result) -> bool:
    """Whether a folder, in a working folder with the status `around`, is one to write in."""
    user = os.geteuid()
    if folder.st_uid in (user, 0):
        return True
    if around.st_mode & stat.S_IWOTH:
        return False
    if stat.S_ISLNK(folder.st_mode):
        return folder.st_uid == around.st_uid
    shared = folder.st_mode & stat.S_IWGRP and folder.st_gid in (os.getegid(), *os.getgroups())
    own = user == 0 and folder.st_uid == around.st_uid
    return not folder.st_mode & stat.S_IWOTH and bool(shared or own)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"number {uid}"


@contextmanager
def job_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder for the files of one job, gone at the end of the block; below `parent`, else where temporary files are.

    A log that the job's error names stays, so that whoever reads the sentence can read the log.
    """
    folder, named = Path(mkdtemp(prefix=prefix, dir=parent)), list[Path]()
    try:
        yield folder
    except RunFailed as error:
        named = [log for log in folder.rglob("*.log") if str(log) in str(error)]
        raise
    finally:
        remove_folder_but(folder, named)


def remove_folder_but(folder: Path, kept: Iterable[Path]) -> None:
    """Delete a folder and all that is in it but these files, which are not touched; what cannot be deleted stays."""
    stays = set(kept)
    if not stays:
        shutil.rmtree(folder, ignore_errors=True)
    for parent, folders, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in files):
            if path not in stays:
                with suppress(OSError):
                    path.unlink()
        for path in (Path(parent, name) for name in folders):
            with suppress(OSError):  # one that is not empty, or a link
                path.rmdir()
