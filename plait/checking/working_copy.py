"""A copy of the working folder, in which a program saves and loads as usual without changing the user's files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from plait.errors import PlaitError

_LEFT_OUT = {".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache",
             ".ruff_cache", "wandb", "mlruns"}  # fmt: skip
_CHECKPOINTS = {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".npz", ".pkl"}
"""Suffixes of files that are always copied: libraries may overwrite them without Python's open."""
_LINKED_FROM = 64 << 20
"""Larger files, such as data sets, become links."""
_BYTES_AT_MOST, _FILES_AT_MOST = 4 << 30, 100_000


def copy_working_folder(folder: Path, target: Path, *, without: Sequence[Path] = ()) -> None:
    """Copy a folder without version control, environments, and the folders in `without`; large files become links.

    Raises PlaitError for a folder that is too large, has a file that cannot be read, or a link to a folder that the
    program could write into.
    """
    try:
        _copy(folder, target, {*without, *target.resolve().parents})
    except OSError as error:
        why = f"{error.strerror or error}: {error.filename}"
        raise PlaitError(
            f"{folder} cannot be copied ({why}), and the program must not write into your own files",
            "start plait check --resume from a folder that you can read as a whole",
        ) from None


def _copy(folder: Path, target: Path, without: Collection[Path]) -> None:
    size = count = 0
    for place, folders, files in os.walk(folder):
        here = target / Path(place).relative_to(folder)
        here.mkdir(parents=True, exist_ok=True)
        linked = [one for one in folders if (Path(place) / one).is_symlink()]
        folders[:] = [
            one for one in folders if one not in _LEFT_OUT and one not in linked and Path(place) / one not in without
        ]
        if writable := next((one for one in linked if os.access(Path(place) / one, os.W_OK)), None):
            raise PlaitError(
                f"{Path(place) / writable} is a link to a folder, through which the program could change your files",
                "run plait check --resume in a folder without such links; an absolute path to the data still works",
            )
        for name in [*files, *linked]:
            source, copy = Path(place) / name, here / name
            if source.is_dir() or not source.exists():
                copy.symlink_to(os.path.realpath(source))
                continue
            if not source.is_file():
                continue  # a socket or pipe
            bytes_of = source.stat().st_size
            if bytes_of > _LINKED_FROM and source.suffix not in _CHECKPOINTS:
                copy.symlink_to(source.resolve())
                continue
            size, count = size + bytes_of, count + 1
            if size > _BYTES_AT_MOST or count > _FILES_AT_MOST:
                raise PlaitError(
                    f"{folder} is too large to copy, and the program must not change your own files",
                    "run plait check --resume in a folder with the program and a small data set",
                )
            shutil.copy2(source, copy)


def files_in(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Size and modification time of every file below a folder, by relative path."""
    found = {}
    for place, _, files in os.walk(folder):
        for name in files:
            path = Path(place) / name
            if path.exists():
                about = path.stat()
                found[str(path.relative_to(folder))] = (about.st_size, about.st_mtime_ns)
    return found
