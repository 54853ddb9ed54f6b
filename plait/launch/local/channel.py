"""JSON lines over Unix socket pairs: the only wire between supervisor, fork server and ranks."""

from __future__ import annotations

import array
import json
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import RunFailed

LINE_BYTES_AT_MOST = 1 << 20
_CHUNK_BYTES = 1 << 16
_DESCRIPTOR_BYTES = array.array("i").itemsize


def send_line(wire: socket.socket, value: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one value as a line of JSON, with open file descriptors beside it; blocks while the wire is full.

    Raises ValueError for a number that is not finite, which JSON has no word for."""
    line = json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    if len(line) > LINE_BYTES_AT_MOST:
        raise ValueError(f"a message of {len(line)} bytes is over the cap of {LINE_BYTES_AT_MOST}")
    sent = socket.send_fds(wire, [line], descriptors) if descriptors else 0
    wire.sendall(memoryview(line)[sent:])


class LineReader:
    """Takes whole lines of JSON off a wire; half a line left by a killed sender is never seen.

    `ended` turns true when the other end is closed. `descriptors` collects those that came with the lines.
    """

    def __init__(self, wire: socket.socket, *, sender: str, descriptors_at_most: int = 0) -> None:
        self.wire = wire
        self.ended = False
        self.descriptors: list[int] = []
        self._sender = sender
        self._descriptors_at_most = descriptors_at_most
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """The values that one receive completes; empty when nothing has arrived. Never blocks."""
        chunk = self._receive()
        return self._split(chunk) if chunk else []

    def read_all(self) -> list[dict[str, Any]]:
        """All that has arrived so far; for a sender that is dead or silent, else it may not end."""
        values: list[dict[str, Any]] = []
        while chunk := self._receive():
            values += self._split(chunk)
        return values

    def wait(self, within_s: float) -> bool:
        """Block until something has arrived or the other end is closed; false when the time is up first."""
        poll = select.poll()
        poll.register(self.wire, select.POLLIN)
        return bool(poll.poll(max(0.0, within_s) * 1000))

    def _receive(self) -> bytes:
        # Not socket.recv_fds: that of Python 3.11 drops the flags that it is given, and would block.
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        space = socket.CMSG_LEN(self._descriptors_at_most * _DESCRIPTOR_BYTES) if self._descriptors_at_most else 0
        try:
            chunk, beside, _, _ = self.wire.recvmsg(_CHUNK_BYTES, space, flags)
        except BlockingIOError:
            return b""
        except ConnectionResetError:
            self.ended = True
            return b""
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _DESCRIPTOR_BYTES
                self.descriptors += array.array("i", data[:whole])
        self.ended = self.ended or not chunk
        return chunk

    def _split(self, chunk: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LINE_BYTES_AT_MOST:
            raise self._garbled()
        return [self._parse(line) for line in lines]

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError:
            raise self._garbled() from None
        if not isinstance(value, dict):
            raise self._garbled()
        return value

    def _garbled(self) -> RunFailed:
        return RunFailed(f"{self._sender} sent bytes that are not a message; run the same command again")
