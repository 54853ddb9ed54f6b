"""Opening files that somebody else may have made: none blocks for ever (a pipe), never ends (a device) or fills the
memory. And blocks of a file taken before they are written."""

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
from typing import BinaryIO, Literal, TextIO, cast

MOST_BYTES = 1 << 28
"""Size limit of a file that is read as a whole: far above the largest that plait writes, and the largest tokenizers."""
SMALL_FILE_BYTES = 1 << 24
"""Size limit of a recipe, a configuration, a template: what people write, and libraries about a model."""
LOG_AHEAD_BYTES = 4 << 20
"""Some fifteen thousand lines of steps."""
_TRY_AGAIN_BYTES = 64 << 10
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnfitFileError(OSError, ValueError):
    """A file that is not regular, or too large; its text says so in words, and so does `strerror`."""

    def __init__(self, why: str, path: Path) -> None:
        super().__init__(why)
        self.strerror, self.filename = why, str(path)

    def __str__(self) -> str:
        return str(self.strerror)


def read_regular_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a file; raises OSError where it cannot be read, and UnfitFileError where it is a pipe or a device,
    or holds more than `most_bytes`."""
    with open_regular_file(path) as file:
        too_large = UnfitFileError(f"it is larger than {most_bytes >> 20} MiB", path)
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise too_large
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:  # it grows, or is one of the kernel's, whose size is 0
        raise too_large
    return data


def read_regular_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The UTF-8 text of a file, as `read_regular_file`; raises UnicodeDecodeError where it is none. Line ends are those
    that Python makes of them."""
    return read_regular_file(path, most_bytes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def open_regular_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """A file opened to be read; raises UnfitFileError at once where it is a pipe, a socket or a device."""
    try:
        opened = open(path, "rb", buffering, opener=_without_waiting)  # noqa: SIM115  returned open
    except OSError as error:
        if error.errno == errno.ENXIO:  # open(2): a socket
            raise UnfitFileError("it is a socket, not a regular file", path) from None
        raise
    file = cast("BinaryIO", opened)
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind == stat.S_IFREG:
        return file
    file.close()
    raise UnfitFileError(f"it is {_KINDS.get(kind, 'something else')}, not a regular file", path)


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
        """Call it before this many bytes are appended; a disk without room is no error here."""
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
