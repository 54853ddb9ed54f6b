"""An authenticated connection between two hosts: frames that cannot be altered, replayed, reordered or added to."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.checked_json import parse_json, printable, typed_value
from plait.errors import RunFailed
from plait.units import format_bytes

BLOB_BYTES_AT_MOST = 1 << 20
"""Small enough that a slow link carries one between two heartbeats, and that a few of them fit into memory."""
VALUES_BYTES_AT_MOST = 2 << 20
UNSENT_BYTES_AT_MOST = 8 << 20
"""Bytes that may wait in this process because the other end reads slowly."""
STALL_S = 10.0
_CHUNK_BYTES = 1 << 18
# Note [frame]: length of what follows the first four bytes, a counter from 0 in each direction, length of the JSON;
# then the JSON ({"kind", "values"}), the blob, and the HMAC-SHA256 of all that came before in this frame.
_PREFIX = struct.Struct("!IQI")
_LENGTH_BYTES = 4
_MAC_BYTES = 32
FRAME_BYTES_AT_MOST = _PREFIX.size + VALUES_BYTES_AT_MOST + BLOB_BYTES_AT_MOST + _MAC_BYTES


class WireEnded(RunFailed):
    """The connection is over: closed by the other end, stuck halfway through a frame, or carrying foreign bytes.

    `how` says it as the end of a sentence.
    """

    def __init__(self, peer: str, how: str) -> None:
        super().__init__(f"{peer} was lost: {how}; see what was printed there")
        self.how = how


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message between hosts: a kind, JSON values, and bytes beside them."""

    kind: str
    values: Mapping[str, Any]
    blob: bytes = b""
    text: bytes = field(default=b"", repr=False, compare=False)
    """The JSON as it arrived, from which `parse_frame` makes the frame again: values take many times its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FrameText:
    kind: str
    values: Mapping[str, Any]


def parse_frame(text: bytes, blob: bytes = b"") -> Frame:
    """The frame whose JSON this is; raises ValueError where it is none."""
    parsed = typed_value(_FrameText, parse_frame_text(text))
    return Frame(kind=parsed.kind, values=parsed.values, blob=blob, text=text)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SessionKeys:
    """One key for each direction, known to the two ends of one connection alone."""

    sending: bytes
    receiving: bytes


class Wire:
    """One end of an authenticated connection; any thread may send, one at a time may receive.

    Frames are authenticated, not encrypted. `peer` names the other end in sentences; `stall_s` is how long a frame may
    stand still halfway.
    """

    def __init__(self, connection: socket.socket, keys: SessionKeys, *, peer: str, stall_s: float = STALL_S) -> None:
        connection.setblocking(False)
        self.peer = peer
        self.address: str = connection.getpeername()[0]
        self.local_address: str = connection.getsockname()[0]
        self._connection = connection
        self._keys = keys
        self.stall_s = stall_s
        self._sent = 0
        self._received = 0
        self._rest = bytearray()
        self._sending = threading.Lock()
        """Held while the queue changes, never while anything waits."""
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        """Bytes of frames that the socket has not taken yet."""
        self._took_s = time.monotonic()

    def send(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> None:
        """Send one frame; blocks while the other end is slow, raises WireEnded when it takes nothing any more."""
        self.post(kind, values, blob)
        while self.unsent_bytes:
            if not self._is_writable(self.stall_s):
                raise self.takes_no_data()
            self.flush()

    def post(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> None:
        """Send as much of a frame as the socket takes now and leave the rest to `flush`; never blocks.

        Raises WireEnded when the connection is over, or too much waits for the other end to read it.
        """
        with self._sending:
            if not self._unsent:
                self._took_s = time.monotonic()
            for piece in self._sealed(kind, values, blob):
                self._unsent.append(memoryview(piece))
                self.unsent_bytes += len(piece)
            self._push()
            if self.unsent_bytes > UNSENT_BYTES_AT_MOST:
                raise self._ended(f"it read too slowly: {format_bytes(UNSENT_BYTES_AT_MOST)} were waiting for it")

    def flush(self) -> None:
        """Send as much of what is left as the socket takes now; never blocks. Raises WireEnded."""
        with self._sending:
            self._push()

    def wait_until_below(self, nbytes: int, within_s: float) -> bool:
        """Block until at most `nbytes` are left to send; false when the time is up first. Raises WireEnded."""
        deadline = time.monotonic() + within_s
        while self.unsent_bytes > nbytes:
            if not self._is_writable(deadline - time.monotonic()):
                return False
            self.flush()
        return True

    def is_stuck(self, now_s: float) -> bool:
        """Whether the other end has taken nothing of what is left to send for `stall_s`."""
        return self.unsent_bytes > 0 and now_s >= self._took_s + self.stall_s

    def receive(self, within_s: float) -> Frame | None:
        """The next frame, or None when nothing at all arrived in time; a frame that has begun is waited for.

        Raises WireEnded, after which the wire is of no more use.
        """
        if not self._rest and not self._pull(within_s):
            return None
        while (frame := self._next()) is None:
            if not self._pull(self.stall_s):
                raise self.stood_still()
        return frame

    def arrived(self) -> Iterator[Frame]:
        """The frames that are complete by now, after one look at the socket; never blocks.

        Raises WireEnded as `receive` does, but for a frame that stands still halfway: that is for the caller to notice.
        """
        self._pull(0)
        while (frame := self._next()) is not None:
            yield frame

    @property
    def is_midway(self) -> bool:
        """Whether a frame has begun to arrive, and is not complete."""
        return bool(self._rest)

    def stood_still(self) -> WireEnded:
        """The error for a frame whose rest did not come."""
        return self._ended(f"its connection stood still for {self.stall_s:g} s")

    def takes_no_data(self) -> WireEnded:
        """The error for an other end that read nothing for too long."""
        return self._ended(f"it took no data for {self.stall_s:g} s")

    def has_data(self) -> bool:
        """Whether unread data has arrived, or the other end has closed."""
        try:
            return _ready(self._connection, select.POLLIN, 0)
        except OSError:
            return True

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        """End the connection, also under a thread that is blocked in it; may be called twice."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the socket back; no thread may be using the wire any more."""
        self._connection.close()

    def _sealed(self, kind: str, values: Mapping[str, Any], blob: bytes) -> Sequence[bytes]:
        """The bytes of the next frame, in pieces."""
        text = json.dumps({"kind": kind, "values": values}, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > VALUES_BYTES_AT_MOST or len(blob) > BLOB_BYTES_AT_MOST:
            raise ValueError(f"a frame of {len(text)} + {len(blob)} bytes is over the cap; send it in parts")
        length = _PREFIX.size - _LENGTH_BYTES + len(text) + len(blob) + _MAC_BYTES
        head = _PREFIX.pack(length, self._sent, len(text)) + text
        self._sent += 1
        tag = _mac(self._keys.sending, head, blob)
        # Small frames in one piece; a large blob is not copied for it.
        return (head + blob + tag,) if len(blob) < _CHUNK_BYTES else (head, blob, tag)

    def _push(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                while self._unsent:
                    taken = self._connection.send(self._unsent[0])
                    self._took_s = time.monotonic()
                    self.unsent_bytes -= taken
                    first = self._unsent.popleft()
                    if taken < len(first):
                        self._unsent.appendleft(first[taken:])
        except OSError:
            raise self._ended("its connection was closed") from None

    def _is_writable(self, within_s: float) -> bool:
        try:
            return _ready(self._connection, select.POLLOUT, within_s)
        except OSError:
            raise self._ended("its connection was closed") from None

    def _pull(self, within_s: float) -> bool:
        """Take what has arrived, at least one byte; false when the time is up first."""
        deadline = time.monotonic() + within_s
        try:
            while _ready(self._connection, select.POLLIN, deadline - time.monotonic()):
                with contextlib.suppress(BlockingIOError):
                    chunk = self._connection.recv(_CHUNK_BYTES)
                    if not chunk:
                        raise ConnectionError
                    self._rest += chunk
                    return True
        except OSError:
            raise self._ended("its connection was closed") from None
        return False

    def _next(self) -> Frame | None:
        """The frame at the beginning of what has arrived, once all of it has."""
        length = self._frame_length()
        if length is None or len(self._rest) < length:
            return None
        with memoryview(self._rest) as view:
            frame = bytes(view[:length])
        del self._rest[:length]
        return self._opened(frame)

    def _frame_length(self) -> int | None:
        if len(self._rest) < _LENGTH_BYTES:
            return None
        length = _LENGTH_BYTES + int.from_bytes(self._rest[:_LENGTH_BYTES])
        if not _PREFIX.size + _MAC_BYTES <= length <= FRAME_BYTES_AT_MOST:
            raise self._foreign("of an impossible length")
        return length

    def _opened(self, whole: bytes) -> Frame:
        body, tag = memoryview(whole)[:-_MAC_BYTES], whole[-_MAC_BYTES:]
        if not hmac.compare_digest(_mac(self._keys.receiving, body), tag):
            raise self._foreign("that the other end has not sent")
        _, counter, text_bytes = _PREFIX.unpack_from(body)
        if counter != self._received:
            raise self._foreign("out of its order")
        self._received += 1
        split = _PREFIX.size + text_bytes
        if split > len(body) or text_bytes > VALUES_BYTES_AT_MOST:
            raise self._foreign("whose parts do not fit into it")
        try:
            return parse_frame(bytes(body[_PREFIX.size : split]), bytes(body[split:]))
        except ValueError as error:
            raise self._ended(f"it sent something that is not a message of plait ({error})") from None

    def _foreign(self, how: str) -> WireEnded:
        return self._ended(f"its connection carried a frame {how}: altered on the way, or not from plait")

    def _ended(self, how: str) -> WireEnded:
        return WireEnded(self.peer, how)


def _mac(key: bytes, *parts: bytes | memoryview) -> bytes:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _ready(connection: socket.socket, event: int, within_s: float) -> bool:
    if connection.fileno() < 0:
        raise OSError("released")
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(max(0.0, within_s) * 1000))


def parse_frame_text(text: bytes) -> Any:
    """The value of a JSON text; raises ValueError unless it is UTF-8 without NUL, of bounded depth and with finite
    numbers of bounded length alone.

    Its strings come without control characters other than line breaks and tabs: an escape sequence would be obeyed by
    the terminal that shows it.
    """
    return parse_json(text.decode("utf-8"), text=_checked_text)


def _checked_text(text: str) -> str:
    if "\0" in text:  # ends a name for the system, and so would make it another one
        raise ValueError("its text has a NUL")
    return printable(text)
