"""A connection between two hosts: heartbeats tell a silent host from a slow one, requests get their replies, and all
other messages wait in a mailbox."""

from __future__ import annotations

import contextlib
import itertools
import queue
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar, cast

from plait.checked_json import one_line
from plait.errors import PlaitError, RunFailed
from plait.hosts.protocol import (
    MESSAGE_NAMES,
    MESSAGES,
    Answer,
    Disconnect,
    Handlers,
    HostMessage,
    Question,
    Reply,
    RequestKind,
    UnexpectedMessage,
    answer_request,
    parse_message,
    parse_reply,
)
from plait.hosts.wire import Frame, Wire, WireEnded, parse_frame
from plait.launch.values.failure import describe_exception, error_for_caller, lost_host
from plait.units import format_bytes

UNREAD_BYTES_AT_MOST = 8 << 20
"""Bytes of frames that may wait in this process until somebody reads or answers them; with more the connection ends."""
NEWEST_ONLY = frozenset({"progress"})
"""Kinds of frames of which only the newest matters: it replaces an unread one."""
_FRAME_OVERHEAD_BYTES = 1024
_ROOM_BYTES = 1 << 20
_PART_S = 3.0
_LOOK_AT_LATEST_S = 1.0
_Q = TypeVar("_Q")
_A = TypeVar("_A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The period of heartbeats, and the length of silence after which the other end counts as lost."""

    period_s: float = 2.0
    lost_after_s: float = 10.0


DEFAULT_HEARTBEAT = Heartbeat()


class HostConnection:
    """One end of a living connection between two hosts; made on both ends once the wire stands.

    The thread of a `loop` reads, writes and beats, for all connections in it, and one of its own answers, from the
    first question on: so a busy caller is not taken for a dead one. Frames that are neither beat, question nor answer
    wait in the mailbox: a selector can wait for the link, `read` takes them. Nothing but `ask` waits for the other end,
    and what it makes this process keep is bounded: it counts as lost when it sends more than is read, reads less than
    it is sent, or sends bytes beside what has none. An end without `handlers` answers no questions.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        handlers: Handlers,
        heartbeat: Heartbeat,
        loop: ConnectionLoop | None = None,
    ) -> None:
        self.address = wire.address
        self._wire = wire
        self._handlers = handlers
        self._heartbeat = heartbeat
        self._lost: str | None = None
        self._ending = threading.Event()
        self._unread = threading.Lock()
        self._mail: dict[int | str, bytes] = {}
        """The JSON of unread frames in order, by a number or, where only the newest is kept, by kind."""
        self._unread_bytes = 0
        """Bytes of unread frames and unanswered questions."""
        self._awake, self._wake = bell()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[RequestKind[Any, Any], queue.SimpleQueue[tuple[Answer, bytes] | None]]] = {}
        """Each request that waits for its reply, and where to put that."""
        self._questions: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.descriptor = wire.fileno()
        self._heard_s = self._beaten_s = self._answered_s = time.monotonic()
        self._parting_until_s: float | None = None
        self._answering: threading.Thread | None = None
        self._loop = loop or ConnectionLoop()
        self._loop.add(self)

    @property
    def lost(self) -> str | None:
        """How the other end was lost, as the end of a sentence; None while it lives."""
        return self._lost

    def fileno(self) -> int:
        """Readable when there is mail or the other end is lost."""
        return self._awake.fileno()

    def read(self) -> list[HostMessage]:
        """The messages that have arrived since the last call; never blocks. An end that sent anything else is left."""
        with contextlib.suppress(OSError):  # nothing rings, or all is closed
            while self._awake.recv(4096):
                pass
        with self._unread:
            mail, self._mail = self._mail, {}
            self._unread_bytes -= sum(map(_kept_bytes, mail.values()))
        messages: list[HostMessage] = []
        for text in mail.values():
            try:
                messages.append(_message(parse_frame(text)))
            except UnexpectedMessage as error:
                self.leave(str(error))
                break
        return messages

    def send(self, message: HostMessage) -> None:
        """Send a message to the other end's mailbox, without waiting for that end; a lost one is no error here, but
        shows in `lost`."""
        self._push(MESSAGE_NAMES[type(message)], asdict(message), b"")

    def wait_for_room(self, within_s: float) -> bool:
        """Block until little is left that the other end has not taken; false when the time is up first."""
        try:
            return self._wire.wait_until_below(_ROOM_BYTES, within_s)
        except WireEnded as end:
            self._end(end.how)
            return True

    def ask(self, request: RequestKind[_Q, _A], question: _Q, blob: bytes, *, host: str) -> Reply[_A]:
        """What the other end's handler of this request replies; blocks for as long as that end lives and replies to
        something now and then, see `RequestKind`. Any thread.

        `host` names the other end in errors: RunFailed when it is lost, or the PlaitError that its handler raised.
        """
        number = next(self._numbers)
        answers = queue.SimpleQueue[tuple[Answer, bytes] | None]()
        self._waiting[number] = request, answers
        try:
            if self._lost is None:
                values = asdict(cast(Any, question))
                self._push("ask", {"number": number, "kind": request.name, "values": values}, blob)
                if found := self._answer_to(request, answers):
                    answer, beside = found
                    if answer.raised is not None:
                        raise error_for_caller(answer.raised, f"on {host}", host=host)
                    return parse_reply(request, answer.values, beside, host)
        finally:
            self._waiting.pop(number, None)
        raise lost_host(host, self._lost)

    def _answer_to(
        self, request: RequestKind[Any, Any], answers: queue.SimpleQueue[tuple[Answer, bytes] | None]
    ) -> tuple[Answer, bytes] | None:
        """The answer, or None from whoever notices that the other end is lost: here, when it answers nothing."""
        asked_s, limit_s = time.monotonic(), request.reply_within_s
        while True:
            due_s = max(asked_s, self._answered_s) + limit_s
            try:
                return answers.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                if time.monotonic() >= max(asked_s, self._answered_s) + limit_s:
                    self._end(f"it did not reply to {request.name!r} within {limit_s:g} s")

    def leave(self, why: str) -> None:
        """Tell the other end why this end leaves, as the end of a sentence, and close; what that end has not taken by
        now is not waited for."""
        self._lost = self._lost or why  # before the other end hangs up
        self._push("bye", {"why": why}, b"")
        self._end(why)
        self.close()

    def part(self, message: HostMessage) -> None:
        """Send a last message and close as soon as the other end has hung up, or a few seconds later; never blocks."""
        self.send(message)
        self._parting_until_s = time.monotonic() + _PART_S
        if self._lost is None:
            self._loop.attend_again(self)
        else:
            self.close()

    def wait_for_end(self, within_s: float) -> None:
        """Block until the other end has hung up or is lost, at most so long."""
        self._ending.wait(within_s)

    def close(self) -> None:
        """Close the connection and free its thread and sockets; may be called twice."""
        self._end("it was closed here")
        self._loop.remove(self)
        if self._answering is not None and self._answering is not threading.current_thread():
            self._answering.join(_PART_S)
        self._release()

    def _release(self) -> None:
        self._wire.release()
        self._awake.close()
        self._wake.close()

    # For the loop.

    def take(self) -> None:
        """Take what has arrived, and notice a connection that is over."""
        try:
            for frame in self._wire.arrived():
                self._sort(frame)
        except WireEnded as end:
            self._end(end.how)
        except UnexpectedMessage as error:
            self._end(str(error))
        except Exception as error:  # the loop goes on for all others
            traceback.print_exception(error)
            self._end(f"{error!r}, a bug in plait; please report what was printed")
        self._heard_s = time.monotonic()

    def look(self, now_s: float) -> float:
        """Beat when it is time to, and notice an end that is silent or takes nothing; returns when to look again."""
        if now_s >= self._beaten_s + self._heartbeat.period_s:
            self._beat(now_s)
        limit_s = self._wire.stall_s if self._wire.is_midway else self._heartbeat.lost_after_s
        if self._parting_until_s is not None and now_s >= self._parting_until_s:
            self._end("it was closed here")
            return now_s
        # With data there this process has slept, and not the other end.
        if now_s >= self._heard_s + limit_s and not self._wire.has_data():
            silent = f"nothing was heard from it for {self._heartbeat.lost_after_s:g} s"
            self._end(self._wire.stood_still().how if self._wire.is_midway else silent)
        due_s = min(self._beaten_s + self._heartbeat.period_s, self._heard_s + limit_s)
        return due_s if self._parting_until_s is None else min(due_s, self._parting_until_s)

    @property
    def has_unsent(self) -> bool:
        return self._wire.unsent_bytes > 0

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            self._wire.flush()
        except WireEnded as end:
            self._end(end.how)

    def forgotten(self) -> None:
        """Free the sockets of a connection that no caller will close."""
        if self._parting_until_s is not None:
            self._release()

    def _beat(self, now_s: float) -> None:
        self._beaten_s = now_s
        if self._wire.is_stuck(now_s):
            self._end(self._wire.takes_no_data().how)
        elif not self.has_unsent:  # else the other end has enough to hear of
            self._push("beat", {}, b"")

    # The answering thread, and what all share.

    def _answer(self) -> None:
        while (asked := self._questions.get()) is not None:
            question = parse_message(Question, parse_frame(asked.text).values)
            values, blob = self._handled(question, asked.blob)
            with self._unread:
                self._unread_bytes -= _kept_bytes(asked.text) + len(asked.blob)
            self._reply(question, values, blob)

    def _reply(self, question: Question, values: dict[str, Any], blob: bytes) -> None:
        try:
            self._push("answer", {"number": question.number, **values}, blob)
        except ValueError as error:  # too large, or no JSON: whoever asked must not wait for ever
            self._push("answer", {"number": question.number, **_bug_in(question.kind, error)}, b"")

    def _push(self, kind: str, values: Mapping[str, Any], blob: bytes) -> None:
        try:
            self._wire.post(kind, values, blob)
        except WireEnded as end:  # perhaps halfway through the frame: nothing can follow it
            self._end(end.how)
        if self.has_unsent and self._lost is None:
            self._loop.attend_again(self)

    def _sort(self, frame: Frame) -> None:
        if frame.kind == "ask":
            return self._take_question(frame)
        if frame.kind == "answer":
            return self._take_answer(frame)
        _check_blob(frame.kind, len(frame.blob), 0)
        if frame.kind == "bye":
            self._end(parse_message(Disconnect, frame.values).why)
        elif frame.kind != "beat":
            key = frame.kind if frame.kind in NEWEST_ONLY else next(self._numbers)
            with self._unread:
                replaced = self._mail.pop(key, None)
                self._unread_bytes -= _kept_bytes(replaced) if replaced is not None else 0
                self._count_unread(_kept_bytes(frame.text))
                self._mail[key] = frame.text
            self._ring()

    def _take_question(self, frame: Frame) -> None:
        if not self._handlers:
            raise UnexpectedMessage("it sent a request to the host that leads; install the same commit on both")
        kind, nbytes = parse_message(Question, frame.values).kind, len(frame.blob)
        _check_blob(kind, nbytes, max((one.blob_bytes for one in self._handlers if one.name == kind), default=0))
        with self._unread:
            self._count_unread(_kept_bytes(frame.text) + nbytes)
        self._questions.put(Frame(kind="ask", values={}, blob=frame.blob, text=frame.text))
        self._start_answering()

    def _take_answer(self, frame: Frame) -> None:
        answer = parse_message(Answer, frame.values)
        waiting = self._waiting.get(answer.number)
        if waiting is None:  # whoever asked has gone: the answer is dropped
            return
        request, answers = waiting
        _check_blob(f"reply to {request.name}", len(frame.blob), request.reply_blob_bytes)
        self._waiting.pop(answer.number, None)
        self._answered_s = time.monotonic()
        answers.put((answer, frame.blob))

    def _count_unread(self, nbytes: int) -> None:
        """Note that so much more waits; the caller holds the lock."""
        if self._unread_bytes + nbytes > UNREAD_BYTES_AT_MOST:
            raise UnexpectedMessage(f"it sent over {format_bytes(UNREAD_BYTES_AT_MOST)} more than was read here")
        self._unread_bytes += nbytes

    def _start_answering(self) -> None:
        if self._answering is None and self._lost is None:
            name = f"plait answer {self.address}"
            self._answering = threading.Thread(target=self._answer, daemon=True, name=name)
            self._answering.start()

    def _handled(self, question: Question, blob: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            reply = answer_request(self._handlers, question.kind, question.values, blob)
        except PlaitError as error:
            return {"raised": asdict(describe_exception(error, None))}, b""
        except Exception as error:
            return _bug_in(question.kind, error), b""
        return {"values": asdict(reply.values)}, reply.blob

    def _end(self, how: str) -> None:
        if self._lost is None:
            self._lost = how
        self._ending.set()
        self._wire.close()
        self._questions.put(None)
        for _, answers in list(self._waiting.values()):
            answers.put(None)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody listens any more
            self._wake.send(b"!")


def part_from_all(links: Sequence[HostConnection], message: HostMessage) -> None:
    """Send a last message to all, wait a moment until they have taken it and hung up, and close; one wait for all."""
    for link in links:
        link.part(message)
    deadline = time.monotonic() + _PART_S
    for link in links:
        link.wait_for_end(max(0.0, deadline - time.monotonic()))
    for link in links:
        link.close()


def _bug_in(kind: str, error: Exception) -> dict[str, Any]:
    """The answer to a request whose handler failed as no handler should."""
    traceback.print_exception(error)
    bug = RunFailed(f"{kind!r} failed with {error!r}; this is a bug in plait, please report what that host printed")
    return {"raised": asdict(describe_exception(bug, None))}


def _kept_bytes(text: bytes) -> int:
    return len(text) + _FRAME_OVERHEAD_BYTES


def _check_blob(kind: str, nbytes: int, allowed: int) -> None:
    """Raise UnexpectedMessage for more bytes beside a frame than plait sends."""
    if nbytes > allowed:
        raise UnexpectedMessage(
            f"it sent {nbytes} bytes beside {one_line(kind)[:80]!r}, where plait sends {allowed or 'none'}"
            f"{' at most' if allowed else ''}; install the same commit on both"
        )


def _message(frame: Frame) -> HostMessage:
    """A frame of the mailbox as what it must be; raises UnexpectedMessage."""
    if frame.kind not in MESSAGES:
        kind = one_line(frame.kind)[:80]
        raise UnexpectedMessage(f"it sent {kind!r}, which plait does not send; install the same commit on both")
    return parse_message(MESSAGES[frame.kind], frame.values)


class ConnectionLoop:
    """One thread for all of a process's connections: it reads what arrives, and looks after each in time, from `add` to
    `remove`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._changes: deque[Callable[[selectors.BaseSelector], None]] = deque()
        """What other threads want changed; the loop's thread carries it out."""
        self._attended: dict[HostConnection, int] = {}
        self._wake: socket.socket | None = None
        self._next_look_s = 0.0

    def add(self, connection: HostConnection) -> None:
        """Attend to a connection from now on; any thread."""
        self._change(partial(self._add, connection))

    def remove(self, connection: HostConnection) -> None:
        """Attend to it no more; when this returns, nothing of it is being called. Any thread."""
        if threading.current_thread() is not self._thread:
            removed = threading.Event()
            self._change(partial(self._remove, connection, removed))
            removed.wait()

    def attend_again(self, connection: HostConnection) -> None:
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

    def _add(self, connection: HostConnection, selector: selectors.BaseSelector) -> None:
        self._attended[connection] = connection.descriptor
        selector.register(connection.descriptor, selectors.EVENT_READ, connection)
        self._serve(connection, selectors.EVENT_READ, selector)  # what came with the frames before it was added
        self._next_look_s = 0.0

    def _remove(self, connection: HostConnection, removed: threading.Event, selector: selectors.BaseSelector) -> None:
        self._forget(connection, selector)
        removed.set()

    def _attend_again(self, connection: HostConnection, selector: selectors.BaseSelector) -> None:
        if connection in self._attended:
            self._serve(connection, selectors.EVENT_WRITE, selector)
            self._next_look_s = 0.0

    def _serve(self, connection: HostConnection, events: int, selector: selectors.BaseSelector) -> None:
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

    def _forget(self, connection: HostConnection, selector: selectors.BaseSelector) -> None:
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
