"""Hosts that come and go while a run works: they may join at any time, ranks are paused for them, and nobody is kept in
mind who is no longer there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.hosts.handshake import Refused, Secret, greet_joiner, greet_leader, new_secret
from plait.hosts.joining import HostInfo
from plait.hosts.leader import HostPart, Hosts
from plait.hosts.membership import OVER_SENTENCE, PREPARED_SENTENCE, WAITS_SENTENCE, HostChange, Member
from plait.launch.values.failure import WorkersFailed
from plait.launch.values.job import STOP_IN_WORDS, STOPPING, JobResult, Message
from tests.launch.host import HEARTBEAT
from tests.launch.joined import HostProcess, start_agent
from tests.launch.processes import ENTRIES, Record, anybody, job, wait_until

FIT = "host-127.0.0."


class _Run:
    """Host 0 of a run that hosts may join at any time, and the processes that joined it."""

    def __init__(self, hosts: Hosts, secret: Secret, agents: list[HostProcess]) -> None:
        self.hosts, self.agents, self._secret = hosts, agents, secret

    def join(self, number: int) -> HostProcess:
        self.agents.append(start_agent(self.hosts.join_address, self._secret, number))
        return self.agents[-1]

    def work(self, entry: str, on_message: Callable[[Message], None], argument: str = "") -> JobResult:
        """A job with a rank on each host that is a member now."""
        ranks = 1 + len(self.hosts.members)
        parts = [HostPart(ranks=1, threads=1, argument=argument) for _ in range(ranks)]
        whole = job(entry, ranks, argument=argument)
        return self.hosts.run(whole, on_message=on_message, parts=parts, membership=self.hosts.membership)

    def names(self, change: HostChange) -> tuple[list[str], list[str]]:
        return [one.name for one in change.gone], [one.name for one in change.came]


@pytest.fixture
def run() -> Iterator[_Run]:
    """Two hosts, the other one 127.0.0.2; those with odd numbers do not fit, and are told so."""
    secret, agents = new_secret(), list[HostProcess]()

    def check(hello: Mapping[str, Any]) -> HostInfo:
        if int(str(hello["name"])[-1]) % 2:
            raise PlaitError("this host has plait 0.0.9; install 0.1.0")
        return anybody(hello)

    try:
        with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:
            made = _Run(hosts, secret, agents)
            made.join(2)
            hosts.membership.admit(check, within_s=30, joining="open")
            yield made
    finally:
        for agent in agents:
            agent.close()


def test_a_host_that_joins_while_ranks_work_is_taken_in_when_they_have_saved(run: _Run) -> None:
    membership, heard = run.hosts.membership, list[str]()

    def come(record: Record) -> None:
        unfit, fit = run.join(3), run.join(4)
        assert unfit.next_line() == fit.next_line() == {"kind": "connected"}

        def save() -> None:
            """What a checkpoint's message does, once somebody waits: until then it changes nothing."""
            membership.may_take_in()
            assert not membership.wants_pause
            heard.append(fit.next_line()["hosts"])
            membership.may_take_in()

        threading.Thread(target=save, daemon=True).start()

    record = Record(2, come)
    result = run.work("wait_for_stop", record)
    assert (result.how, result.stopped_by) == ("paused", "finished") and heard == [WAITS_SENTENCE]
    assert STOPPING not in [message.kind for message in record.messages], "nobody stopped the run"
    assert "install 0.1.0" in run.agents[1].ended(2)["error"]
    assert run.agents[0].next_line() == {"kind": "connected"}
    assert STOP_IN_WORDS in run.agents[0].next_line()["hosts"]
    change = membership.renew()
    assert run.names(change) == ([], [f"{FIT}4"]) and not membership.wants_pause and not membership.renew()
    assert [(one.host, one.address) for one in run.hosts.members] == [(1, "127.0.0.2"), (2, "127.0.0.4")]
    again = Record()
    assert run.work("hello", again).how == "over"
    assert again.values("hello").keys() == {0, 1, 2}, "a rank on each of three hosts"


def test_the_others_go_on_without_a_host_that_is_lost_and_take_it_in_again(run: _Run) -> None:
    run.join(4)
    wait_until(lambda: bool(run.hosts.membership.renew().came), within_s=20)
    with pytest.raises(WorkersFailed) as lost:
        run.work("wait_for_stop", Record(3, lambda record: os.killpg(run.agents[0].pid, signal.SIGKILL)))
    assert lost.value.facts.cause == "host lost" and lost.value.facts.host == f"{FIT}2 (127.0.0.2)"
    assert run.names(run.hosts.membership.renew()) == ([f"{FIT}2"], [])
    assert run.hosts.addresses == ("127.0.0.1", "127.0.0.4")
    left = Record()
    run.work("hello", left)
    assert left.values("hello").keys() == {0, 1}
    run.join(2)
    wait_until(lambda: bool(run.hosts.membership.renew().came), within_s=20)
    assert [(one.host, one.address) for one in run.hosts.members] == [(1, "127.0.0.4"), (2, "127.0.0.2")]
    whole = Record()
    run.work("hello", whole)
    assert whole.values("hello").keys() == {0, 1, 2}


def test_who_waits_is_prepared_while_ranks_work_and_taken_in_when_it_is_ready(run: _Run) -> None:
    membership, ready, answered = run.hosts.membership, threading.Event(), list[Record]()

    def prepare(member: Member) -> None:
        """A job on the host that waits, beside that of the others; there is no use for the second one."""
        if member.name == f"{FIT}6":
            raise PlaitError("its folder holds another run; move it away")
        record = Record()
        run.hosts.run_on(member, job("hello", 2), record).require_finished()
        answered.append(record)
        assert ready.wait(20)

    membership.prepare_with(prepare)

    def come(record: Record) -> None:
        fit, useless = run.join(4), run.join(6)

        def save() -> None:
            assert fit.next_line() == {"kind": "connected"} and fit.next_line()["hosts"] == PREPARED_SENTENCE
            assert useless.ended(2)["error"] == "its folder holds another run; move it away"
            wait_until(lambda: bool(answered), within_s=20)
            membership.may_take_in()
            assert not membership.wants_pause, "it is not ready"
            ready.set()
            wait_until(lambda: bool(membership.may_take_in() or membership.wants_pause), within_s=20)

        threading.Thread(target=save, daemon=True).start()

    result = run.work("wait_for_stop", Record(2, come))
    assert (result.how, result.stopped_by) == ("paused", "finished")
    assert answered[0].values("hello").keys() == {0, 1}
    assert run.names(membership.renew()) == ([], [f"{FIT}4"])
    again = Record()
    run.work("hello", again)
    assert again.values("hello").keys() == {0, 1, 2}


def test_where_those_that_are_left_are_too_few_who_waits_is_waited_for(run: _Run) -> None:
    membership, ready = run.hosts.membership, threading.Event()

    def prepare(member: Member) -> None:
        assert ready.wait(20)

    membership.prepare_with(prepare)
    run.join(4)
    wait_until(lambda: bool(membership.look() or membership._waiting), within_s=20)
    assert not membership.renew(), "it is not ready"
    threading.Timer(0.1, ready.set).start()
    assert run.names(membership.renew("all")) == ([], [f"{FIT}4"])


def test_a_host_that_works_while_it_waits_is_told_that_the_run_has_ended() -> None:
    secret, agents, begun, ended = new_secret(), list[HostProcess](), threading.Event(), list[str]()
    try:
        with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:
            made = _Run(hosts, secret, agents)
            made.join(2)
            hosts.membership.admit(anybody, within_s=30, joining="open")

            def prepare(member: Member) -> None:
                try:
                    hosts.run_on(member, job("wait_for_stop", 1), Record(1, lambda record: begun.set()))
                except PlaitError as error:
                    ended.append(str(error))
                    raise

            hosts.membership.prepare_with(prepare)
            late = made.join(4)
            wait_until(lambda: bool(hosts.membership.look() or begun.is_set()), within_s=20)
        assert late.ended(2)["error"] == OVER_SENTENCE
        assert len(ended) == 1 and "was lost" in ended[0], "its thread has ended, too"
    finally:
        for agent in agents:
            agent.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_host_that_is_stopped_leaves_when_the_ranks_have_saved(run: _Run, number: signal.Signals) -> None:
    record = Record(2, lambda record: os.killpg(run.agents[0].pid, number))
    result = run.work("wait_for_stop", record)
    assert (result.how, result.stopped_by) == ("paused", "finished")
    (gone,) = run.hosts.membership.renew().gone
    assert (gone.name, gone.why, gone.by) == (f"{FIT}2", f"left by {number.name}", number.name)
    assert run.agents[0].ended(0) == {"stopped_by": f"left by {number.name}"}
    assert run.work("hello", Record()).how == "over" and run.hosts.members == ()


def test_a_warning_of_a_scheduler_on_another_host_stops_the_whole_run(run: _Run) -> None:
    record = Record(2, lambda record: os.killpg(run.agents[0].pid, signal.SIGUSR1))
    result = run.work("wait_for_stop", record)
    assert (result.how, result.stopped_by) == ("over", "SIGUSR1")


def test_a_stop_on_host_0_during_a_pause_stops_the_run(run: _Run, tmp_path: Path) -> None:
    word = tmp_path / "save"
    record = Record(2, lambda record: os.killpg(run.agents[0].pid, signal.SIGTERM))

    def hear(message: Message) -> None:
        record(message)
        if message.kind == "asked" and message.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        if message.kind == STOPPING:
            word.touch()

    result = run.work("save_on_word", hear, str(word))
    assert (result.how, result.stopped_by) == ("over", "SIGINT")
    assert record.values("saved").keys() == {0, 1}


def test_who_waits_is_told_that_the_run_has_ended() -> None:
    secret, agents = new_secret(), list[HostProcess]()
    try:
        with Hosts(address="127.0.0.1", secret=secret, members=1, entries=ENTRIES, heartbeat=HEARTBEAT) as hosts:
            made = _Run(hosts, secret, agents)
            made.join(2)
            hosts.membership.admit(anybody, within_s=30, joining="open")
            late = made.join(4)
            assert late.next_line() == {"kind": "connected"}
            wait_until(lambda: bool(hosts.membership.look() or hosts.membership._waiting), within_s=20)
        assert late.ended(2)["error"] == OVER_SENTENCE
        assert agents[0].ended(0) == {"stopped_by": "finished"}
    finally:
        for agent in agents:
            agent.close()


def test_what_was_recorded_of_an_admission_opens_no_other_door_with_the_same_secret() -> None:
    """The secret lives as long as the run, over starts of its leader; each admission has nonces of its own."""
    secret = new_secret()
    with _door() as first, _door() as second:
        recorded = _recorded_joiner(first, secret)
        with socket.create_connection(second.getsockname()) as replayed:
            replayed.sendall(recorded)
            connection, _ = second.accept()
            with connection, pytest.raises((Refused, OSError)):
                greet_joiner(connection, secret, within_s=2)


@contextlib.contextmanager
def _door() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _recorded_joiner(door: socket.socket, secret: Secret) -> bytes:
    """All that a joiner sends while it is admitted, as a middle man sees it."""
    with socket.create_server(("127.0.0.1", 0)) as middle:
        sent = bytearray()

        def forward() -> None:
            inside, _ = middle.accept()
            outside = socket.create_connection(door.getsockname())

            def pump(source: socket.socket, target: socket.socket, keep: bool) -> None:
                with contextlib.suppress(OSError):
                    while data := source.recv(4096):
                        if keep:
                            sent.extend(data)
                        target.sendall(data)

            threading.Thread(target=pump, args=(outside, inside, False), daemon=True).start()
            pump(inside, outside, True)

        threading.Thread(target=forward, daemon=True).start()
        connection = socket.create_connection(middle.getsockname())
        answered: list[object] = []

        def answer() -> None:
            accepted, _ = door.accept()
            answered.append(greet_joiner(accepted, secret))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        greet_leader(connection, secret, address="here")
        thread.join(5)
        assert answered, "the recorded admission was a good one"
        return bytes(sent)
