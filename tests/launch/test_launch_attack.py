"""An attacker who knows the secret, as host 0 or as a host that joined: nothing that arrives is run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pytest

from plait.errors import PlaitError, RunFailed
from plait.hosts.connection import HostConnection
from plait.hosts.handshake import new_secret
from plait.hosts.joining import JoinListener
from plait.hosts.leader import HostPart, Hosts
from plait.hosts.member import connect
from plait.hosts.protocol import EventReport, StartOrder
from plait.hosts.wire import Wire
from plait.launch.local.run import ForkServer
from plait.launch.values.failure import RESUME_ADVICE
from plait.launch.values.job import HostRanks
from tests.launch.host import HEARTBEAT
from tests.launch.joined import HostProcess
from tests.launch.processes import ENTRIES, Record, anybody, job, wait_until

SECRET = new_secret()
M = TypeVar("M")


@pytest.fixture
def victim() -> Iterator[tuple[HostConnection, HostProcess]]:
    """A host that joined, and the link to it of a host 0 that does what this test likes."""
    listener = JoinListener(address="127.0.0.1", port=0, secret=SECRET, heartbeat=HEARTBEAT)
    agent = HostProcess("host", f"127.0.0.1:{listener.port}", "127.0.0.2", secret=SECRET)
    arrival = listener.next(30)
    assert arrival is not None
    yield arrival.link, agent
    agent.close()
    arrival.link.close()
    listener.close("the test is over")


def order(**changes: Any) -> dict[str, Any]:
    """What host 0 sends to have one rank started, with these keys of the job changed."""
    honest = asdict(job("hello", 2))
    part = asdict(HostRanks(first_rank=1, ranks=1))
    return {
        "number": 1,
        "job": {**honest, "part": part, **changes},
        "rendezvous": "tcp://127.0.0.1:1/job-1",
    }


def mail(link: HostConnection, kind: type[M]) -> M:
    """The next message of a kind."""
    found: list[M] = []

    def has_come() -> bool:
        found.extend(message for message in link.read() if isinstance(message, kind))
        return bool(found) or link.lost is not None

    wait_until(has_come, within_s=20)
    assert found, link.lost
    return found[0]


def test_a_leader_cannot_choose_what_a_joined_host_runs(victim: tuple[HostConnection, HostProcess]) -> None:
    link, _ = victim
    link._push("run", order(entry="no_such_job"), b"")
    event = mail(link, EventReport).event
    assert event["over"] and "plait has no job named 'no_such_job' on this host" in event["reason"]
    link._push("run", {**order(), "number": 2}, b"")
    assert mail(link, EventReport).number == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"entry": "pydoc:pipepager"}, "is not a name of small letters"),
        ({"entry": "os.system"}, "is not a name of small letters"),
        ({"entry": "tests.launch.entries:print_some"}, "is not a name of small letters"),
        ({"preload": ["runs.x.evil"]}, "preload is not known"),
        ({"threads": 0}, "a rank needs 1 to"),
        ({"part": {"first_rank": -1, "ranks": 1}}, "is no part of 2 ranks"),
        ({"world_size": 10**20}, "world_size should be a smaller whole number"),
    ],
)
def test_a_joined_host_leaves_a_leader_that_sends_what_plait_does_not(
    victim: tuple[HostConnection, HostProcess], tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    link, agent = victim
    link._push("run", order(**{"argument": f"touch {tmp_path / 'harm'}", **change}), b"")
    error = agent.ended(1)["error"]
    assert "it sent an unknown message" in error and why in error
    assert link.lost is not None and why in link.lost
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "rendezvous", ["/home/somebody/.profile", "relative", "env://", "file:///etc/x", "tcp://a:1/x"]
)
def test_a_leader_cannot_have_ranks_meet_in_a_file_of_its_choice(
    victim: tuple[HostConnection, HostProcess], rendezvous: str
) -> None:
    link, agent = victim
    link._push("run", {**order(), "rendezvous": rendezvous}, b"")
    assert "StartOrder.rendezvous is no address" in agent.ended(1)["error"]


DIED = {"died": 0, "code": -9, "at_s": 1.0}
RAISED = {
    "rank": 1, "at_s": 1.0, "type_name": "E", "text": "t", "place": "p", "plait_classes": [], "lost_peer": False,
    "out_of_memory": False, "traceback": "",
}  # fmt: skip


@contextlib.contextmanager
def attacked(events: Sequence[Any], **changes: Any) -> Iterator[Hosts]:
    """Host 0 with one other host, which reports these events of its job, whatever they are."""
    secret, links = new_secret(), list[HostConnection]()

    def attack(place: str) -> None:
        address, _, port = place.rpartition(":")
        wire = connect(address, int(port), secret, local_address="127.0.0.2")
        wire.send("hello", {"name": "evil"})
        links.append(HostConnection(wire, handlers={}, heartbeat=HEARTBEAT))
        mail(links[0], StartOrder)
        for event in events:
            links[0]._push("event", {"number": 1, "event": event, "sent_at_s": 1.0, **changes}, b"")

    with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:
        thread = threading.Thread(target=attack, args=(hosts.join_address,))
        thread.start()
        hosts.membership.admit(anybody, within_s=30)
        yield hosts
        thread.join(30)
        links[0].close()


def failure_of(hosts: Hosts) -> str:
    """How host 0 says that a job of two hosts, which nothing ends, came to its end."""
    part = HostPart(ranks=1, threads=1, argument="")
    with pytest.raises(RunFailed) as caught:
        hosts.run(job("be_deaf", 2), on_message=Record(), parts=[part, part])
    return str(caught.value)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([DIED], "it sent word of a rank that it does not run"),
        ([{"rank": 0, "message": "step", "values": {}}], "it sent word of a rank that it does not run"),
        ([{"rank": 0, "returned": True}], "it sent word of a rank that it does not run"),
        ([{"rank": 1, "raised": {**RAISED, "rank": 0}}], "it sent word of a rank that it does not run"),
        ([{"forked": True}, {"forked": True}], "it started its workers twice"),
        ([{"rank": 1, "raised": {**RAISED, "lost_peer": True}}] * 2, "it reported two errors of one rank"),
        ([{"nonsense": 1}], "it sent an unknown message"),
        ([{}], "it sent an unknown message"),
        ([[]], "it sent an unknown message"),
        ([{"died": "1", "code": 0, "at_s": 1.0}], "died should be a whole number"),
        ([{"died": 1, "code": 0}], "at_s should be given"),
        ([{"rank": 1, "message": 5, "values": {}}], "message should be text"),
        ([{"rank": 1, "message": "a", "values": []}], "values should be a table of keys and values"),
        ([{"rank": 1, "raised": {}}], "raised.rank should be given"),
        ([{"rank": 1, "raised": {**RAISED, "plait_classes": [5]}}], "raised.plait_classes.0 should be text"),
        ([{"stop": "SIGSEGV"}], "stop should be"),
        ([{"rank": 10**20, "started": 1}], "rank should be a smaller whole number"),
    ],
)
def test_host_0_leaves_a_host_that_reports_what_cannot_be(
    events: Sequence[Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with attacked(events) as hosts:
        told = failure_of(hosts)
        assert told.startswith("evil (127.0.0.2) was lost: ") and why in told and "\n" not in told
        assert hosts.members[0].link.lost is not None
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("changes", [{"number": "1"}, {"sent_at_s": None}, {"number": None}, {"more": 1}])
def test_host_0_leaves_a_host_whose_report_is_none(changes: dict[str, Any]) -> None:
    with attacked([{"forked": True}], **changes) as hosts:
        assert "it sent an unknown message" in failure_of(hosts)


def test_what_another_host_says_cannot_speak_to_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x1b[2Jgone\x9b31m\u202e\ud800\nplait: all is well"
    with attacked([{"over": True, "reason": evil}]) as hosts:
        told = failure_of(hosts)
    assert told == f"on evil (127.0.0.2): ]0;title[2Jgone31m plait: all is well; {RESUME_ADVICE}"
    with attacked(
        [{"rank": 1, "raised": {**RAISED, "text": evil, "plait_classes": ["plait.errors:RunFailed"]}}]
    ) as hosts:
        assert failure_of(hosts) == "on evil (127.0.0.2): ]0;title[2Jgone31m plait: all is well"


@pytest.mark.parametrize("kind", ["ask", "answer", "bye"])
@pytest.mark.parametrize("values", [{}, {"number": [], "kind": 5, "values": 5}, {"why": 5}])
def test_a_frame_for_the_connection_itself_must_be_one(
    victim: tuple[HostConnection, HostProcess], kind: str, values: dict[str, Any]
) -> None:
    link, agent = victim
    link._push(kind, values, b"")
    error = agent.ended(1)["error"]
    assert "it sent an unknown message" in error and "\n" not in error


def test_attempts_in_vain_are_said_when_the_last_host_is_in() -> None:
    secret, counts, links = new_secret(), list[int](), list[HostConnection]()

    def not_yet_said() -> int:
        return hosts.membership._listener.failed_attempts._count

    def knock(place: str) -> None:
        address, _, port = place.rpartition(":")
        for number in (1, 2, 3):
            with pytest.raises(PlaitError, match="secret"):
                connect(address, int(port), new_secret())
            # The first is said at once, others within the minute are not; here it is known before host 0 counts it.
            wait_until(lambda number=number: bool(counts) and sum(counts) + not_yet_said() == number, within_s=10)
        wire = connect(address, int(port), secret, local_address="127.0.0.2")
        wire.send("hello", {"name": "honest"})
        links.append(HostConnection(wire, handlers={}, heartbeat=HEARTBEAT))

    with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:
        thread = threading.Thread(target=knock, args=(hosts.join_address,))
        thread.start()
        hosts.membership.admit(anybody, within_s=30, on_failed=counts.append)
        thread.join(30)
        links[0].close()
    assert counts == [1, 2]


def test_a_nul_in_a_name_is_refused_not_taken_out(victim: tuple[HostConnection, HostProcess]) -> None:
    link, agent = victim
    link._push("ask", {"number": 1, "kind": "read", "values": {"path": "/tmp/own\0/x"}}, b"")
    assert "NUL" in agent.ended(1)["error"]


@contextlib.contextmanager
def gate_and_attacker() -> Iterator[tuple[HostConnection, Wire]]:
    """Host 0's connection to a host that knows the secret, and that host's end, which sends what it likes."""
    listener = JoinListener(address="127.0.0.1", port=0, secret=SECRET, heartbeat=HEARTBEAT)
    wire = connect("127.0.0.1", listener.port, SECRET, local_address="127.0.0.2")
    wire.send("hello", {"name": "evil"})
    arrival = listener.next(10)
    assert arrival is not None
    try:
        yield arrival.link, wire
    finally:
        wire.close()
        wire.release()
        arrival.link.close()
        listener.close("the test is over")


def test_host_0_answers_no_question(capfd: pytest.CaptureFixture[str]) -> None:
    with gate_and_attacker() as (link, attacker):
        attacker.send("ask", {"number": 1, "kind": "read", "values": {"name": "x"}})
        wait_until(lambda: link.lost is not None, within_s=10)
        assert link.lost == "it sent a request to the host that leads; install the same commit on both"
    assert "Traceback" not in capfd.readouterr().err


def test_no_rank_finds_modules_where_other_hosts_send_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = tmp_path / "runs" / "x"
    (tmp_path / ".plait" / "data").mkdir(parents=True)
    sent.mkdir(parents=True)
    for folder in (tmp_path, sent, tmp_path / ".plait" / "data"):
        (folder / "sent_by_another_host.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "runs/x", str(tmp_path / ".plait" / "data"), *sys.path])
    record = Record()
    with ForkServer(ENTRIES) as server:
        server.run(job("tell_paths", 1, argument="sent_by_another_host"), on_message=record)
    (told,) = record.values("paths").values()
    assert not told["found"]
    for path in told["paths"]:
        assert path and Path(path) != tmp_path and "runs" not in Path(path).parts and ".plait" not in Path(path).parts


def test_ranks_find_plait_where_its_checkout_is_the_working_folder() -> None:
    record = Record()
    with ForkServer(ENTRIES) as server:
        server.run(job("tell_paths", 1, argument="plait.parallel.mesh"), on_message=record)
    (told,) = record.values("paths").values()
    assert told["found"] and str(Path.cwd()) not in told["paths"]
