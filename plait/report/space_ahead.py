"""Room for a run's logs on a disk that fills up while the run goes on."""

from __future__ import annotations

import math
import os
from contextlib import suppress

from plait.regular_file import reserve_space

AHEAD_BYTES = 4 << 20
"""Some fifteen thousand lines of steps."""
_TRY_AGAIN_BYTES = 64 << 10


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
            can_reserve = reserve_space(self._descriptor, size, AHEAD_BYTES, size="stays")
        except OSError:
            self._enough_until = size + nbytes + _TRY_AGAIN_BYTES
        else:
            self._enough_until = size + AHEAD_BYTES // 2 if can_reserve else math.inf

    def release(self) -> None:
        """Give back what no line needed; the log can still be appended to."""
        with suppress(OSError):  # a pipe or a device has no size
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size)
