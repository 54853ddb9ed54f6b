"""Ctrl-C, SIGTERM and kill -9 of the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import OutOfTime, RunFailed
from plait.launch.local.run import ForkServer, run_job
from plait.launch.values.job import STOPPING
from tests.launch.processes import ENTRIES, Record, is_running, job, running, wait_until

ROOT = Path(__file__).parents[2]


def _send_self(*numbers: signal.Signals) -> Callable[[Record], None]:
    def send(record: Record) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return send


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_the_ranks_save_and_return(number: signal.Signals, times: int):
    """Also where it comes twice in a row, as from `timeout`, which signals its command and then their group."""
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    record = Record(3, _send_self(*[number] * times))
    result = run_job(job("wait_for_stop", 3), ENTRIES, on_message=record)
    assert result.stopped_by == number.name
    assert record.values("saved") == {rank: {"rank": rank} for rank in range(3)}
    assert [message.values for message in record.messages if message.kind == STOPPING] == [{"signal": number.name}]
    assert running(record.all_pids) == []
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_the_second_signal_kills_at_once():
    record = Record(2, _send_self(signal.SIGINT, signal.SIGTERM))
    with pytest.raises(RunFailed, match="second SIGTERM, without saving"):
        run_job(job("be_deaf", 2), ENTRIES, on_message=record, grace_s=20)
    assert time.monotonic() - record.acted_at_s < 5
    assert running(record.all_pids) == []


def test_ranks_that_do_not_return_are_killed_after_the_grace():
    record = Record(2, _send_self(signal.SIGTERM))
    with pytest.raises(RunFailed, match=r"had not saved and ended 0\.3 s after SIGTERM"):
        run_job(job("be_deaf", 2), ENTRIES, on_message=record, grace_s=0.3)
    assert time.monotonic() - record.acted_at_s < 5
    assert running(record.all_pids) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_gives_nothing_unfinished_ends_at_the_first_signal(number: signal.Signals):
    """Nobody waits for what a measurement is doing; a second signal changes nothing."""
    record = Record(2, _send_self(number, number, signal.SIGTERM))
    measuring = replace(job("be_deaf", 2), at_stop="abandon")
    result = run_job(measuring, ENTRIES, on_message=record, grace_s=30)
    assert result.stopped_by == number.name
    assert time.monotonic() - record.acted_at_s < 5
    assert [message.kind for message in record.messages] == ["pid", "pid"]
    assert running(record.all_pids) == []


def test_a_job_ends_at_its_time_limit_and_the_server_serves_the_next():
    record = Record(2)
    with ForkServer(ENTRIES) as server:
        with pytest.raises(OutOfTime, match=r"not done within 0\.2 s"):
            server.run(replace(job("be_deaf", 2), at_stop="abandon", limit_s=0.2), on_message=record)
        assert set(running(record.all_pids)) <= {server.pid}
        assert server.run(replace(job("hello", 2), limit_s=60.0), on_message=Record(2)).stopped_by == "finished"


@pytest.fixture
def starting(tmp_path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A supervisor whose fork server is held in an import, by a pipe that nobody writes to; and that server's pid."""
    pipe, reached = tmp_path / "pipe", tmp_path / "reached"
    os.mkfifo(pipe)
    (tmp_path / "slow_to_import.py").write_text(
        f"import os, pathlib\npathlib.Path({str(reached)!r}).symlink_to(str(os.getpid()))\nopen({str(pipe)!r}).read()\n"
    )
    code = (
        "from plait.launch.values.job import STOPPING,  Job; from plait.launch.values.entries import EntryTable\n"
        "from plait.launch.local.run import run_job\n"
        "job = Job(entry='slow', argument='', world_size=2, threads=1)\n"
        "table = EntryTable(functions={'slow': 'slow_to_import:main'})\n"
        "print(run_job(job, table, on_message=print).stopped_by)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_until(reached.is_symlink, within_s=20)
        server_pid = int(reached.readlink().name)
        yield process, server_pid
        for pid in running([process.pid, server_pid]):
            os.kill(pid, signal.SIGKILL)


def test_a_signal_before_the_first_rank_exists_ends_the_job(starting: tuple[subprocess.Popen[str], int]):
    process, server_pid = starting
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == "SIGINT\n"
    assert not is_running(server_pid)


def test_kill_9_of_the_supervisor_ends_a_server_that_is_busy(starting: tuple[subprocess.Popen[str], int]):
    process, server_pid = starting
    assert is_running(server_pid)
    process.kill()
    wait_until(lambda: not is_running(server_pid), within_s=2)


class _Alone:
    """A supervisor in its own process and group, and what its ranks told."""

    def __init__(self, entry: str, world_size: int, temporary: Path) -> None:
        # A supervisor that is killed leaves its rendezvous folder: let that be the test's own.
        environment = {**os.environ, "TMPDIR": str(temporary)}
        command = [sys.executable, "-m", "tests.launch.alone", entry, str(world_size)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        told = [self.next_line() for _ in range(world_size)]
        self.pids = [line["pid"] for line in told] + [told[0]["server"]]

    def next_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        for pid in running([*self.pids, self.process.pid]):
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def alone(tmp_path) -> Iterator[Callable[[str, int], _Alone]]:
    started: list[_Alone] = []

    def start(entry: str, world_size: int) -> _Alone:
        started.append(_Alone(entry, world_size, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_kill_9_of_the_supervisor_leaves_no_process(alone: Callable[[str, int], _Alone]):
    supervisor = alone("be_deaf", 3)
    assert running(supervisor.pids) == supervisor.pids
    supervisor.process.kill()
    wait_until(lambda: not running(supervisor.pids), within_s=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_still_saves(alone: Callable[[str, int], _Alone], number: signal.Signals):
    """As Ctrl-C in a terminal does, and some schedulers."""
    supervisor = alone("wait_for_stop", 3)
    os.killpg(supervisor.process.pid, number)
    *lines, last = [supervisor.next_line() for _ in range(5)]
    saved = [line for line in lines if line != {"kind": STOPPING, "rank": 0, "signal": number.name}]
    assert sorted(line["rank"] for line in saved) == [0, 1, 2]
    assert {line["kind"] for line in saved} == {"saved"}
    assert last == {"stopped_by": number.name}
    assert supervisor.process.wait(10) == 0
    assert running(supervisor.pids) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_under_torchrun_a_signal_saves_and_kill_9_leaves_no_worker(number: signal.Signals):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.launch.under_torchrun"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
        assert agent.stdout is not None
        told = json.loads(agent.stdout.readline())
        assert (told["kind"], told["rank"], told["local_world_size"]) == ("pids", 0, 2)
        assert running(told["pids"]) == told["pids"]
        agent.send_signal(number)
        try:
            wait_until(lambda: not running([agent.pid, *told["pids"]]), within_s=30)
        finally:
            for pid in running([agent.pid, *told["pids"]]):
                os.kill(pid, signal.SIGKILL)
        rest = agent.communicate()[0].splitlines()
    assert [json.loads(line)["kind"] for line in rest] == (["saved"] if number == signal.SIGTERM else [])
