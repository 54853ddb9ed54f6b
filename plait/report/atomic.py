"""Replacing a file so that a reader, or a crash, sees the old text or the new one and nothing between."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from plait.errors import PlaitError, RunFailed, disk_advice
from plait.regular_file import follow_no_link

_LOOK_BYTES = 1 << 12


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


def append_line(path: Path, text: str) -> None:
    """Add one line to a file of lines, and wait until the disk has it. A line that a killed writer or a full disk left
    incomplete is cut off first: the line after it would be unreadable. Raises OSError, with the file as it was."""
    descriptor = follow_no_link(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        end, data = _end_of_last_line(descriptor), memoryview(text.encode() + b"\n")
        if end < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, end)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def _end_of_last_line(descriptor: int) -> int:
    """The position at which the next line of a file should begin."""
    end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _LOOK_BYTES)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def cannot_write(path: Path, error: OSError, failure: type[PlaitError] = RunFailed) -> PlaitError:
    """The sentence for a file that the disk does not take; where nothing has begun the failure is a PlaitError."""
    return failure(
        f"could not write {path} ({error.strerror})", f"{disk_advice(error)}, then give the same command again"
    )
