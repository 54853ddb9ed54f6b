"""The wire between hosts and the handshake before it: who is let in, and what ends a connection."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import PlaitError, RunFailed
from plait.hosts.connection import Heartbeat, HostConnection
from plait.hosts.copies import READ_KEPT, KeptQuestion
from plait.hosts.handshake import Refused, Secret, greet_joiner, greet_leader, new_secret
from plait.hosts.joining import FailedAttempts, JoinListener, listener_at, refuse_host
from plait.hosts.protocol import DONE, Nothing, ReadReply, Refusal, Reply, RequestKind
from plait.hosts.wire import BLOB_BYTES_AT_MOST, SessionKeys, Wire, WireEnded
from tests.launch.processes import wait_until

SECRET = new_secret()
HEARTBEAT = Heartbeat(period_s=0.3, lost_after_s=5.0)
FRAME_HEAD = struct.Struct("!IQI")


@dataclass(frozen=True, kw_only=True)
class Number:
    n: int


TWICE = RequestKind(name="twice", question=Number, reply=Number)
WORK = RequestKind(name="work", question=Nothing, reply=Nothing)


@contextmanager
def _connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with listener_at("127.0.0.1", 0) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: host 0's end, and the joiner's."""
    with _connected() as both:
        yield both


def _greet(ours: socket.socket, theirs: socket.socket, joiners: Secret = SECRET) -> tuple[Future[Wire], Future[Wire]]:
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(greet_joiner, ours, SECRET)
        joiner = pool.submit(greet_leader, theirs, joiners, address="127.0.0.1:1")
    return leader, joiner


@pytest.fixture
def wires(sockets: tuple[socket.socket, socket.socket]) -> tuple[Wire, Wire]:
    leader, joiner = _greet(*sockets)
    return leader.result(), joiner.result()


def test_frames_arrive_whole_and_in_order_both_ways(wires: tuple[Wire, Wire]):
    leader, joiner = wires
    blob = bytes(range(256)) * 4_000
    sender = threading.Thread(target=lambda: [joiner.send("file", {"n": n, "é": [None, 1.5]}, blob) for n in range(3)])
    sender.start()
    leader.send("hello", {})
    for number in range(3):
        frame = leader.receive(5)
        assert frame is not None
        assert (frame.kind, frame.values, frame.blob == blob) == ("file", {"n": number, "é": [None, 1.5]}, True)
    sender.join()
    frame = joiner.receive(5)
    assert frame is not None
    assert (frame.kind, frame.values, frame.blob) == ("hello", {}, b"")
    assert joiner.receive(0) is None


def test_many_threads_may_send(wires: tuple[Wire, Wire]):
    leader, joiner = wires
    with ThreadPoolExecutor(4) as pool:
        for number in range(200):
            pool.submit(joiner.send, "n", {"n": number}, b"x" * (number * 10))
        frames = [leader.receive(5) for _ in range(200)]
    assert sorted(frame.values["n"] for frame in frames if frame) == list(range(200))


def test_a_wrong_secret_is_told_to_the_joiner_alone(sockets: tuple[socket.socket, socket.socket]):
    leader, joiner = _greet(*sockets, joiners=new_secret())
    with pytest.raises(Refused, match="wrong secret"):
        leader.result()
    with pytest.raises(PlaitError, match="the secret is wrong for the run at 127") as caught:
        joiner.result()
    assert caught.value.exit_code == 2


def test_who_does_not_know_the_secret_cannot_pose_as_host_0(sockets: tuple[socket.socket, socket.socket]):
    ours, theirs = sockets
    with ThreadPoolExecutor(1) as pool:
        joiner = pool.submit(greet_leader, theirs, SECRET, address="127.0.0.1:1")
        opening = ours.recv(1000)
        ours.sendall(opening)  # its own words back: even the nonces are equal
        proof = ours.recv(1000)
        ours.sendall(b"\x00" + proof)
        with pytest.raises(PlaitError, match="does not know the secret itself"):
            joiner.result(10)


def test_a_recorded_handshake_opens_nothing(sockets: tuple[socket.socket, socket.socket]):
    ours, theirs = sockets
    recorded = _record_a_joiner()
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(greet_joiner, ours, SECRET)
        theirs.sendall(recorded)
        with pytest.raises(Refused, match="wrong secret"):
            leader.result(10)


def _record_a_joiner() -> bytes:
    """All that an honest joiner sends until it is in, taken off the network between the two."""
    with listener_at("127.0.0.1", 0) as door, listener_at("127.0.0.1", 0) as listener, ThreadPoolExecutor(2) as pool:
        inside = socket.create_connection(listener.getsockname())
        leader = pool.submit(greet_joiner, listener.accept()[0], SECRET)
        outside = socket.create_connection(door.getsockname())
        joiner = pool.submit(greet_leader, outside, SECRET, address="127.0.0.1:1")
        between = door.accept()[0]
        recorded = b""
        for _ in range(2):
            sent = between.recv(1000)
            recorded += sent
            inside.sendall(sent)
            between.sendall(inside.recv(1000))
        assert joiner.result(5).peer == "host 0 (127.0.0.1:1)"
        assert leader.result(5).address == "127.0.0.1"
        for each in (inside, outside, between):
            each.close()
        leader.result().release()
    return recorded


@pytest.mark.parametrize("message", range(4))
@pytest.mark.parametrize("at", [0, 9, 12, 31, 32, 40])
def test_what_was_altered_on_the_way_is_not_called_a_wrong_secret(message: int, at: int) -> None:
    """By who sits between the two: opening, opening, proof, verdict, each with one bit flipped at one place."""
    with _connected() as (inner, outer), _connected() as (ours, theirs), ThreadPoolExecutor(2) as pool:
        leader = pool.submit(greet_joiner, ours, SECRET, within_s=2)
        joiner = pool.submit(greet_leader, outer, SECRET, address="127.0.0.1:1")
        for number, (source, target) in enumerate([(inner, theirs), (theirs, inner)] * 2):
            source.settimeout(3)
            sent = bytearray(source.recv(1000))
            if number == message:
                sent[at % len(sent)] ^= 1
            target.sendall(sent)
            if sent and number == message and number in (0, 1) and at in (0, 9):  # the mark, the protocol: it ends here
                break
        for each in (inner, theirs):
            each.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PlaitError) as caught:
            joiner.result(10)
        assert "the secret is wrong" not in str(caught.value)
        if message != 3:
            with pytest.raises((Refused, OSError)):
                leader.result(10)


def test_failed_attempts_are_told_once_a_minute() -> None:
    failed = FailedAttempts(every_s=60.0)
    assert failed.due(0.0) == 0
    for _ in range(3):
        failed.add()
    assert [failed.due(now_s) for now_s in (10.0, 11.0)] == [3, 0]
    failed.add()
    assert [failed.due(now_s) for now_s in (50.0, 69.0, 70.0, 140.0)] == [0, 0, 1, 0]


def test_who_cannot_prove_itself_is_counted(gate: JoinListener) -> None:
    with socket.create_connection(("127.0.0.1", gate.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1" + b"x" * 100)
        with pytest.raises((ConnectionError, EOFError)):
            if not stranger.recv(100):
                raise EOFError
    with (
        socket.create_connection(("127.0.0.1", gate.port)) as joiner,
        pytest.raises(PlaitError, match="the secret is wrong"),
    ):
        greet_leader(joiner, new_secret(), address="127.0.0.1")
    counted = []
    wait_until(lambda: counted.append(gate.failed_attempts.due(100.0 * len(counted))) or sum(counted) == 2, within_s=5)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: somebody-else.example\r\n\r\n", b"\x00" * 500])
def test_a_stranger_gets_no_answer(sockets: tuple[socket.socket, socket.socket], sent: bytes):
    ours, theirs = sockets
    theirs.sendall(sent)
    with pytest.raises(Refused, match="no plait"):
        greet_joiner(ours, SECRET)
    ours.close()
    with pytest.raises(ConnectionError):  # what it sent too much of was never read
        if theirs.recv(1000) == b"":
            raise ConnectionError


def test_a_peer_that_hangs_up_or_dawdles_is_given_up(sockets: tuple[socket.socket, socket.socket]):
    ours, theirs = sockets
    theirs.sendall(b"plait/jn")
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        greet_joiner(ours, SECRET, within_s=0.2)
    assert time.monotonic() - began_s < 2
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        greet_joiner(ours, SECRET)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"SSH-2.0-OpenSSH_9.2 and more words than an opening has", "what listens at there:1 is not plait"),
        (
            b"plait/jn\x00\x07" + b"n" * 32,
            "speaks protocol 7 and this plait protocol 2; install the same version.*: uv tool install .*plait-VERSION-",
        ),
        (b"", "there:1 broke off the connection"),
    ],
)
def test_a_joiner_says_what_is_wrong_with_the_other_end(
    sockets: tuple[socket.socket, socket.socket], answer: bytes, sentence: str
):
    ours, theirs = sockets
    ours.sendall(answer)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(PlaitError, match=sentence):
        greet_leader(theirs, SECRET, address="there:1")


def test_another_protocol_is_told_ours(sockets: tuple[socket.socket, socket.socket]):
    ours, theirs = sockets
    theirs.sendall(b"plait/jn\x00\x07" + b"n" * 32)
    with pytest.raises(Refused, match="another protocol"):
        greet_joiner(ours, SECRET)
    assert theirs.recv(1000)[:10] == b"plait/jn\x00\x02"


def _frames(wires: tuple[Wire, Wire], sockets: tuple[socket.socket, socket.socket], count: int) -> list[bytes]:
    """Frames as they would travel from the joiner to host 0, held back."""
    frames = []
    for number in range(count):
        wires[1].send("n", {"n": number}, b"blob")
        assert select.select([sockets[0]], [], [], 5)[0]
        frames.append(sockets[0].recv(10_000))
    return frames


Forge = Callable[[list[bytes]], bytes]


@pytest.mark.parametrize(
    ("forge", "how"),
    [
        (lambda frames: frames[0] + frames[0], "out of its order"),
        (lambda frames: frames[1], "out of its order"),
        (lambda frames: frames[0][:-33] + b"B" + frames[0][-32:], "that the other end has not sent"),
        (lambda frames: frames[0][:11] + b"\x01" + frames[0][12:], "that the other end has not sent"),
        (lambda frames: b"\xff" * 100, "of an impossible length"),
        (lambda frames: b"\x00" * 100, "of an impossible length"),
        (lambda frames: FRAME_HEAD.pack(100, 0, 1 << 30) + b"x" * 88, "that the other end has not sent"),
    ],
    ids=["replayed", "reordered", "altered", "renumbered", "oversized", "empty", "forged"],
)
def test_a_frame_that_is_not_the_other_ends_next_ends_the_connection(
    wires: tuple[Wire, Wire], sockets: tuple[socket.socket, socket.socket], forge: Forge, how: str
):
    leader = wires[0]
    sockets[1].setblocking(True)
    sockets[1].sendall(forge(_frames(wires, sockets, 2)))
    with pytest.raises(WireEnded, match=how):
        while leader.receive(1) is not None:
            pass


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_happens_on_the_way_only_what_was_sent_is_received(data: st.DataObject):
    sent = [{"n": number} for number in range(3)]
    stream = bytearray(_stream(sent))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(stream)))
        until = min(len(stream), at + data.draw(st.integers(0, 80)))
        stream[at:until] = data.draw(st.binary(max_size=80) | st.just(bytes(stream[until:])))
    received = list(_received(bytes(stream)))
    assert received == sent[: len(received)]


def _stream(values: Sequence[Mapping[str, Any]]) -> bytes:
    with _connected() as (near, far):
        wire = Wire(near, SessionKeys(sending=b"a", receiving=b"b"), peer="far")
        for each in values:
            wire.send("n", each, b"blob")
        near.shutdown(socket.SHUT_WR)
        far.settimeout(5)
        return b"".join(iter(lambda: far.recv(1 << 16), b""))


def _received(stream: bytes) -> Iterator[Mapping[str, Any]]:
    with _connected() as (near, far):
        far.sendall(stream)
        far.shutdown(socket.SHUT_WR)
        wire = Wire(near, SessionKeys(sending=b"b", receiving=b"a"), peer="far")
        with pytest.raises(WireEnded):
            while (frame := wire.receive(5)) is not None:
                yield frame.values


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.binary(max_size=100) | st.just(b"plait/jn\x00\x02" + b"n" * 32), max_size=4))
def test_no_words_of_a_stranger_open_the_door(words: list[bytes]):
    with _connected() as (ours, theirs):
        theirs.sendall(b"".join(words))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((Refused, OSError)):
            greet_joiner(ours, SECRET)


def test_a_frame_sent_back_is_refused(wires: tuple[Wire, Wire], sockets: tuple[socket.socket, socket.socket]):
    frame = _frames(wires, sockets, 1)[0]
    sockets[0].sendall(frame)
    with pytest.raises(WireEnded, match="that the other end has not sent"):
        wires[1].receive(1)


@pytest.fixture
def impatient(sockets: tuple[socket.socket, socket.socket]) -> Wire:
    """A wire at host 0's end that gives up what stands still after 0.2 s."""
    return Wire(sockets[0], SessionKeys(sending=b"a", receiving=b"b"), peer="host-2", stall_s=0.2)


def test_a_truncated_frame_is_waited_for_and_then_given_up(
    impatient: Wire, sockets: tuple[socket.socket, socket.socket]
):
    sockets[1].sendall(FRAME_HEAD.pack(100, 0, 10) + b"x" * 87)
    with pytest.raises(WireEnded, match=r"host-2 was lost: its connection stood still for 0\.2 s"):
        impatient.receive(1)
    sockets[1].shutdown(socket.SHUT_WR)
    with pytest.raises(WireEnded, match="was closed"):
        impatient.receive(1)


def test_a_peer_that_takes_nothing_is_given_up(impatient: Wire):
    with pytest.raises(WireEnded, match=r"host-2 was lost: it took no data for 0\.2 s"):
        for _ in range(20):
            impatient.send("file", {}, bytes(1 << 20))


def test_what_is_too_large_is_refused_before_it_is_sent(wires: tuple[Wire, Wire]):
    with pytest.raises(ValueError, match="send it in parts"):
        wires[0].send("file", {}, bytes(BLOB_BYTES_AT_MOST + 1))
    wires[0].send("small", {})
    frame = wires[1].receive(1)
    assert frame is not None
    assert frame.kind == "small"


@pytest.fixture
def gate() -> Iterator[JoinListener]:
    gate = JoinListener(address="127.0.0.1", port=0, secret=SECRET, heartbeat=HEARTBEAT)
    yield gate
    gate.close("the test is over")


def _join(gate: JoinListener) -> HostConnection:
    connection = socket.create_connection(("127.0.0.1", gate.port))
    joined = greet_leader(connection, SECRET, address="127.0.0.1")
    joined.send("hello", {"who": "honest"})
    return HostConnection(
        joined, handlers={TWICE: lambda number, blob: Reply(values=Number(n=2 * number.n))}, heartbeat=HEARTBEAT
    )


def test_a_crowd_of_silent_strangers_keeps_nobody_out(gate: JoinListener):
    crowd = [socket.create_connection(("127.0.0.1", gate.port)) for _ in range(100)]
    threads = threading.active_count()
    link = _join(gate)
    arrival = gate.next(5)
    assert arrival is not None
    assert arrival.hello == {"who": "honest"}
    assert arrival.link.ask(TWICE, Number(n=21), b"", host="it").values == Number(n=42)
    assert threads < 60  # each stranger has one, and only so many are greeted at once
    for each in (link, arrival.link):
        each.close()
    for stranger in crowd:
        stranger.close()


def test_who_comes_too_late_is_turned_away(gate: JoinListener):
    link = _join(gate)
    late = gate.next(5)
    assert late is not None
    turning = threading.Thread(target=refuse_host, args=(late.link, "all are in"))
    turning.start()
    _wait_for_mail(link)
    assert link.read() == [Refusal(sentence="all are in")]
    link.close()
    turning.join(5)
    gate.stop("closed")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gate.port))


def _linked(
    wires: tuple[Wire, Wire], heartbeat: Heartbeat, work: Callable[[], object]
) -> tuple[HostConnection, HostConnection]:
    """Host 0's end with this heartbeat, and one that works before it answers, and says often that it lives."""

    def answer(question: Nothing, blob: bytes) -> Reply[Nothing]:
        work()
        return DONE

    busy = HostConnection(wires[1], handlers={WORK: answer}, heartbeat=Heartbeat(period_s=0.1, lost_after_s=60.0))
    return HostConnection(wires[0], handlers={}, heartbeat=heartbeat), busy


def test_a_busy_end_is_not_lost(wires: tuple[Wire, Wire]):
    heartbeat = Heartbeat(period_s=60.0, lost_after_s=0.8)
    link, busy = _linked(wires, heartbeat, lambda: threading.Event().wait(1.2))
    assert link.ask(WORK, Nothing(), b"", host="it") == DONE
    for each in (link, busy):
        each.close()


def test_a_silent_end_is_lost_and_so_is_what_was_asked(wires: tuple[Wire, Wire]):
    link = HostConnection(wires[0], handlers={}, heartbeat=Heartbeat(period_s=60.0, lost_after_s=0.2))
    with pytest.raises(RunFailed, match=r"host-2 was lost: nothing was heard from it for 0\.2 s; "):
        link.ask(WORK, Nothing(), b"", host="host-2")
    assert link.lost == "nothing was heard from it for 0.2 s"
    _wait_for_mail(link)
    with pytest.raises(RunFailed, match="host-2 was lost"):
        link.ask(WORK, Nothing(), b"", host="host-2")
    link.close()
    wires[1].release()


def test_a_part_of_a_checkpoint_in_memory_comes_beside_its_reply(wires: tuple[Wire, Wire]):
    part = Reply(values=ReadReply(size=4), blob=b"part")
    keeper = HostConnection(wires[1], handlers={READ_KEPT: lambda asked, blob: part}, heartbeat=HEARTBEAT)
    link = HostConnection(wires[0], handlers={}, heartbeat=HEARTBEAT)
    question = KeptQuestion(local_rank=0, step=1, what="list", bytes=4)
    assert link.ask(READ_KEPT, question, b"", host="it") == part
    for each in (link, keeper):
        each.close()


def _wait_for_mail(link: HostConnection) -> None:
    assert select.select([link], [], [], 5)[0]
