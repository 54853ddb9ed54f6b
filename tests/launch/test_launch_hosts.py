"""Jobs over several hosts: loopback addresses stand for machines, processes of their own for the agents on them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from torch.distributed import TCPStore

from plait.errors import Interrupted, PlaitError, RunFailed
from plait.hosts.copies import copied_steps
from plait.hosts.handshake import Secret, new_secret
from plait.hosts.joining import HostInfo
from plait.hosts.leader import HostPart, Hosts
from plait.hosts.member import connect
from plait.hosts.membership import by_address, host_numbers
from plait.hosts.protocol import Nothing
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import NOTE, STOP_IN_WORDS, Job, JobResult, Message
from tests.launch.host import BREAK, HEARTBEAT, READ, REFUSE, Key, Place
from tests.launch.joined import HostProcess, start_agent
from tests.launch.processes import (
    ENTRIES,
    WITH_TORCH,
    Record,
    anybody,
    job,
    listening_addresses,
    listening_sockets,
    open_descriptors,
    running,
    wait_until,
)
from tests.matrix import slow

ROOT = Path(__file__).parents[2]
SOON_S = 6.0


class _Hosts:
    """Host 0 in this process, and others that have joined it."""

    def __init__(self, hosts: Hosts, agents: Sequence[HostProcess]) -> None:
        self.hosts = hosts
        self.agents = agents

    def run(
        self, whole: Job, record: Callable[[Message], None], parts: Sequence[int] = (1, 1), **bounds: Any
    ) -> JobResult:
        own = [HostPart(ranks=ranks, threads=1, argument=whole.argument, log_dir=whole.log_dir) for ranks in parts]
        return self.hosts.run(whole, on_message=record, parts=own, **bounds)

    def fails(self, whole: Job, record: Callable[[Message], None], parts: Sequence[int] = (1, 1)) -> PlaitError:
        with pytest.raises(PlaitError) as caught:
            self.run(whole, record, parts)
        assert "\n" not in str(caught.value)
        return caught.value


@contextlib.contextmanager
def _hosts(members: int, entries: EntryTable = ENTRIES) -> Iterator[_Hosts]:
    secret, agents = new_secret(), []
    try:
        with Hosts(address="127.0.0.1", secret=secret, members=members, entries=entries, heartbeat=HEARTBEAT) as hosts:

            def start_next() -> None:
                """One after another, so that the addresses are in the order of the hosts' numbers."""
                if len(agents) < members:
                    agents.append(start_agent(hosts.join_address, secret, 2 + len(agents), entries))

            def check(hello: Mapping[str, Any]) -> HostInfo:
                start_next()
                return anybody(hello)

            start_next()
            hosts.membership.admit(check, within_s=30)
            yield _Hosts(hosts, agents)
    finally:
        for agent in agents:
            agent.close()


@pytest.fixture(scope="module")
def three() -> Iterator[_Hosts]:
    """Three hosts with torch at hand, for tests after which all of them are still there."""
    with _hosts(2, WITH_TORCH) as joined:
        yield joined


@pytest.fixture
def two() -> Iterator[_Hosts]:
    """Two hosts for one test, that may do to them what it likes."""
    with _hosts(1) as joined:
        yield joined


@pytest.mark.parametrize("parts", [slow(((1, 1, 0),)), (1, 3, 2), slow(((2, 0, 1),)), slow(((2, 0, 0),)), (0, 0, 3)])
def test_ranks_on_several_hosts_are_one_job(three: _Hosts, parts: tuple[int, int, int]):
    record, world_size = Record(), sum(parts)
    three.run(job("hosts_reduce", world_size, argument="a"), record, parts)
    total = float(sum(range(1, world_size + 1)))
    places = [[local_rank, ranks] for ranks in parts for local_rank in range(ranks)]
    assert record.values("sum") == {
        rank: {"value": total, "argument": "a", "local": places[rank], "interface": "lo"} for rank in range(world_size)
    }


def test_strangers_at_the_store_are_counted_and_print_nothing(three: _Hosts, capfd: pytest.CaptureFixture[str]):
    """torch's store prints sixty lines for each connection that does not speak its protocol."""
    record, strangers = Record(), 25

    def visit(message: Message) -> None:
        record(message)
        if message.kind == "store":
            place = urlsplit(message.values["rendezvous"])
            for _ in range(strangers):
                with socket.create_connection((place.hostname, place.port), timeout=10) as stranger:
                    # Its first word as torch's clients say it (a query of validation), then a key of 2^64 - 1 bytes.
                    stranger.sendall(b"\x00" + 0x3C85F7CE.to_bytes(4, "little") + b"\x01" + b"\xff" * 16)
                    assert stranger.recv(1) == b""  # it hangs up
            client = TCPStore(place.hostname, place.port, is_master=False, wait_for_workers=False)
            client.set(f"plait{place.path}/seen", "yes")

    three.run(job("meet_strangers", 3), visit, (1, 1, 1))
    notes = [message.values["text"] for message in record.messages if message.kind == NOTE]
    assert [note.partition(" ")[0] for note in notes] == [str(strangers)]
    assert capfd.readouterr() == ("", "")


def test_each_host_gets_its_own_argument_threads_and_environment(three: _Hosts):
    record = Record()
    parts = [HostPart(ranks=1 + host, threads=1 + host, argument=f"host {host}") for host in range(3)]
    three.hosts.run(job("hello", 6), on_message=record, parts=parts)
    told = record.values("hello")
    assert [told[rank]["argument"] for rank in range(6)] == [f"host {host}" for host in (0, 1, 1, 2, 2, 2)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    assert [told[4]["environment"][name] for name in names] == ["4", "6", "1", "3", "3"]


def test_no_message_of_another_host_is_lost_or_reordered(three: _Hosts):
    record = Record()
    three.run(job("talk", 3, argument="1000"), record, (1, 1, 1))
    for rank in range(3):
        numbers = [message.values["number"] for message in record.messages if message.rank == rank]
        assert numbers == list(range(1000))


def test_the_ranks_meet_on_the_chosen_address_alone(three: _Hosts):
    seen: dict[int, set[str]] = {}

    def look(record: Record) -> None:
        seen.update({rank: listening_addresses(pid) for rank, pid in record.pids.items()})
        seen[-1] = listening_addresses(os.getpid()) | listening_addresses(three.agents[0].pid)
        os.kill(os.getpid(), signal.SIGTERM)

    three.run(job("meet_and_wait", 2), Record(2, look), (1, 1, 0))
    assert seen == {0: {"127.0.0.1"}, 1: {"127.0.0.1"}, -1: set()}


@pytest.mark.parametrize(
    ("kind", "exit_code", "sentence"),
    [
        ("PlaitError", 2, "on host-127.0.0.2 (127.0.0.2): the file is empty; give one with text"),
        ("RunFailed", 1, "on host-127.0.0.2 (127.0.0.2): the file is empty; give one with text"),
    ],
)
def test_an_error_of_another_host_arrives_with_its_name(three: _Hosts, kind: str, exit_code: int, sentence: str):
    error = three.fails(job("raise_plait_error", 2, argument=kind), Record(), (1, 1, 0))
    assert (type(error).__name__, error.exit_code, str(error)) == (kind, exit_code, sentence)


def test_a_bug_on_another_host_is_told_with_its_traceback(three: _Hosts, capfd, tmp_path):
    error = three.fails(job("fail_on_one", 2, argument="boom"), Record(), (1, 1, 0))
    assert str(error).startswith("rank 1 on host-127.0.0.2 (127.0.0.2) failed with ValueError: boom (at ")
    assert capfd.readouterr().err.count("Traceback") == 1
    error = three.fails(job("fail_on_one", 2, argument="boom", log_dir=str(tmp_path)), Record(), (1, 1, 0))
    assert str(error).endswith(f"traceback in {tmp_path / 'rank-1.log'}")
    assert "ValueError: boom" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.parametrize("how", ["raise", "killed"])
def test_the_root_cause_is_named_whichever_host_it_is_on(three: _Hosts, how: str, tmp_path):
    kill = lambda record: os.kill(record.pids[1], signal.SIGKILL)  # noqa: E731
    record = Record(3, kill if how == "killed" else lambda record: None)
    failing = job("reduce_until_one_fails", 3, argument=f"{how} on hosts", log_dir=str(tmp_path))
    error = three.fails(failing, record, (1, 1, 1))
    cause = "was killed by SIGKILL" if how == "killed" else "failed with ValueError: the root cause"
    assert str(error).startswith(f"rank 1 on host-127.0.0.2 (127.0.0.2) {cause}")
    assert running(record.pids.values()) == []


def test_a_stop_reaches_every_host(three: _Hosts):
    record = Record(3, lambda record: os.kill(os.getpid(), signal.SIGINT))
    assert three.run(job("wait_for_stop", 3), record, (1, 1, 1)).stopped_by == "SIGINT"
    assert record.values("saved") == {rank: {"rank": rank} for rank in range(3)}
    assert running(record.pids.values()) == []
    told = [agent.said() for agent in three.agents]
    assert all(sentence.endswith(f" stops the run: {STOP_IN_WORDS}") for sentence in told), told


def test_a_second_signal_kills_on_every_host(three: _Hosts):
    record = Record(3, lambda record: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)])
    assert "second SIGTERM, without saving" in str(three.fails(job("be_deaf", 3), record, (1, 1, 1)))
    assert time.monotonic() - record.acted_at_s < SOON_S
    assert running(record.pids.values()) == []


def test_a_callers_own_error_ends_the_job_but_not_the_hosts(three: _Hosts):
    def refuse(record: Record) -> None:
        raise KeyError("the caller's")

    record = Record(3, refuse)
    with pytest.raises(KeyError, match="the caller's"):
        three.run(job("be_deaf", 3), record, (1, 1, 1))
    assert running(record.pids.values()) == []
    assert three.run(job("hello", 3), Record(), (1, 1, 1)).stopped_by == "finished"


def test_hosts_answer_questions_also_during_a_job(three: _Hosts, tmp_path):
    (tmp_path / "part").write_bytes(bytes(range(256)) * 40_000)
    members, answers = three.hosts.members, []

    def pull(record: Record) -> None:
        question = Place(path=str(tmp_path / "part"), offset=256, bytes=1 << 20)
        answers.extend(member.ask(READ, question) for member in members)
        os.kill(os.getpid(), signal.SIGTERM)

    three.run(job("wait_for_stop", 3), Record(3, pull), (1, 1, 1))
    assert [answer.values.pid for answer in answers] == [agent.pid for agent in three.agents]
    assert {len(answer.blob) for answer in answers} == {1 << 20}
    with pytest.raises(PlaitError, match=r"^on host-127\.0\.0\.3 \(127\.0\.0\.3\): the disk is full; make room$"):
        members[1].ask(REFUSE, Nothing())
    with pytest.raises(RunFailed, match=r"'break' failed with KeyError\('k'\); this is a bug in plait"):
        members[0].ask(BREAK, Key(key="k"))


@pytest.mark.slow
def test_many_jobs_leave_nothing(three: _Hosts):
    def descriptors() -> list[int]:
        return [open_descriptors(pid) for pid in (os.getpid(), *(agent.pid for agent in three.agents))]

    three.run(job("hello", 3), Record(), (1, 1, 1))
    before = descriptors()
    for _ in range(20):
        three.run(job("hello", 3), Record(), (1, 1, 1))
    # An agent may close the last job's a moment after it has said that it is over.
    wait_until(lambda: all(now <= then for now, then in zip(descriptors(), before, strict=True)), within_s=5)


def test_copies_outlive_their_ranks_on_each_host_and_are_asked_for(three: _Hosts):
    agents = [agent.pid for agent in three.agents]
    three.run(job("make_copies", 4, argument="17"), Record(), (1, 2, 1))
    hosts = three.hosts
    assert copied_steps(hosts.server, hosts.members, (1, 2, 1), 17) == [6, 5], "7 is at one rank alone"
    assert copied_steps(hosts.server, hosts.members, (1, 2, 1), 16) == [], "another line of copies"
    assert copied_steps(hosts.server, hosts.members, (1, 2, 2), 17) == [], "a rank that made none"
    assert copied_steps(hosts.server, hosts.members, (1, 0, 0), 17) == [7, 6, 5], "hosts without ranks are not asked"
    assert running(agents) == agents


@pytest.mark.parametrize("parts", [(1, 1), (2, 1, 1), (0, 1, 2), (3, 0, 1)])
def test_parts_that_are_no_parts_are_a_callers_bug(three: _Hosts, parts: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"no parts of 3 ranks on 3 hosts|must be on host 0"):
        three.run(job("hello", 3), Record(), parts)


# Hosts that do not survive.


def test_a_killed_host_ends_the_job_everywhere_with_its_name(two: _Hosts):
    agent = two.agents[0]
    record = Record(3, lambda record: os.kill(agent.pid, signal.SIGKILL))
    error = two.fails(job("be_deaf", 3), record, (1, 2))
    assert isinstance(error, RunFailed)
    assert str(error).startswith("host-127.0.0.2 (127.0.0.2) was lost: its connection was closed; run the same")
    assert time.monotonic() - record.acted_at_s < SOON_S
    wait_until(lambda: not running([*record.pids.values(), agent.pid]), within_s=2)
    with pytest.raises(RunFailed, match=r"host-127\.0\.0\.2 \(127\.0\.0\.2\) was lost"):
        two.hosts.members[0].ask(READ, Place(path="/"))
    with pytest.raises(RunFailed, match=r"host-127\.0\.0\.2 \(127\.0\.0\.2\) was lost"):
        two.run(job("hello", 2), Record())


@pytest.mark.slow
def test_a_frozen_host_ends_the_job_everywhere_with_its_name(two: _Hosts):
    agent = two.agents[0]
    record = Record(2, lambda record: os.kill(agent.pid, signal.SIGSTOP))
    error = two.fails(job("be_deaf", 2), record)
    assert str(error).startswith("host-127.0.0.2 (127.0.0.2) was lost: nothing was heard from it for 3 s; run the same")
    assert time.monotonic() - record.acted_at_s < HEARTBEAT.lost_after_s + SOON_S
    assert running([record.pids[0]]) == []
    os.kill(agent.pid, signal.SIGCONT)
    assert "was lost: its connection was closed; see what host 0 printed" in agent.ended(1)["error"]
    assert running(record.pids.values()) == []


@pytest.mark.slow
def test_a_lost_peer_is_explained_by_the_host_that_is_found_lost_later(two: _Hosts, tmp_path):
    agent, broken = two.agents[0], tmp_path / "broken"

    def freeze_host_break_connection(record: Record) -> None:
        os.kill(agent.pid, signal.SIGSTOP)
        broken.touch()

    record = Record(2, freeze_host_break_connection)
    error = two.fails(job("lose_a_peer", 2, argument=str(broken), log_dir=str(tmp_path)), record)
    assert "closed by peer" in (tmp_path / "rank-0.log").read_text()
    assert str(error).startswith("host-127.0.0.2 (127.0.0.2) was lost: nothing was heard from it for 3 s")


def test_the_death_of_a_hosts_fork_server_ends_the_job_with_its_name(two: _Hosts):
    record = Record(2, lambda record: os.kill(record.server_pid, signal.SIGKILL))
    parts = [HostPart(ranks=ranks, threads=1, argument="") for ranks in (0, 2)]
    with pytest.raises(RunFailed) as caught:
        two.hosts.run(job("be_deaf", 2), on_message=record, parts=parts)
    assert str(caught.value).startswith(
        "on host-127.0.0.2 (127.0.0.2): the process that starts the workers was killed by SIGKILL"
    )
    wait_until(lambda: not running(record.all_pids), within_s=2)


def test_ctrl_c_on_another_host_stops_the_job_for_all(two: _Hosts):
    agent = two.agents[0]
    record = Record(2, lambda record: os.killpg(agent.pid, signal.SIGINT))
    assert two.run(job("wait_for_stop", 2), record).stopped_by == "SIGINT"
    assert record.values("saved") == {rank: {"rank": rank} for rank in range(2)}
    assert agent.said() == f"Ctrl-C: {STOP_IN_WORDS}; Ctrl-C again leaves the run at once"


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_measurement_on_several_hosts_ends_at_the_first_signal_on_any(two: _Hosts, where: str):
    agent = two.agents[0]
    record = Record(2, lambda record: os.kill(os.getpid() if where == "here" else agent.pid, signal.SIGHUP))
    assert two.run(replace(job("be_deaf", 2), at_stop="abandon"), record).stopped_by == "SIGHUP"
    assert time.monotonic() - record.acted_at_s < SOON_S
    assert running(record.pids.values()) == []
    if where == "there":
        assert agent.said().startswith("SIGHUP: giving up what is being measured; SIGHUP again")
    assert two.run(job("hello", 2), Record()).stopped_by == "finished"


def test_ctrl_c_on_both_hosts_is_one_stop(two: _Hosts):
    def stop_both(record: Record) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.killpg(two.agents[0].pid, signal.SIGINT)

    record = Record(2, stop_both)
    assert two.run(job("wait_for_stop", 2), record).stopped_by == "SIGINT"
    assert len(record.values("saved")) == 2


def _stopped_there_then_here(two: _Hosts, here: Callable[[], None]) -> tuple[Record, Callable[[Message], None]]:
    """A listener that has the other host get a SIGTERM, and calls `here` once host 0 has obeyed its word of it."""
    record = Record(2, lambda record: os.kill(two.agents[0].pid, signal.SIGTERM))

    def hear(message: Message) -> None:
        record(message)
        if message.kind == "asked" and message.rank == 0:
            here()

    return record, hear


def test_a_signal_to_all_hosts_is_one_stop_where_another_hosts_is_heard_first(two: _Hosts, tmp_path: Path):
    """As some schedulers send it."""

    def stop_and_let_save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "go").touch()

    record, hear = _stopped_there_then_here(two, stop_and_let_save)
    assert two.run(job("save_on_word", 2, argument=str(tmp_path / "go")), hear).stopped_by == "SIGTERM"
    assert sorted(record.values("saved")) == [0, 1]


def test_after_another_hosts_stop_a_second_signal_here_kills(two: _Hosts, tmp_path: Path):
    def stop_twice() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)

    record, hear = _stopped_there_then_here(two, stop_twice)
    error = two.fails(job("save_on_word", 2, argument=str(tmp_path / "never")), hear)
    assert str(error).startswith("stopped at once by a second SIGTERM, without saving")
    wait_until(lambda: not running(record.pids.values()), within_s=SOON_S)


def test_a_second_ctrl_c_leaves_and_the_others_are_told(two: _Hosts):
    agent = two.agents[0]
    # Two different signals, as two equal ones may become one; either may be posted first.
    record = Record(2, lambda record: [os.killpg(agent.pid, number) for number in (signal.SIGINT, signal.SIGTERM)])
    error = two.fails(job("be_deaf", 2), record)
    told = r"host-127\.0\.0\.2 \(127\.0\.0\.2\) was lost: it was stopped there by SIG(INT|TERM); run the same"
    assert re.match(told, str(error))
    assert re.match("this host left the run by SIG(INT|TERM); see what host 0 printed", agent.ended(1)["error"])
    assert running(record.pids.values()) == []


def test_the_end_is_told_to_the_others():
    secret = new_secret()
    with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:
        agent = start_agent(hosts.join_address, secret)
        hosts.membership.admit(anybody, within_s=30)
    assert agent.ended(0) == {"stopped_by": "finished"}


def test_a_host_that_is_not_needed_is_sent_home_and_the_others_work_on():
    with _hosts(2) as joined:
        first, second = joined.hosts.members
        joined.hosts.membership.renumber((0, 2))
        assert joined.agents[0].ended(0) == {"stopped_by": "not needed"}
        assert [(member.host, member.address) for member in joined.hosts.members] == [(1, second.address)]
        assert joined.hosts.addresses == ("127.0.0.1", second.address) and first.link.lost is not None
        record = Record()
        assert joined.run(job("hello", 2), record).stopped_by == "finished"


def test_a_signal_between_two_jobs_is_told_to_the_others():
    secret = new_secret()
    with (
        pytest.raises(Interrupted),
        Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts,
    ):
        agent = start_agent(hosts.join_address, secret)
        hosts.membership.admit(anybody, within_s=30)
        raise Interrupted("SIGTERM")
    assert agent.ended(0) == {"stopped_by": "SIGTERM"}


def test_the_error_that_ends_host_0_is_told_to_the_others():
    secret = new_secret()
    with (
        pytest.raises(PlaitError, match="no such recipe"),
        Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts,
    ):
        join_address, agent = hosts.join_address, start_agent(hosts.join_address, secret)
        hosts.membership.admit(anybody, within_s=30)
        raise PlaitError("there is no such recipe; write one")
    assert agent.ended(1)["error"] == f"host 0 ({join_address}) ended the run: there is no such recipe; write one"


def test_kill_9_of_host_0_leaves_no_process_anywhere():
    secret = new_secret()
    leader = HostProcess("lead", "be_deaf", secret=secret)
    agent = start_agent(leader.next_line()["join"], secret)
    try:
        told = [leader.next_line() for _ in range(2)]
        pids = [line[name] for line in told for name in ("pid", "server")]
        assert running(pids) == pids
        leader.process.kill()
        error = agent.ended(1)["error"]
        assert error.startswith("host 0 (127.0.0.1:")
        assert "was lost: its connection was closed; see what host 0 printed, start the run there again" in error
        wait_until(lambda: not running(pids), within_s=2)
    finally:
        leader.close()
        agent.close()


# Who is let in.


@pytest.fixture
def waiting() -> Iterator[tuple[Hosts, Secret]]:
    """Host 0 before anybody has joined."""
    secret = new_secret()
    with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:
        yield hosts, secret


def test_a_host_that_does_not_fit_is_told_why_and_others_still_join(waiting: tuple[Hosts, Secret]):
    hosts, secret = waiting
    wrong = start_agent(hosts.join_address, new_secret(), 4)
    assert "the secret is wrong for the run at 127.0.0.1:" in wrong.ended(2)["error"]
    unfit, fit = start_agent(hosts.join_address, secret, 2), start_agent(hosts.join_address, secret, 3)

    def check(hello: Mapping[str, Any]) -> HostInfo:
        if hello["name"] != "host-127.0.0.3":
            raise PlaitError("this host has another plait; install 0.1.0")
        return anybody(hello)

    try:
        (member,) = hosts.membership.admit(check, within_s=30)
        assert (member.host, member.address, str(member)) == (1, "127.0.0.3", "host-127.0.0.3 (127.0.0.3)")
        # Which of the two came first is open: the other may find that all are in, or that nobody waits any more.
        error = unfit.ended(2)["error"]
        words = ("install 0.1.0", "has all its hosts", "nobody waits", "broke off the connection")
        assert any(word in error for word in words)
        late = start_agent(hosts.join_address, secret, 5)
        assert "no run accepts hosts at 127.0.0.1:" in late.ended(2)["error"]
        assert listening_sockets(os.getpid()) == set()
    finally:
        fit.close()


def test_a_host_that_goes_away_while_it_waits_leaves_its_place_and_others_take_those_they_had():
    secret, agents, lost = new_secret(), [], list[str]()
    try:
        with Hosts(address="127.0.0.1", secret=secret, members=2, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:

            def check(hello: Mapping[str, Any]) -> HostInfo:
                if len(agents) == 2:
                    agents[0].process.kill()
                    (first, *_) = hosts.membership._admitted  # pyright: ignore[reportPrivateUsage]
                    wait_until(lambda: first.link.lost is not None, within_s=5)
                if len(agents) < 3:
                    agents.append(start_agent(hosts.join_address, secret, 12 + len(agents)))
                return anybody(hello)

            agents.append(start_agent(hosts.join_address, secret, 12))
            order = [("", "elsewhere"), ("mark", "host-127.0.0.14")]
            members = hosts.membership.admit(check, within_s=30, order=order, on_lost=lost.append)
            assert lost == ["host-127.0.0.12"]
            assert [(member.host, member.address) for member in members] == [(1, "127.0.0.14"), (2, "127.0.0.13")]
            assert hosts.addresses == ("127.0.0.1", "127.0.0.14", "127.0.0.13")
            for seats in ((0, 2, 1), (0, 2, 1), (0, 1, 2)):  # each time as they were admitted
                hosts.membership.renumber(seats)
                assert [member.host for member in hosts.members] == [1, 2]
                assert [member.address for member in hosts.members] == [members[host - 1].address for host in seats[1:]]
    finally:
        for agent in agents:
            agent.close()


def test_hosts_are_numbered_by_address_whoever_was_first():
    came = ["10.0.0.10", "fe80::2%eth0", "10.0.0.9", "elsewhere", "fe80::1%eth0"]
    assert sorted(came, key=by_address) == ["elsewhere", "10.0.0.9", "10.0.0.10", "fe80::1%eth0", "fe80::2%eth0"]


def test_hosts_of_one_name_are_known_by_their_marks():
    order = [("m0", "ubuntu"), ("m1", "ubuntu (2)"), ("m2", "ubuntu (3)"), ("", "old")]
    assert host_numbers([("m2", "ubuntu"), ("", "old"), ("m1", "ubuntu")], order) == [2, 3, 1]
    changed = [("m9", "ubuntu"), ("m1", "ubuntu"), ("m8", "new"), ("m7", "old")]
    assert host_numbers(changed, order) == [2, 1, 4, 3], "host 0 has its own place, and each place goes once"
    assert host_numbers(changed, ()) == [0, 0, 0, 0]
    assert host_numbers([("m2", "b"), ("m9", "c")], [("m0", "lead"), ("m1", "a"), ("m2", "b")]) == [2, 1], "c is for a"


def test_who_waits_in_vain_says_how_many_came(waiting: tuple[Hosts, Secret]):
    hosts, _ = waiting
    with pytest.raises(
        PlaitError, match=r"^0 of 1 other hosts joined 127\.0\.0\.1:\d+ within 0\.1 s; start plait join"
    ):
        hosts.membership.admit(anybody, within_s=0.1)


@pytest.mark.parametrize("name", ["10.0.0..1", "a" * 64])
def test_a_name_that_leads_nowhere_is_told(name: str):
    with pytest.raises(PlaitError, match=r"cannot be reached \(.*\); check the address and the network"):
        connect(name, 29400, new_secret())


def test_an_address_or_port_that_cannot_be_had_is_told():
    secret = new_secret()
    with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES) as hosts:
        port = int(hosts.join_address.rpartition(":")[2])
        with (
            pytest.raises(PlaitError, match=f"port {port} of 127.0.0.1 is taken; choose another"),
            Hosts(address="127.0.0.1", port=port, secret=secret, members=1, entries=ENTRIES),
        ):
            pass
    with pytest.raises(PlaitError, match=r"203\.0\.113\.7 is not an address of this machine; c"):
        Hosts(address="203.0.113.7", secret=secret, members=1, entries=ENTRIES)
