"""What reading a source's files found, cached by path, size and times so that the next check is quick."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plait.data.file_faults import FileContent, read_content
from plait.regular_file import append_to_file, read_regular_file

FileStamp = tuple[int, int, int]
"""Size, modification time and change time (ns); the change time moves even when a copy keeps the old modification
time."""

_CHECK_VERSION = 1
"""Raised when reading a file comes to find other faults, so that files that were read before are read again."""
_TRUSTED_AFTER_NS = 2_000_000_000


def file_stamp(path: Path) -> FileStamp:
    """The current stamp of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_files(files: Sequence[Path], cache_file: Path, on_file: Callable[[Path], None]) -> list[FileContent]:
    """What reading each file finds; taken from `cache_file` (JSON) where the file's stamp is the same as when it was
    read."""
    known = _recall(cache_file)
    contents, fresh = list[FileContent](), {}
    for path in files:
        on_file(path)
        name, now = str(path.resolve()), file_stamp(path)
        entry = known.get(name)
        if entry is None or tuple(entry[:3]) != now:
            found = read_content(path)
            entry = [*now, found.sha256, found.fault, found.encoding, _CHECK_VERSION]
            fresh[name] = entry
        contents.append(FileContent(*entry[3:6]))
    if fresh:
        _remember(cache_file, {**known, **{name: entry for name, entry in fresh.items() if _is_settled(entry)}})
    return contents


def cached_contents(files: Sequence[Path], cache_file: Path) -> list[FileContent] | None:
    """What an earlier `read_files` cached, without reading the files; None where one of them has changed or was never
    read."""
    known = _recall(cache_file)
    entries = [(file_stamp(path), known.get(str(path.resolve()))) for path in files]
    if any(entry is None or tuple(entry[:3]) != now for now, entry in entries):
        return None
    return [FileContent(*entry[3:6]) for _, entry in entries if entry is not None]


@contextmanager
def exclusive_lock(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a file lock. A second process blocks here, after one call of `on_wait`; the lock of a process that dies
    is released."""
    with append_to_file(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_settled(entry: list[int]) -> bool:
    """Whether the file was last written long enough ago that another write would change its times."""
    return time.time_ns() - max(entry[1], entry[2]) > _TRUSTED_AFTER_NS


def _recall(memory: Path) -> dict[str, list]:
    try:
        found = json.loads(read_regular_file(memory))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: entry for name, entry in found.items() if _is_entry(entry)} if isinstance(found, dict) else {}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or [type(value) for value in entry] != [int, int, int, str, str, str, int]:
        return False
    return entry[-1] == _CHECK_VERSION


def _remember(memory: Path, known: dict[str, list]) -> None:
    aside = memory.with_name(f"{memory.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(json.dumps(known))
    aside.replace(memory)
