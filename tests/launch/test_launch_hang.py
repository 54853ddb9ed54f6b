"""Real ranks that are stopped or never come back: who is named, how soon, with which stack, and that nobody is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from plait.launch.local.run import ForkServer
from plait.launch.local.signals import collected_signals
from plait.launch.local.supervise import Supervision
from plait.launch.values.failure import WorkersFailed
from plait.launch.values.job import Job, StoppedBy
from plait.launch.values.phase import HangTimeouts, PhaseTimeouts
from tests.entry_tables import entries_of
from tests.launch.processes import WITH_TORCH, Record, job, running, wait_until

_MORE = entries_of("tests.launch.entries_that_step").functions
STEPPING = replace(WITH_TORCH, functions={**WITH_TORCH.functions, **_MORE})
QUICK = HangTimeouts(stopped_s=1.5, least_s=3.0, unknown_s=20.0, computing_s=4.0)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(STEPPING, threads=1) as server:
        yield server


def supervised(server: ForkServer, whole: Job, record: Record, hang_timeouts: HangTimeouts = QUICK) -> StoppedBy:
    timeouts = PhaseTimeouts(start_s=60, grace_s=5, hang_timeouts=hang_timeouts)
    with collected_signals() as signals, server.start(whole) as site:
        return Supervision([site], signals, record, timeouts).run()


def after_a_while(act: Callable[[Record], None], seconds: float) -> Callable[[Record], None]:
    return lambda record: threading.Timer(seconds, act, [record]).start()


def hung(server: ForkServer, whole: Job, record: Record) -> WorkersFailed:
    with pytest.raises(WorkersFailed) as caught:
        supervised(server, whole, record)
    wait_until(lambda: not running(record.pids.values()), within_s=2)
    return caught.value


def test_a_stopped_rank_is_named_with_its_stack_and_ended(server: ForkServer) -> None:
    chosen = random.Random(os.getpid()).randrange(3)
    record = Record(3, after_a_while(lambda record: os.kill(record.pids[chosen], signal.SIGSTOP), 0.7))
    error = hung(server, job("step_together", 3), record)
    assert (error.facts.cause, error.facts.rank, error.facts.what) == ("hung", chosen, "stopped"), str(error)
    assert str(error).startswith(f"rank {chosen} was stopped by a signal in ")
    assert "step_together" in error.facts.stack
    assert time.monotonic() - record.acted_at_s < 8


@pytest.mark.slow
def test_a_rank_that_computes_without_end_is_named(server: ForkServer) -> None:
    record = Record(2)
    error = hung(server, job("step_together", 2, argument="1"), record)
    assert (error.facts.cause, error.facts.rank, error.facts.what) == ("hung", 1, "working"), str(error)
    assert error.facts.place == "forward and backward of step 21"
    assert "while the others waited in the sum of gradients of step 21" in str(error)
    assert "in _spin\n" in error.facts.stack, error.facts.stack


@pytest.mark.slow
def test_a_stopped_fork_server_is_ended_and_another_takes_its_place() -> None:
    with ForkServer(STEPPING, threads=1) as own:
        first = own.pid
        record = Record(2, after_a_while(lambda record: os.kill(first, signal.SIGSTOP), 0.3))
        with pytest.raises(WorkersFailed) as caught:
            supervised(own, job("step_together", 2), record)
        assert str(caught.value).startswith("the process that starts the workers was stopped by a signal")
        assert caught.value.facts.cause == "no answer"
        wait_until(lambda: not running(record.all_pids), within_s=2)
        assert own.run(job("hello", 2), on_message=Record()).stopped_by == "finished"
        assert own.pid != first


def test_a_stop_is_not_held_up_by_a_stopped_rank(server: ForkServer) -> None:
    def stop(record: Record) -> None:
        os.kill(record.pids[1], signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGINT)

    record = Record(2, after_a_while(stop, 0.5))
    error = hung(server, job("step_together", 2), record)
    assert error.stopped_by == "SIGINT" and error.facts.rank == 1
    assert time.monotonic() - record.acted_at_s < 8


@pytest.mark.slow
def test_without_the_watch_nobody_notices(server: ForkServer) -> None:
    """The control: the same stopped rank, with timeouts that never come, is found only by the stop's bound."""
    endless = HangTimeouts(stopped_s=1e9, least_s=1e9, unknown_s=1e9, computing_s=1e9)

    def stop(record: Record) -> None:
        os.kill(record.pids[1], signal.SIGSTOP)
        threading.Timer(5.0, os.kill, [os.getpid(), signal.SIGINT]).start()

    record = Record(2, after_a_while(stop, 0.5))
    with pytest.raises(Exception, match=r"they had not saved and ended \S+ s after SIGINT"):
        supervised(server, job("step_together", 2), record, endless)
    assert time.monotonic() - record.acted_at_s > 9


@pytest.mark.slow
def test_no_false_alarm_in_thousands_of_steps(server: ForkServer) -> None:
    record = Record(3, after_a_while(lambda record: os.kill(os.getpid(), signal.SIGINT), 120.0))
    assert supervised(server, job("step_together", 3), record) == "SIGINT"
    assert record.values("stepped")[0]["steps"] > 2_000
