"""Ctrl-C and SIGTERM as something that a select loop can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Literal

StopSignal = Literal["SIGINT", "SIGTERM"]
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalMailbox:
    """Signals in the order of arrival; `wire` is readable while there are any."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire

    def read(self) -> list[StopSignal]:
        """The signals that have arrived since the last call; never blocks."""
        try:
            numbers = self.wire.recv(64)
        except BlockingIOError:
            return []
        return ["SIGINT" if number == signal.SIGINT else "SIGTERM" for number in numbers]


@contextlib.contextmanager
def collected_signals() -> Iterator[SignalMailbox]:
    """Collect SIGINT and SIGTERM within the block and restore their handlers after it.

    Off the main thread nothing can be installed, and the mailbox stays empty. A signal that the process was told to
    ignore, as under nohup, stays ignored.
    """
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)

    def post(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writable.fileno(), bytes([number]))

    with readable, writable, _handlers(post):
        yield SignalMailbox(readable)


@contextlib.contextmanager
def _handlers(handler: signal._HANDLER) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
