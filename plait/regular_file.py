"""Opening files of runs and caches, which somebody else may have put there: no pipe that blocks for ever, no link that
leads out, no file that fills the memory. And blocks of a file taken before they are written."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal, TextIO

MOST_BYTES = 1 << 28
"""Of a file that is read as a whole: far above the largest that plait writes."""
LOG_AHEAD_BYTES = 4 << 20
"""Some fifteen thousand lines of steps."""
_TRY_AGAIN_BYTES = 64 << 10
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


def read_regular_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a file; raises OSError where it cannot be read, and ValueError, in words, where it is a pipe or a
    device, or holds more than `most_bytes`."""
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes >> 20} MiB")
    return data


def append_to_file(path: Path, *, buffering: int = -1) -> TextIO:
    """A file opened to append text, made where it is missing; raises OSError where a link has its name."""
    return os.fdopen(follow_no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", buffering, encoding="utf-8")


def follow_no_link(path: Path, flags: int) -> int:
    """A descriptor of a file that plait writes; raises OSError (ELOOP) where a link has its name."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def reserve_space(descriptor: int, offset: int, nbytes: int, *, size: Literal["grows", "stays"] = "grows") -> bool:
    """Have the file system give these bytes of a file their blocks; False where it has no such call, as some network
    disks. Raises OSError where there is no room for them. The file's size grows to their end, or stays as it is.

    The system's own call, as the C library's would write zeros where the file system cannot reserve.
    """
    if nbytes == 0:
        return True
    mode = _KEEP_SIZE if size == "stays" else 0
    while _fallocate()(descriptor, mode, offset, nbytes) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT_RESERVE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


class SpaceAhead:
    """Takes blocks of a log before its lines need them: a checkpoint that finds no room is tried again later, but a
    line that finds none ends the run.

    Where the file system cannot reserve blocks, or has too few left, the log goes on without.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._enough_until = 0.0
        """The size in bytes from which more room is to be taken."""

    def require(self, nbytes: int) -> None:
        """Call it before so many bytes are appended; a disk without room is no error here."""
        size = os.fstat(self._descriptor).st_size
        if size + nbytes <= self._enough_until:
            return
        try:
            can_reserve = reserve_space(self._descriptor, size, LOG_AHEAD_BYTES, size="stays")
        except OSError:
            self._enough_until = size + nbytes + _TRY_AGAIN_BYTES
        else:
            self._enough_until = size + LOG_AHEAD_BYTES // 2 if can_reserve else math.inf

    def release(self) -> None:
        """Give back what no line needed; the log can still be appended to."""
        with suppress(OSError):  # a pipe or a device has no size
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


@cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    return call
