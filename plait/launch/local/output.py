"""The text output of a process, which people may stop reading while its work goes on."""

from __future__ import annotations

import errno
import io
import os
from typing import TextIO

_READER_IS_GONE = (errno.EIO, errno.EPIPE)


class OptionalOutput(io.TextIOBase):
    """Writes to a stream of this process, and discards everything once its reader is gone.

    A terminal that was closed, or a pipe whose reader has ended, is no reason to lose the steps since the last
    checkpoint. Any other error, as of a full disk, is raised.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard_from_now_on(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard_from_now_on(error)

    def _discard_from_now_on(self, error: OSError) -> None:
        """Redirect the descriptor itself: what is still in buffers must not fail again when the process ends."""
        if error.errno not in _READER_IS_GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
