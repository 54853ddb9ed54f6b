"""A host with the secret that sends more than is read, reads less than it is sent, or never hangs up: it is left, and
costs host 0 a few MB and no waiting."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from plait.errors import RunFailed
from plait.hosts.connection import UNREAD_BYTES_AT_MOST, Heartbeat, HostConnection
from plait.hosts.handshake import new_secret
from plait.hosts.joining import CROWDED_SENTENCE, JoinListener, listener_at, refuse_host
from plait.hosts.leader import HostPart, Hosts
from plait.hosts.member import connect
from plait.hosts.protocol import (
    DONE,
    EventReport,
    HostMessage,
    Nothing,
    Notice,
    RanksProgress,
    Reply,
    RequestKind,
    SignalOrder,
)
from plait.hosts.wire import Frame, SessionKeys, Wire, WireEnded
from tests.launch.processes import ENTRIES, Record, anybody, job, open_descriptors, wait_until

SECRET = new_secret()
PATIENT = Heartbeat(period_s=0.1, lost_after_s=60.0)
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Text:
    x: str = ""


@dataclass(frozen=True, kw_only=True)
class Done:
    done: bool


LIST = RequestKind(name="list", question=Nothing, reply=Text)
BLOCK = RequestKind(name="block", question=Nothing, reply=Done, blob_bytes=MIB)
OPEN = RequestKind(name="open", question=Nothing, reply=Nothing, reply_within_s=0.5)
A_FEW_MB = 40 * MIB
"""What host 0 may hold of one connection at its worst: unread frames of 8 MiB, and the frame that is being read, whose
2 MiB of JSON take more as Python's values."""


@pytest.fixture
def gate() -> Iterator[JoinListener]:
    gate = JoinListener(address="127.0.0.1", port=0, secret=SECRET, heartbeat=PATIENT)
    yield gate
    gate.close("the test is over")


@contextlib.contextmanager
def joined(gate: JoinListener) -> Iterator[tuple[HostConnection, Wire]]:
    """Host 0's connection to a host that has joined, and that host's end, which does as the test likes."""
    wire = connect("127.0.0.1", gate.port, SECRET, local_address="127.0.0.2")
    wire.send("hello", {"name": "evil"})
    arrival = gate.next(10)
    assert arrival is not None
    try:
        yield arrival.link, wire
    finally:
        wire.close()
        wire.release()
        arrival.link.close()


def flood(wire: Wire, send: Callable[[int], object], count: int) -> None:
    """Send until all is sent or the other end hangs up."""
    with contextlib.suppress(WireEnded):
        for number in range(count):
            send(number)


def event(size: int) -> dict[str, object]:
    return {"number": 1, "event": {"rank": 1, "message": "x", "values": {"text": "a" * size}}, "sent_at_s": 1.0}


def test_mail_that_nobody_reads_is_bounded_and_ends_the_connection(gate: JoinListener) -> None:
    with joined(gate) as (link, wire):
        tracemalloc.start()
        try:
            flood(wire, lambda number: wire.send("event", event(MIB)), 100)
            wait_until(lambda: link.lost is not None, within_s=20)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert link.lost == "it sent over 8 MiB more than was read here"
        assert peak_bytes < A_FEW_MB
        kept = sum(map(len, link._mail.values()))
        assert UNREAD_BYTES_AT_MOST - 2 * MIB < kept <= UNREAD_BYTES_AT_MOST


@pytest.mark.slow
def test_small_values_that_are_large_in_memory_do_not_grow_it(gate: JoinListener) -> None:
    """One list takes two bytes and a comma on the wire, and some seventy in Python's memory."""
    with joined(gate) as (link, wire):
        tracemalloc.start()
        try:
            flood(wire, lambda number: wire.send("event", {"lists": [[]] * (MIB // 24)}), 6)
            wait_until(lambda: len(link._mail) == 6 or link.lost is not None, within_s=60)
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert link.lost is None and held_bytes < 3 * MIB


def test_what_is_read_counts_no_more(gate: JoinListener) -> None:
    with joined(gate) as (link, wire):
        frames: list[HostMessage] = []
        for number in range(20):
            wire.send("event", event(MIB))
            wait_until(lambda number=number: frames.extend(link.read()) or len(frames) == number + 1, within_s=10)
        assert link.lost is None


def test_of_how_far_ranks_are_only_the_newest_waits(gate: JoinListener) -> None:
    """A run whose terminal was stopped for a night loses no host for it."""
    with joined(gate) as (link, wire):
        for number in range(20_000):
            wire.send("progress", {"number": number, "ranks": []})
        wire.send("event", event(1))
        frames: list[HostMessage] = []

        def is_last_here() -> bool:
            frames.extend(link.read())
            return any(isinstance(frame, EventReport) for frame in frames)

        wait_until(is_last_here, within_s=60)
        assert link.lost is None
        assert [frame.number for frame in frames if isinstance(frame, RanksProgress)][-1] == 19_999


@pytest.mark.parametrize("kind", ["event", "bye", "beat", "whatever"])
def test_bytes_beside_what_has_none_end_the_connection(gate: JoinListener, kind: str) -> None:
    with joined(gate) as (link, wire):
        wire.send(kind, {"why": "x"}, b"xyz")
        wait_until(lambda: link.lost is not None, within_s=10)
        assert link.lost == f"it sent 3 bytes beside {kind!r}, where plait sends none; install the same commit on both"


def test_a_reply_with_bytes_that_were_not_asked_for_ends_the_connection(gate: JoinListener) -> None:
    with joined(gate) as (link, wire):
        evil = HostConnection(
            wire, handlers={LIST: lambda asked, blob: Reply(values=Text(), blob=bytes(MIB))}, heartbeat=PATIENT
        )
        with pytest.raises(RunFailed, match="evil was lost: it sent 1048576 bytes beside 'reply to list'"):
            link.ask(LIST, Nothing(), b"", host="evil")
        evil.close()


def test_a_reply_that_is_too_large_to_send_is_an_error_not_a_wait(gate: JoinListener) -> None:
    with joined(gate) as (link, wire):
        large = HostConnection(
            wire, handlers={LIST: lambda asked, blob: Reply(values=Text(x="x" * 3 * MIB))}, heartbeat=PATIENT
        )
        with pytest.raises(RunFailed, match=r"'list' failed with ValueError.*bug in plait"):
            link.ask(LIST, Nothing(), b"", host="host-2")
        large.close()


def test_replies_that_nobody_waits_for_are_dropped(gate: JoinListener) -> None:
    with joined(gate) as (link, wire):
        tracemalloc.start()
        try:
            flood(wire, lambda number: wire.send("answer", {"number": number, "values": {}}, bytes(MIB)), 60)
            wire.send("event", event(1))
            wait_until(lambda: bool(link.read()) or link.lost is not None, within_s=20)
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert link.lost is None and held_bytes < 8 * MIB


def test_questions_that_wait_for_an_answer_are_bounded(gate: JoinListener) -> None:
    """A joined host whose host 0 asks on and on, while the first question is being answered."""
    with joined(gate) as (link, wire):
        goes_on = threading.Event()
        host = HostConnection(
            wire, handlers={BLOCK: lambda asked, blob: Reply(values=Done(done=goes_on.wait(60)))}, heartbeat=PATIENT
        )
        leader = link._wire
        tracemalloc.start()
        try:
            question = {"kind": "block", "values": {}}
            flood(leader, lambda number: leader.send("ask", {"number": number, **question}, bytes(MIB)), 100)
            wait_until(lambda: host.lost is not None, within_s=20)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        goes_on.set()
        assert host.lost == "it sent over 8 MiB more than was read here" and peak_bytes < A_FEW_MB
        host.close()


def test_who_reads_nothing_holds_nobody_and_is_left(gate: JoinListener) -> None:
    """Orders to a joined host that never reads: 20 MiB, more than the kernels keep between the two."""
    with joined(gate) as (link, _):
        tracemalloc.start()
        try:
            began_s = time.monotonic()
            for _ in range(20):
                link.send(SignalOrder(number=1, order="SIGTERM", why="x" * MIB))
            took_s = time.monotonic() - began_s
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert link.lost == "it read too slowly: 8 MiB were waiting for it"
        assert took_s < 5  # the connection stands still for 10 s before anybody says so
        assert peak_bytes < A_FEW_MB


def test_who_takes_a_byte_now_and_then_holds_nobody(gate: JoinListener) -> None:
    ended = threading.Event()
    with joined(gate) as (link, wire):
        sent = threading.Thread(
            target=lambda: [link.send(Notice(sentence="x" * MIB)) for _ in range(8)] and ended.set(), daemon=True
        )
        sent.start()
        deadline = time.monotonic() + 5
        while not ended.is_set() and time.monotonic() < deadline:
            wire._connection.setblocking(True)
            wire._connection.recv(1)
            ended.wait(0.05)
        assert ended.is_set()


def test_what_was_not_taken_at_once_arrives_when_it_is(gate: JoinListener) -> None:
    with joined(gate) as (link, wire):
        for number in range(6):
            link.send(Notice(sentence=f"{number}" + "x" * MIB))
        frames: list[Frame] = []
        while len(frames) < 6:
            frame = wire.receive(10)
            assert frame is not None
            frames += [frame] if frame.kind == "notice" else []
        assert [frame.values["sentence"][0] for frame in frames] == list("012345") and link.lost is None


def test_a_host_that_lives_and_never_replies_is_lost() -> None:
    with listening_pair() as (near, far):
        silent = HostConnection(far, handlers={OPEN: _never}, heartbeat=PATIENT)
        link = HostConnection(near, handlers={}, heartbeat=PATIENT)
        with pytest.raises(RunFailed, match=r"host-2 was lost: it did not reply to 'open' within 0\.5 s; "):
            link.ask(OPEN, Nothing(), b"", host="host-2")
        _STOP.set()
        for each in (link, silent):
            each.close()


_STOP = threading.Event()


def _never(asked: Nothing, blob: bytes) -> Reply[Nothing]:
    _STOP.wait(60)
    return DONE


@contextlib.contextmanager
def listening_pair() -> Iterator[tuple[Wire, Wire]]:
    """Two ends of one wire."""
    with listener_at("127.0.0.1", 0) as listener:
        outside = socket.create_connection(listener.getsockname())
        inside, _ = listener.accept()
    with inside, outside:
        yield (
            Wire(inside, SessionKeys(sending=b"a", receiving=b"b"), peer="far"),
            Wire(outside, SessionKeys(sending=b"b", receiving=b"a"), peer="near"),
        )


def test_refusing_joiners_that_do_not_hang_up_takes_no_time(gate: JoinListener) -> None:
    before = open_descriptors("self")
    wires = [connect("127.0.0.1", gate.port, SECRET) for _ in range(6)]
    for wire in wires:
        wire.send("hello", {"name": "stays"})
    arrivals = [gate.next(10) for _ in wires]
    began_s = time.monotonic()
    for arrival in arrivals:
        assert arrival is not None
        refuse_host(arrival.link, "it has another version")
    assert time.monotonic() - began_s < 1  # one wait for one of them is 3 s
    for wire in wires:
        frames = [frame for _ in range(2) if (frame := wire.receive(5)) is not None and frame.kind == "refused"]
        assert [frame.values for frame in frames[:1]] == [{"sentence": "it has another version"}]
    for wire in wires:  # and after a while host 0 hangs up itself
        with pytest.raises(WireEnded, match="its connection was closed"):
            while wire.receive(10) is not None:
                pass
        wire.release()
    wait_until(lambda: open_descriptors("self") <= before, within_s=10)


def test_who_knows_the_secret_and_says_no_name_cannot_fill_host_0(gate: JoinListener) -> None:
    threads = threading.active_count()
    wires: list[Wire] = []
    with contextlib.suppress(OSError):
        wires += [connect("127.0.0.1", gate.port, SECRET) for _ in range(120)]
    wait_until(lambda: threading.active_count() - threads < 60, within_s=10)
    with joined(gate) as (link, _):
        assert link.lost is None
    for wire in wires:
        wire.release()


def test_only_so_many_wait_to_be_admitted(gate: JoinListener) -> None:
    wires: list[Wire] = []
    answers: list[Frame] = []
    for _ in range(33 + 4):
        wires.append(connect("127.0.0.1", gate.port, SECRET))
        wires[-1].send("hello", {"name": "one of many"})
        answer = wires[-1].receive(10)  # the first beat, when it is in
        assert answer is not None
        answers.append(answer)
    for answer, wire in zip(answers[33:], wires[33:], strict=True):
        refused = answer if answer.kind == "refused" else wire.receive(10)
        assert refused is not None
        assert (refused.kind, refused.values) == ("refused", {"sentence": CROWDED_SENTENCE})
    assert {answer.kind for answer in answers[:33]} == {"beat"}
    for wire in wires:
        wire.release()


def test_a_host_that_floods_during_a_job_ends_it_with_its_name() -> None:
    """Its name, why, and no more than a few MB, while host 0 waits for its own rank."""
    secret, wires = new_secret(), list[Wire]()

    def attack(place: str) -> None:
        address, _, port = place.rpartition(":")
        wire = connect(address, int(port), secret, local_address="127.0.0.2")
        wires.append(wire)
        wire.send("hello", {"name": "evil"})
        frame = wire.receive(30)
        while frame is not None and frame.kind != "run":
            frame = wire.receive(30)
        flood(wire, lambda number: wire.send("event", event(10), b"x" * MIB), 100)

    part = HostPart(ranks=1, threads=1, argument="")
    with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=PATIENT) as hosts:
        thread = threading.Thread(target=attack, args=(hosts.join_address,))
        thread.start()
        hosts.membership.admit(anybody, within_s=30)
        with pytest.raises(RunFailed) as caught:
            hosts.run(job("be_deaf", 2), on_message=Record(), parts=[part, part])
        thread.join(30)
    assert str(caught.value).startswith("evil (127.0.0.2) was lost: it sent 1048576 bytes beside 'event', where plait")
    wires[0].release()
