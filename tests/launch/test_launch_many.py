"""What lets one host 0 lead hundreds: one thread for all connections, one wait for all farewells, open files enough."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from plait.hosts.connection import ConnectionLoop, Heartbeat, HostConnection, part_from_all
from plait.hosts.handshake import greet_leader, new_secret
from plait.hosts.joining import JoinListener
from plait.hosts.protocol import Reply, RequestKind, RunEnd
from plait.hosts.wire import SessionKeys, Wire
from plait.launch.local.run import ForkServer
from tests.launch.processes import ENTRIES, Record, job, wait_until

ROOT = Path(__file__).parents[2]
SECRET = new_secret()


@dataclass(frozen=True, kw_only=True)
class Number:
    n: int


TWICE = RequestKind(name="twice", question=Number, reply=Number, blob_bytes=1 << 20, reply_blob_bytes=1 << 20)
HEARTBEAT = Heartbeat(period_s=0.2, lost_after_s=5.0)
ONE_WAY = SessionKeys(sending=b"a", receiving=b"b")
OTHER_WAY = SessionKeys(sending=b"b", receiving=b"a")


@pytest.fixture
def pairs() -> Iterator[list[tuple[Wire, Wire]]]:
    """Twenty connections, both ends of each."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        made = []
        for _ in range(20):
            theirs = stack.enter_context(socket.create_connection(listener.getsockname()))
            ours = stack.enter_context(listener.accept()[0])
            made.append((Wire(ours, ONE_WAY, peer="it"), Wire(theirs, OTHER_WAY, peer="host 0")))
        yield made


def linked(
    pairs: list[tuple[Wire, Wire]], heartbeat: Heartbeat = HEARTBEAT
) -> tuple[list[HostConnection], list[HostConnection]]:
    """Host 0's ends, on one loop, and the others', which answer."""
    loop, theirs_loop = ConnectionLoop(), ConnectionLoop()
    ours = [HostConnection(leader, handlers={}, heartbeat=heartbeat, loop=loop) for leader, _ in pairs]
    handlers = {TWICE: lambda number, blob: Reply(values=Number(n=2 * number.n), blob=blob)}
    theirs = [HostConnection(joiner, handlers=handlers, heartbeat=HEARTBEAT, loop=theirs_loop) for _, joiner in pairs]
    return ours, theirs


def loops_alive() -> int:
    return sum(thread.name == "plait connections" for thread in threading.enumerate())


def test_all_connections_of_a_process_share_one_thread(pairs: list[tuple[Wire, Wire]]) -> None:
    before = set(threading.enumerate())
    ours, theirs = linked(pairs)
    assert len(set(threading.enumerate()) - before) == 2  # a loop at each end
    blob = bytes(300_000)
    for number, link in enumerate(ours):
        answer = link.ask(TWICE, Number(n=number), blob, host="it")
        assert (answer.values, answer.blob == blob) == (Number(n=2 * number), True)
    assert len(set(threading.enumerate()) - before) == 2 + len(theirs)  # and one for each that was asked
    time.sleep(3 * HEARTBEAT.period_s)
    assert [link.lost for link in (*ours, *theirs)] == [None] * 40
    for link in (*ours, *theirs):
        link.close()
    wait_until(lambda: loops_alive() == 0, within_s=5)


def test_one_that_is_lost_is_noticed_at_once_and_the_others_live_on(pairs: list[tuple[Wire, Wire]]) -> None:
    ours, theirs = linked(pairs)
    pairs[3][1].close()
    wait_until(lambda: ours[3].lost == "its connection was closed", within_s=1)
    assert [number for number, link in enumerate(ours) if link.lost] == [3]
    assert ours[4].ask(TWICE, Number(n=4), b"", host="it").values == Number(n=8)
    for link in (*ours, *theirs):
        link.close()


def test_a_frame_that_stands_still_halfway_ends_its_connection_alone(pairs: list[tuple[Wire, Wire]]) -> None:
    for leader, _ in pairs:
        leader.stall_s = 0.3
    ours, theirs = linked(pairs[1:4])
    half = HostConnection(pairs[0][0], handlers={}, heartbeat=HEARTBEAT, loop=ours[0]._loop)
    pairs[0][1]._connection.send(b"\x00\x00\x01\x00")
    wait_until(lambda: half.lost == "its connection stood still for 0.3 s", within_s=5)
    assert [link.lost for link in ours] == [None] * 3
    for link in (*ours, *theirs, half):
        link.close()


def test_an_end_that_takes_nothing_is_lost_and_holds_up_no_other(pairs: list[tuple[Wire, Wire]]) -> None:
    """It reads no more, so that beats no longer fit on the way."""
    for leader, _ in pairs:
        leader.stall_s = 0.5
    leader, joiner = pairs[0]
    leader._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    joiner._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with pytest.raises(BlockingIOError):
        while True:
            leader._connection.send(bytes(1 << 16))
    ours, theirs = linked([pairs[1]])
    stuck = HostConnection(leader, handlers={}, heartbeat=Heartbeat(period_s=0.1, lost_after_s=60), loop=ours[0]._loop)
    wait_until(lambda: stuck.lost == "it took no data for 0.5 s", within_s=5)
    assert ours[0].ask(TWICE, Number(n=1), b"", host="it").values == Number(n=2)
    for link in (*ours, *theirs, stuck):
        link.close()


def test_farewells_to_many_that_do_not_hang_up_are_one_wait(
    pairs: list[tuple[Wire, Wire]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.hosts.connection._PART_S", 0.3)
    ours, theirs = linked(pairs)
    began_s = time.monotonic()
    part_from_all(ours, RunEnd(stopped_by="finished"))
    assert time.monotonic() - began_s < 10 * 0.3
    for link in theirs:
        wait_until(lambda link=link: link.lost is not None, within_s=5)
        assert link.read() == [RunEnd(stopped_by="finished")]
        link.close()


def test_as_many_as_are_expected_may_come_at_once() -> None:
    """None of them is taken for one of a crowd of strangers, though none has proven itself yet."""
    gate = JoinListener(address="127.0.0.1", port=0, secret=SECRET, heartbeat=HEARTBEAT, expected=100)
    with ExitStack() as stack:
        come = [stack.enter_context(socket.create_connection(("127.0.0.1", gate.port))) for _ in range(100)]
        wires = [greet_leader(connection, SECRET, address="127.0.0.1") for connection in come]
        for number, wire in enumerate(wires):
            wire.send("hello", {"name": f"host-{number}"})
        arrived = [gate.next(10) for _ in come]
        assert {one.name for one in arrived if one} == {f"host-{number}" for number in range(100)}
        for one in arrived:
            assert one is not None
            one.link.close()
    gate.close("the test is over")


@pytest.mark.parametrize(("soft", "hard", "told"), [(300, 4096, "1456"), (300, 300, "allows 300; raise the limit")])
def test_open_files_are_allowed_for_as_far_as_the_machine_allows(soft: int, hard: int, told: str) -> None:
    program = (
        "import resource; from plait.errors import PlaitError; from plait.launch.local.guard import allow_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "try: allow_open_files(1200, 'a run of 301 hosts'); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "except PlaitError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told in done.stdout


def test_a_server_that_has_nothing_to_import_starts_with_its_first_job() -> None:
    def children() -> str:
        return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()

    before = children()
    with ForkServer(ENTRIES, starts="with a job") as server:
        assert children() == before
        record = Record()
        server.run(job("hello", 2), on_message=record)
        assert len(record.values("hello")) == 2


@pytest.mark.slow
def test_thirty_two_agents_join_and_are_told_of_a_death() -> None:
    """The benchmark's own round, small; in a process without torch, as agents are."""
    program = (
        "import json; from dataclasses import asdict; from benchmarks.many_agents import one_round\n"
        "print(json.dumps(asdict(one_round(32))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["joined_s"] <= 10 and len(found["told_s"]) == 31
    assert max(found["told_s"]) <= 1
    assert not found["torch_in_agents"]
