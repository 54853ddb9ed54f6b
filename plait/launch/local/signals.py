"""Ctrl-C, SIGTERM, SIGHUP, SIGUSR1: as something that a select loop can wait for, and as the exception Interrupted."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from plait.errors import Interrupted, StopSignal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REPEAT_S = 1.0
"""A signal that comes again within this time is the same stop: `timeout`, shells and schedulers signal a process and
then its whole group."""
_NAMES: dict[int, StopSignal] = {
    signal.SIGINT: "SIGINT",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
    signal.SIGUSR1: "SIGUSR1",
}


class StopRequests:
    """Tells a request to stop from the repetition of an earlier one.

    SIGHUP never means "stop at once": it says that the terminal has gone, also while a run is saving, and a session
    that ends sends SIGTERM right before or after it. A scheduler that warns by SIGUSR1 sends SIGTERM later,
    which asks for nothing more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: StopSignal | None = None
        self._last_at_s = 0.0

    def is_new(self, name: StopSignal) -> bool:
        """Take note of a signal; whether it is a request of its own."""
        now, last = self._clock(), self._last
        recent = now - self._last_at_s < REPEAT_S
        if last is not None and (name in ("SIGHUP", "SIGUSR1") or (recent and last in (name, "SIGHUP"))):
            return False
        self._last, self._last_at_s = name, now
        return last != "SIGUSR1" or name != "SIGTERM"


class SignalMailbox:
    """Requests to stop in the order of arrival; `wire` is readable while there may be any."""

    def __init__(self, wire: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self.wire = wire
        self._requests = StopRequests(clock)

    def read(self) -> list[StopSignal]:
        """The requests that have arrived since the last call, without repetitions; never blocks."""
        try:
            numbers = self.wire.recv(64)
        except BlockingIOError:
            return []
        return [_NAMES[number] for number in numbers if number in _NAMES and self._requests.is_new(_NAMES[number])]


@contextlib.contextmanager
def collected_signals(clock: Callable[[], float] = time.monotonic) -> Iterator[SignalMailbox]:
    """Collect the stop signals within the block and restore their handlers after it.

    Off the main thread no handler can be installed, and the mailbox stays empty. A signal that the process was started
    to ignore, as under nohup, stays ignored. The handler posts a signal in whichever thread the kernel delivers it:
    Python's own handlers would wait until the main thread wakes for another reason.
    """
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    with readable, writable, _posted(writable.fileno()):
        yield SignalMailbox(readable, clock)


@contextlib.contextmanager
def interrupting_signals() -> Iterator[Callable[[], None]]:
    """Within the block a stop signal raises Interrupted, so that what is open is closed and other hosts are notified.

    Yields a function after whose call it raises no more: the command is over, and how it ended is being said.
    Handlers that are not the usual ones stay: a caller has its own way with them, or wants the signal ignored.
    """
    requests, over = StopRequests(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if requests.is_new(_NAMES[number]) and not over.is_set():
            raise Interrupted(_NAMES[number])

    before = {number: signal.signal(number, interrupt) for number in _signals_left_to_python()}
    try:
        yield over.set
    finally:
        _restore(before)


def ignore_stop_signals() -> None:
    """For the last moments of a process: a signal that repeats an earlier one must not change its exit code."""
    for number in _signals_left_to_python():
        signal.signal(number, signal.SIG_IGN)


def _signals_left_to_python() -> list[signal.Signals]:
    """The stop signals without a handler of the caller's, for which this thread can set one."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [each for each in STOP_SIGNALS if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler)]


@contextlib.contextmanager
def _posted(descriptor: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    # At no moment does a signal find the handler that does nothing without the descriptor that tells of it.
    outer = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _nothing_more) for number in caught}
    try:
        yield
    finally:
        _restore(before)
        signal.set_wakeup_fd(outer)


def _restore(before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None]) -> None:
    for number, previous in before.items():
        signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _nothing_more(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has already written the signal's number to the wakeup descriptor."""
