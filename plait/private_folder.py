"""Folders that only their owner can enter: runs and prepared data hold people's text, and models that learned it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from plait.errors import RunFailed


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; one that exists stays as it is.

    What lies in it is out of reach for others whatever its own rights are, so a `chmod` of one folder shares it.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # an error where something else has the name


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
