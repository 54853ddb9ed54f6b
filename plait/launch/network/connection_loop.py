"""One thread for all of a process's connections to other hosts: it reads what arrives, and looks after each in time."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

_LOOK_AT_LATEST_S = 1.0


class Attended(Protocol):
    """A connection in the loop's care; its methods are called by the loop's thread alone, and never block."""

    @property
    def descriptor(self) -> int:
        """Of the socket that is readable when something has arrived."""
        ...

    @property
    def lost(self) -> str | None: ...

    def take(self) -> None:
        """Take what has arrived."""
        ...

    def look(self, now_s: float) -> float:
        """Do what is due by the monotonic clock; returns when the next of it is."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether anything waits until the socket takes it."""
        ...

    def flush(self) -> None:
        """Send what the socket takes now."""
        ...

    def forgotten(self) -> None:
        """The loop does not attend to the connection any more."""
        ...


class ConnectionLoop:
    """Attends to connections from `add` to `remove`; its thread is there while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._changes: deque[Callable[[selectors.BaseSelector], None]] = deque()
        """What other threads want changed; the loop's thread carries it out."""
        self._attended: dict[Attended, int] = {}
        self._wake: socket.socket | None = None
        self._next_look_s = 0.0

    def add(self, connection: Attended) -> None:
        """Attend to a connection from now on; any thread."""
        self._change(partial(self._add, connection))

    def remove(self, connection: Attended) -> None:
        """Attend to it no more; when this returns, nothing of it is being called. Any thread."""
        if threading.current_thread() is not self._thread:
            removed = threading.Event()
            self._change(partial(self._remove, connection, removed))
            removed.wait()

    def attend_again(self, connection: Attended) -> None:
        """Look after a connection soon: it has something left to send, or became due earlier. Any thread."""
        self._change(partial(self._attend_again, connection))

    def _change(self, change: Callable[[selectors.BaseSelector], None]) -> None:
        with self._lock:
            self._changes.append(change)
            if self._wake is None:
                awake, self._wake = bell()
                name = "plait connections"
                self._thread = threading.Thread(target=self._attend, args=(awake,), daemon=True, name=name)
                self._thread.start()
            with contextlib.suppress(BlockingIOError):  # full: it is awake already
                self._wake.send(b"!")

    def _attend(self, awake: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, awake:
            selector.register(awake, selectors.EVENT_READ)
            while self._carry_out_changes(selector):
                ready = selector.select(max(0.0, self._next_look_s - time.monotonic()))
                with contextlib.suppress(BlockingIOError):
                    while awake.recv(4096):
                        pass
                for key, events in ready:
                    if key.data is not None:
                        self._serve(key.data, events, selector)
                if time.monotonic() >= self._next_look_s:
                    self._look(selector)

    def _carry_out_changes(self, selector: selectors.BaseSelector) -> bool:
        """Whether there is anything left to attend to."""
        while True:
            with self._lock:
                if not self._changes:
                    if not self._attended and self._wake is not None:
                        self._wake.close()
                        self._wake = None
                    return self._wake is not None
                change = self._changes.popleft()
            change(selector)

    def _add(self, connection: Attended, selector: selectors.BaseSelector) -> None:
        self._attended[connection] = connection.descriptor
        selector.register(connection.descriptor, selectors.EVENT_READ, connection)
        self._serve(connection, selectors.EVENT_READ, selector)  # what came with the frames before it was added
        self._next_look_s = 0.0

    def _remove(self, connection: Attended, removed: threading.Event, selector: selectors.BaseSelector) -> None:
        self._forget(connection, selector)
        removed.set()

    def _attend_again(self, connection: Attended, selector: selectors.BaseSelector) -> None:
        if connection in self._attended:
            self._serve(connection, selectors.EVENT_WRITE, selector)
            self._next_look_s = 0.0

    def _serve(self, connection: Attended, events: int, selector: selectors.BaseSelector) -> None:
        """Take and send what is possible now, and wait for room only while something is left to send."""
        if connection not in self._attended:  # forgotten a moment ago
            return
        if events & selectors.EVENT_READ:
            connection.take()
        if events & selectors.EVENT_WRITE and connection.lost is None:
            connection.flush()
        if connection.lost is not None:
            self._forget(connection, selector)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        if selector.get_key(connection.descriptor).events != wanted:
            selector.modify(connection.descriptor, wanted, connection)

    def _look(self, selector: selectors.BaseSelector) -> None:
        now_s = time.monotonic()
        due = [connection.look(now_s) for connection in self._attended]
        for connection in [one for one in self._attended if one.lost is not None]:
            self._forget(connection, selector)
        self._next_look_s = min([*due, now_s + _LOOK_AT_LATEST_S])

    def _forget(self, connection: Attended, selector: selectors.BaseSelector) -> None:
        descriptor = self._attended.pop(connection, None)
        if descriptor is not None:
            selector.unregister(descriptor)
            connection.forgotten()


def bell() -> tuple[socket.socket, socket.socket]:
    """A socket that is readable while it rings, and the one that rings it; neither blocks."""
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    return awake, wake
