"""A file of lines that another process appends to: each read begins where the last one ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from plait.regular_file import open_regular_file

_BLOCK_BYTES = 4 << 20
_LONGEST_LINE_BYTES = 1 << 20


class GrowingFile:
    """The lines of a file since the last call; `version` counts how often it was replaced, cut or deleted.

    What follows the last newline is being written, or was when its writer was killed: it waits until the newline is
    there. The file is held open, so that a new one in its place cannot be taken for it.
    """

    def __init__(self, path: Path) -> None:
        self.version = 0
        self._path = path
        self._file: BinaryIO | None = None
        self._read_bytes = 0
        self._rest = b""

    def blocks(self) -> Iterator[bytes]:
        """Whole lines in blocks of some megabytes, each ending with a newline; nothing where there is no news.

        Look at `version` after the first block, or the end: where it rose, all that was read before is void. Raises
        OSError where the file may not be read.
        """
        self._follow()
        if self._file is None:
            return
        while block := self._file.read(_BLOCK_BYTES):
            self._read_bytes += len(block)
            block = self._rest + block
            end = block.rfind(b"\n") + 1
            self._rest = block[end:]
            if len(self._rest) > _LONGEST_LINE_BYTES:
                self._rest = b""  # no line of ours: its end, once it comes, is no line either
            if end:
                yield block[:end]

    def close(self) -> None:
        """Let go of the file; the next call reads it from its beginning."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.version += 1
        self._read_bytes, self._rest = 0, b""

    def _follow(self) -> None:
        """Open the file that has the name now, unless it is the one that is open and has not become shorter."""
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self.close()
            return
        if self._file is not None:
            opened = os.fstat(self._file.fileno())
            if os.path.samestat(found, opened) and opened.st_size >= self._read_bytes:
                return
            self.close()
        with suppress(FileNotFoundError):  # deleted since
            self._file = open_regular_file(self._path, buffering=0)
