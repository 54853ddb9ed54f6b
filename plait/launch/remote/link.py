"""A connection between two hosts: heartbeats tell a silent host from a slow one, requests get their replies, and all
other messages wait in a mailbox."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.errors import PlaitError, RunFailed
from plait.launch.network.connection_loop import ConnectionLoop, bell
from plait.launch.remote.messages import Answer, Farewell, Question, UnexpectedMessage, parse_message
from plait.launch.remote.wire import Frame, Wire, WireEnded
from plait.launch.values.failed_job import error_for_caller, lost_host
from plait.launch.values.failure import describe_exception

_PART_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A handler's reply to a request from the other host: JSON values, and bytes beside them."""

    values: Mapping[str, Any] = field(default_factory=dict)
    blob: bytes = b""


Handler = Callable[[Frame], Reply]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The period of heartbeats, and the length of silence after which the other end counts as lost."""

    period_s: float = 2.0
    lost_after_s: float = 10.0


DEFAULT_HEARTBEAT = Heartbeat()


class HostConnection:
    """One end of a living connection between two hosts; made on both ends once the wire stands.

    The thread of a `loop` reads and beats, for all connections in it, and one of its own answers, from the first
    question on: so a busy caller is not taken for a dead one. Frames that are neither beat, question nor answer
    wait in the mailbox: a selector can wait for the link, `read` takes them.
    """

    def __init__(
        self, wire: Wire, *, handlers: Mapping[str, Handler], heartbeat: Heartbeat, loop: ConnectionLoop | None = None
    ) -> None:
        self.address = wire.address
        self._wire = wire
        self._handlers = handlers
        self._heartbeat = heartbeat
        self._lost: str | None = None
        self._ending = threading.Event()
        self._mail: deque[Frame] = deque()
        self._awake, self._wake = bell()
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[tuple[Answer, bytes] | None]] = {}
        self._questions: queue.SimpleQueue[tuple[Question, bytes] | None] = queue.SimpleQueue()
        self.descriptor = wire.fileno()
        self._heard_s = self._beaten_s = self._took_s = time.monotonic()
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

    def read(self) -> list[Frame]:
        """The frames that have arrived since the last call; never blocks."""
        with contextlib.suppress(BlockingIOError):
            while self._awake.recv(4096):
                pass
        return [self._mail.popleft() for _ in range(len(self._mail))]

    def send(self, kind: str, values: Mapping[str, Any]) -> None:
        """Send one frame to the other end's mailbox; a lost end is no error here, but shows in `lost`."""
        self._push(kind, values, b"")

    def ask(self, kind: str, values: Mapping[str, Any], blob: bytes, *, host: str) -> Frame:
        """What the other end's handler of this kind replies; blocks for as long as that end lives. Any thread.

        `host` names the other end in errors: RunFailed when it is lost, or the PlaitError that its handler raised.
        """
        number = next(self._numbers)
        answers = self._waiting[number] = queue.SimpleQueue[tuple[Answer, bytes] | None]()
        try:
            if self._lost is None:
                self._push("ask", {"number": number, "kind": kind, "values": values}, blob)
                answer = answers.get()  # None from whoever notices that the other end is lost
                if answer is not None:
                    return _opened(*answer, host)
        finally:
            del self._waiting[number]
        raise lost_host(host, self._lost)

    def leave(self, why: str) -> None:
        """Tell the other end why this end leaves, as the end of a sentence, and close."""
        self.send("bye", {"why": why})
        self.close()

    def part(self, kind: str, values: Mapping[str, Any]) -> None:
        """Send a last frame, wait a moment for the other end to take it and hang up, and close."""
        part_from_all([self], kind, values)

    def wait_for_end(self, within_s: float) -> None:
        """Block until the other end has hung up or is lost, at most so long."""
        self._ending.wait(within_s)

    def close(self) -> None:
        """Close the connection and free its thread and sockets; may be called twice."""
        self._end("it was closed here")
        self._loop.remove(self)
        if self._answering is not None and self._answering is not threading.current_thread():
            self._answering.join(_PART_S)
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
        # With data there this process has slept, and not the other end.
        if now_s >= self._heard_s + limit_s and not self._wire.has_data():
            silent = f"nothing was heard from it for {self._heartbeat.lost_after_s:g} s"
            self._end(self._wire.stood_still().how if self._wire.is_midway else silent)
        return min(self._beaten_s + self._heartbeat.period_s, self._heard_s + limit_s)

    def _beat(self, now_s: float) -> None:
        self._beaten_s = now_s
        try:
            if self._wire.try_send("beat"):
                self._took_s = now_s
            elif now_s >= self._took_s + self._wire.stall_s:
                raise self._wire.takes_no_data()
        except WireEnded as end:
            self._end(end.how)

    # The answering thread, and what all share.

    def _answer(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, blob = asked
            values, blob = self._handled(question, blob)
            self._push("answer", {"number": question.number, **values}, blob)

    def _push(self, kind: str, values: Mapping[str, Any], blob: bytes) -> None:
        try:
            self._wire.send(kind, values, blob)
        except WireEnded as end:  # perhaps halfway through the frame: nothing can follow it
            self._end(end.how)

    def _sort(self, frame: Frame) -> None:
        if frame.kind == "bye":
            self._end(parse_message(Farewell, frame.values).why)
        elif frame.kind == "ask":
            self._questions.put((parse_message(Question, frame.values), frame.blob))
            self._start_answering()
        elif frame.kind == "answer":
            answer = parse_message(Answer, frame.values)
            waiting = self._waiting.get(answer.number)
            if waiting is not None:
                waiting.put((answer, frame.blob))
        elif frame.kind != "beat":
            self._mail.append(frame)
            self._ring()

    def _start_answering(self) -> None:
        if self._answering is None and self._lost is None:
            name = f"plait answer {self.address}"
            self._answering = threading.Thread(target=self._answer, daemon=True, name=name)
            self._answering.start()

    def _handled(self, question: Question, blob: bytes) -> tuple[dict[str, Any], bytes]:
        kind = question.kind
        try:
            if kind not in self._handlers:
                raise UnexpectedMessage("it was asked what nobody asks it; install the same commit on both")
            reply = self._handlers[kind](Frame(kind=kind, values=question.values, blob=blob))
        except PlaitError as error:
            return {"raised": asdict(describe_exception(error, None))}, b""
        except Exception as error:
            traceback.print_exception(error)
            bug = RunFailed(
                f"{kind!r} failed with {error!r}; this is a bug in plait, please report what that host printed"
            )
            return {"raised": asdict(describe_exception(bug, None))}, b""
        return {"values": reply.values}, reply.blob

    def _end(self, how: str) -> None:
        if self._lost is None:
            self._lost = how
        self._ending.set()
        self._wire.close()
        self._questions.put(None)
        for waiting in list(self._waiting.values()):
            waiting.put(None)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody listens any more
            self._wake.send(b"!")


def part_from_all(links: Sequence[HostConnection], kind: str, values: Mapping[str, Any]) -> None:
    """Send a last frame to all, wait a moment until they have taken it and hung up, and close; one wait for all."""
    for link in links:
        link.send(kind, values)
    deadline = time.monotonic() + _PART_S
    for link in links:
        link.wait_for_end(max(0.0, deadline - time.monotonic()))
    for link in links:
        link.close()


def _opened(answer: Answer, blob: bytes, host: str) -> Frame:
    if answer.raised is not None:
        raise error_for_caller(answer.raised, f"on {host}", host=host)
    return Frame(kind="answer", values=answer.values or {}, blob=blob)
