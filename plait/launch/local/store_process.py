"""The store through which the ranks of several hosts find each other, in a separate process on host 0.

torch's TCPStore prints up to sixty lines for each connection that is not a rank's. Here they go to a pipe, where they
are counted.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable
from typing import NoReturn

from plait.launch.local.guard import die_with_parent

_STRANGER_MARKS = (b"Error processing client message", b"remote address of the client socket cannot be retrieved")
"""One of them is in the first line of what TCPStore prints of a connection that is not a rank's."""
_LONGEST_MARK = max(map(len, _STRANGER_MARKS))


def live_as_store(
    listener: socket.socket, output: int, parent_pid: int, inherited: Iterable[socket.socket]
) -> NoReturn:
    """Serve the store on a listening socket until the parent ends this freshly forked process; `output` is where it
    prints, `inherited` are open sockets of other processes.

    torch is loaded when the first connection comes: a job whose ranks have no use for a store does without.
    """
    try:
        die_with_parent(parent_pid)
        for other in inherited:
            other.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        select.select([listener], [], [])
        from torch._C._distributed_c10d import TCPStore

        host, port, *_ = listener.getsockname()
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        while store:
            signal.pause()
    finally:
        os._exit(1)


class StoreOutput:
    """The reading end of the pipe into which a store prints; counts the strangers of which it warned."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._tail = b""
        self.strangers = 0

    def fileno(self) -> int:
        return self._reading

    def read(self) -> None:
        """Read the available output; never blocks."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._reading, 1 << 16):
                self.strangers += _marks(self._tail + part) - _marks(self._tail)
                self._tail = (self._tail + part)[-_LONGEST_MARK:]

    def close(self) -> None:
        """Close both ends."""
        os.close(self._reading)
        os.close(self.writing)


def _marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in _STRANGER_MARKS)
