"""The port of host 0 for hosts that join: those that know the secret get in, others cost next to nothing."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.checked_json import one_line
from plait.errors import PlaitError
from plait.launch.network.connection_loop import ConnectionLoop, bell
from plait.launch.network.interface import interface_of
from plait.launch.remote.handshake import Refused, greet_joiner
from plait.launch.remote.link import Heartbeat, HostConnection
from plait.launch.remote.secret import Secret
from plait.launch.remote.wire import Wire, WireEnded

_STRANGERS_AT_MOST = 32
_HELLO_S = 60.0
_RETRY_S = 0.1
FULL_SENTENCE = "the run has all its hosts; start it with a larger --hosts, or leave this one out"
CROWDED_SENTENCE = "too many hosts wait to be admitted; join again in a minute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A host that has proven to know the secret and waits to be admitted, with what it reports about itself."""

    link: HostConnection
    host_info: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What it calls itself, else its address."""
        return one_line(str(self.host_info.get("name", self.link.address)))


class FailedAttempts:
    """Counts connections that could not prove that they belong to the run, for one line in a while."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._told_at_s = -every_s
        self._count = 0

    def add(self) -> None:
        """One more; from any thread."""
        self._count += 1

    def due(self, now_s: float) -> int:
        """How many there were since this last said so; 0 while that was less than `every_s` ago."""
        if now_s - self._told_at_s < self._every_s or not self._count:
            return 0
        self._told_at_s, count = now_s, self._count
        self._count -= count
        return count


class JoinListener:
    """Listens on one address of this machine until stopped; arrivals are taken with `next`.

    Each connection gets a few seconds and a fixed number of bytes to prove itself, in a thread of its own. Only as many
    as are `expected`, and some more, may be open before they have; with one more, the oldest is closed: honest
    ones are quick, and they may all come at once. As many may have proven themselves and not yet said who they are, and
    as many may wait for `next`; later ones are refused."""

    def __init__(
        self,
        *,
        address: str,
        port: int,
        secret: Secret,
        heartbeat: Heartbeat,
        expected: int = 1,
        loop: ConnectionLoop | None = None,
    ) -> None:
        self._secret = secret
        self._heartbeat = heartbeat
        self._greeted_at_most = _STRANGERS_AT_MOST + expected
        self._loop = loop or ConnectionLoop()
        self._listener = listener_at(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._awake, self._wake = bell()
        self._strangers: deque[socket.socket] = deque()
        """Connections that have not proven themselves yet."""
        self._nameless: deque[socket.socket] = deque()
        """Connections that have, and have not said hello yet."""
        self._lock = threading.Lock()
        self._turned_away_because: str | None = None
        self._stopped = threading.Event()
        self.failed_attempts = FailedAttempts()
        self._thread = threading.Thread(target=self._accept, daemon=True, name="plait gate")
        self._thread.start()

    def fileno(self) -> int:
        """Readable when a host has proven itself since `next` last found none."""
        return self._awake.fileno()

    def next(self, within_s: float) -> Arrival | None:
        """The next host that has proven itself, or None when the time is up."""
        with contextlib.suppress(OSError):  # nothing rings, or all is closed
            while self._awake.recv(64):
                pass
        try:
            return self._arrivals.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None

    def stop(self, why: str) -> None:
        """Stop listening; hosts that have connected and know the secret are refused with this sentence."""
        with self._lock:
            self._turned_away_because = self._turned_away_because or why
        self._stopped.set()
        _hang_up(self._listener)  # wakes the thread that waits for connections
        self._thread.join()
        self._listener.close()
        while (late := self.next(0)) is not None:
            refuse_host(late.link, why)

    def close(self, why: str) -> None:
        """Stop, and hang up on all who have not proven themselves yet; may be called twice."""
        self.stop(why)
        with self._lock:
            unknown = [*self._strangers, *self._nameless]
        for connection in unknown:
            _hang_up(connection)
        self._awake.close()
        self._wake.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # stopped; or descriptors are short for a while
                self._stopped.wait(_RETRY_S)
                continue
            self._note(connection, self._strangers)
            threading.Thread(target=self._greet, args=(connection,), daemon=True, name="plait greeting").start()

    def _note(self, connection: socket.socket, crowd: deque[socket.socket]) -> None:
        """Add a connection to a crowd, and hang up on the oldest where it grows too large."""
        with self._lock:
            crowd.append(connection)
            oldest = crowd.popleft() if len(crowd) > self._greeted_at_most else None
        if oldest is not None:
            _hang_up(oldest)

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = greet_joiner(connection, self._secret)
            self._forget(connection)
            self._note(connection, self._nameless)
            hello = _hello(wire)
            self._forget(connection)
        except (OSError, Refused, WireEnded):
            self.failed_attempts.add()
            self._forget(connection)
            connection.close()
        else:
            self._take_arrival(wire, hello)

    def _take_arrival(self, wire: Wire, host_info: Mapping[str, Any]) -> None:
        link = HostConnection(wire, handlers={}, heartbeat=self._heartbeat, loop=self._loop)
        arrival = Arrival(link=link, host_info=host_info)
        with self._lock:
            why = self._turned_away_because
            if why is None and self._arrivals.qsize() >= self._greeted_at_most:
                why = CROWDED_SENTENCE
            if why is None:
                self._arrivals.put(arrival)
                with contextlib.suppress(OSError):  # full: it rings already
                    self._wake.send(b"!")
        if why is not None:
            refuse_host(arrival.link, why)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            for crowd in (self._strangers, self._nameless):
                with contextlib.suppress(ValueError):
                    crowd.remove(connection)


def _hello(wire: Wire) -> Mapping[str, Any]:
    """What a host that has proven itself says of itself."""
    hello = wire.receive(_HELLO_S)
    if hello is None or hello.kind != "hello" or hello.blob:
        raise Refused("no hello")
    return hello.values


def refuse_host(link: HostConnection, sentence: str) -> None:
    """Tell a host why it is not admitted, and hang up; never blocks."""
    link.part("refused", {"sentence": sentence})


def listener_at(address: str, port: int) -> socket.socket:
    """A listening socket on exactly this address of this machine; port 0 takes a free one. Raises PlaitError."""
    interface_of(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PlaitError(f"port {port} of {address} is taken; choose another, or none to have a free one") from None
        raise PlaitError(f"port {port} of {address} cannot be used ({error.strerror}); choose another") from None
    return listener


def joined_text(address: str, port: int) -> str:
    """HOST:PORT, with the brackets that an IPv6 address needs."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
