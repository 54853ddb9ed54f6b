"""Blocks of a file taken before they are written, so that a full disk or memory says so at once and by an error."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def reserve_space(descriptor: int, offset: int, nbytes: int) -> bool:
    """Have the file system give these bytes of a file their blocks; False where it has no such call, as some network
    disks. Raises OSError where there is no room for them.

    The system's own call, as the C library's would write zeros where the file system cannot reserve.
    """
    if nbytes == 0:
        return True
    while _fallocate()(descriptor, 0, offset, nbytes) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


@cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    return call
