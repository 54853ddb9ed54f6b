"""Replacing a file so that a reader, or a crash, sees the old text or the new one and nothing between."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from plait.errors import PlaitError, RunFailed, disk_advice


def replace_file(path: Path, data: bytes, *, failure: type[PlaitError] = RunFailed) -> None:
    """Write aside, wait for the disk, rename; raises `failure`, with the old file untouched, on a disk error."""
    replace_files({path: data}, failure=failure)


def replace_files(
    files: Mapping[Path, bytes],
    before: Callable[[], object] = lambda: None,
    *,
    failure: type[PlaitError] = RunFailed,
) -> None:
    """Replace several files: none before all are on the disk and `before` has been called."""
    asides = {path: path.with_name(f".{path.name}.{os.getpid()}.new") for path in files}
    path = next(iter(files))
    try:
        for path, data in files.items():
            with asides[path].open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        path = next(iter(files))
        before()
        for path, aside in asides.items():
            aside.rename(path)
    except OSError as error:
        raise cannot_write(path, error, failure) from error
    finally:
        for aside in asides.values():
            with suppress(OSError):
                aside.unlink()


def cannot_write(path: Path, error: OSError, failure: type[PlaitError] = RunFailed) -> PlaitError:
    """The sentence for a file that the disk does not take; where nothing has begun the failure is a PlaitError."""
    return failure(f"could not write {path} ({error.strerror}); {disk_advice(error)}, then give the same command again")
