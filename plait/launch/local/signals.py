"""Ctrl-C and SIGTERM as something that a select loop can wait for."""

from __future__ import annotations

import contextlib
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
        names: dict[int, StopSignal] = {signal.SIGINT: "SIGINT", signal.SIGTERM: "SIGTERM"}
        return [names[number] for number in numbers if number in names]


@contextlib.contextmanager
def collected_signals() -> Iterator[SignalMailbox]:
    """Collect SIGINT and SIGTERM within the block and restore their handlers after it.

    Off the main thread no handler can be installed, and the mailbox stays empty. A signal that the process was started
    to ignore, as under nohup, stays ignored. The handler posts a signal in whichever thread the kernel delivers it:
    Python's own handlers would wait until the main thread wakes for another reason.
    """
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    with readable, writable, _posted(writable.fileno()):
        yield SignalMailbox(readable)


@contextlib.contextmanager
def _posted(descriptor: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    # At no moment does a signal find the handler that does nothing without the descriptor that tells of it.
    outer = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _nothing_more) for number in heeded}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        signal.set_wakeup_fd(outer)


def _nothing_more(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has already written the signal's number to the wakeup descriptor."""
