"""Ranks and fork servers that end badly: who is blamed, and that nobody is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from plait.errors import PlaitError, RunFailed
from plait.launch.local.run import ForkServer, run_job
from plait.launch.values.job import Job, JobResult, Message
from tests.launch.processes import ENTRIES, Record, is_running, is_stopped, job, open_descriptors, running, wait_until


def _kill(rank: int, number: signal.Signals = signal.SIGKILL) -> Callable[[Record], None]:
    return lambda record: os.kill(record.pids[rank], number)


def _run(whole: Job, *, on_message: Callable[[Message], None]) -> JobResult:
    return run_job(whole, ENTRIES, on_message=on_message)


def _fails(failing: Job, record: Record, run: Callable[..., JobResult] = _run) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        run(failing, on_message=record)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_exception_is_told_with_its_place_and_traceback(tmp_path):
    record = Record()
    error = _fails(job("fail_on_one", 3, argument="two\nlines", log_dir=str(tmp_path)), record)
    assert str(error).startswith("rank 1 failed with ValueError: two (at ")
    assert "entries.py:" in str(error)
    assert str(error).endswith(f"please report it with the full traceback in {tmp_path / 'rank-1.log'}")
    assert "ValueError: two\nlines" in (tmp_path / "rank-1.log").read_text()
    assert running(record.all_pids) == []


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    error = _fails(job("be_deaf", 2, log_dir=str(tmp_path / "nowhere")), Record())
    assert re.match(
        r"rank \d cannot write .*/nowhere/rank-\d\.log \(No such file or directory\); check the folder and the disk, ",
        str(error),
    )


def test_without_a_log_the_root_cause_alone_prints_its_traceback(capfd):
    error = _fails(job("fail_on_one", 2, argument="boom"), Record())
    assert str(error).endswith("traceback above")
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize(("kind", "exit_code"), [("PlaitError", 2), ("RunFailed", 1)])
def test_a_plait_error_arrives_as_it_was(kind: str, exit_code: int, capfd, tmp_path):
    with pytest.raises(PlaitError) as caught:
        run_job(job("raise_plait_error", 2, argument=kind, log_dir=str(tmp_path)), ENTRIES, on_message=Record())
    assert type(caught.value).__name__ == kind
    assert caught.value.exit_code == exit_code
    assert str(caught.value) == "the file is empty; give one with text"
    assert "Traceback" not in capfd.readouterr().err + (tmp_path / "rank-1.log").read_text()


def test_kill_9_of_a_rank_ends_all_within_five_seconds():
    record = Record(3, _kill(1))
    error = _fails(job("be_deaf", 3), record)
    assert time.monotonic() - record.acted_at_s < 5
    assert running(record.all_pids) == []
    assert str(error).startswith("rank 1 was killed by SIGKILL, often the kernel's out-of-memory killer")
    assert "layout.micro_sequences" in str(error)


def test_a_crash_is_named_and_its_stack_logged(tmp_path):
    error = _fails(job("be_deaf", 2, log_dir=str(tmp_path)), Record(2, _kill(1, signal.SIGSEGV)))
    assert str(error).startswith("rank 1 was killed by SIGSEGV")
    assert "Segmentation fault" in (tmp_path / "rank-1.log").read_text()
    assert "be_deaf" in (tmp_path / "rank-1.log").read_text()


def test_a_stopped_rank_is_killed_with_the_others():
    def stop_one_kill_another(record: Record) -> None:
        os.kill(record.pids[0], signal.SIGSTOP)
        os.kill(record.pids[2], signal.SIGKILL)

    record = Record(3, stop_one_kill_another)
    error = _fails(job("be_deaf", 3), record)
    assert str(error).startswith("rank 2 was killed by SIGKILL")
    assert time.monotonic() - record.acted_at_s < 5
    assert running(record.all_pids) == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_without_a_word_is_an_error(code: int):
    error = _fails(job("leave_on_one", 2, argument=str(code)), Record())
    sentence = "rank 1 left before its work was done" if code == 0 else "rank 1 ended with exit code 3"
    assert str(error).startswith(sentence)


@pytest.mark.parametrize("how", ["raise", "killed"])
def test_the_root_cause_is_named_not_the_broken_connection(torch_server: ForkServer, how: str, tmp_path):
    act = _kill(1) if how == "killed" else lambda record: None
    record = Record(3, act)
    failing = job("reduce_until_one_fails", 3, argument=how, log_dir=str(tmp_path))
    error = _fails(failing, record, torch_server.run)
    cause = "was killed by SIGKILL" if how == "killed" else "failed with ValueError: the root cause"
    assert str(error).startswith(f"rank 1 {cause}")
    # The others did fail first-hand as well, each with the loss of its peer: the choice was a real one.
    assert "gloo" in (tmp_path / "rank-0.log").read_text()
    assert running(record.pids.values()) == []


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("be_nowhere", "ModuleNotFoundError: No module named 'tests.launch.no_such_module'"),
        ("start_a_thread", "RuntimeError: the fork server has 2 threads after its imports"),
    ],
)
def test_what_prevents_the_start_is_told(entry: str, what: str, capfd):
    error = _fails(job(entry, 2), Record())
    assert str(error).startswith(f"starting the workers failed with {what}")
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("logged", [False, True])
def test_a_rank_that_fails_before_its_first_message_says_why(logged: bool, tmp_path, capfd):
    log_dir = str(tmp_path) if logged else None
    error = _fails(job("break_the_start", 2, log_dir=log_dir), Record())
    assert re.match(r"rank \d failed with OSError: \[Errno 9\] the start is broken \(at ", str(error))
    told = "".join(path.read_text() for path in tmp_path.iterdir()) if logged else capfd.readouterr().err
    assert "Traceback" in told
    assert "in _fail" in told


def test_a_fork_that_has_reset_the_wakeup_descriptor_starts_all_the_same():
    """From Python 3.12 on asyncio does so in each forked child."""
    record = Record()
    run_job(job("tell_descriptor", 2), ENTRIES, on_message=record)
    assert record.values("descriptor") == {0: {"descriptor": -1}, 1: {"descriptor": -1}}


def test_a_rank_that_never_starts_is_an_error():
    began_s = time.monotonic()
    with pytest.raises(RunFailed, match=r"ranks 0, 1 did not start within 1 s"):
        run_job(job("hang_at_the_fork", 2), ENTRIES, on_message=Record(), start_s=1)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_death_of_the_fork_server_ends_all(number: signal.Signals):
    record = Record(2, lambda record: os.kill(record.server_pid, number))
    error = _fails(job("be_deaf", 2), record)
    assert str(error).startswith(f"the process that starts the workers was killed by {number.name}")
    assert time.monotonic() - record.acted_at_s < 5
    wait_until(lambda: not running(record.all_pids), within_s=1)


@pytest.mark.slow
def test_a_fork_server_that_does_not_report_a_death_is_an_error():
    with ForkServer(ENTRIES) as server:
        server.run(job("hello", 1), on_message=Record())
        idle = open_descriptors(server.pid)

        def freeze_server_kill_rank(record: Record) -> None:
            wait_until(lambda: open_descriptors(server.pid) == idle, within_s=10)
            os.kill(server.pid, signal.SIGSTOP)
            wait_until(lambda: is_stopped(server.pid), within_s=10)
            os.kill(record.pids[0], signal.SIGKILL)

        record = Record(2, freeze_server_kill_rank)
        error = _fails(job("be_deaf", 2), record, server.run)
        assert str(error).startswith("the process that starts the workers does not answer")
        assert time.monotonic() - record.acted_at_s < 5
        wait_until(lambda: not running(record.all_pids), within_s=1)


def test_a_fork_server_that_does_not_answer_at_all_is_an_error():
    with ForkServer(ENTRIES) as server:
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(RunFailed, match=r"the process that starts the workers was not ready within 0\.5 s"):
            server.run(job("hello", 2), on_message=Record(), start_s=0.5)


def test_a_callers_own_error_ends_the_job_but_not_the_server():
    def refuse(record: Record) -> None:
        raise KeyError("the caller's")

    record = Record(2, refuse)
    with ForkServer(ENTRIES) as server:
        with pytest.raises(KeyError, match="the caller's"):
            server.run(job("be_deaf", 2), on_message=record)
        assert running(record.pids.values()) == []
        assert server.run(job("hello", 2), on_message=Record()).stopped_by == "finished"


def test_a_server_serves_on_after_a_failed_job_and_another_takes_its_place_when_it_is_dead():
    with ForkServer(ENTRIES) as server:
        with pytest.raises(RunFailed, match="rank 1 failed"):
            server.run(job("fail_on_one", 2), on_message=Record())
        assert server.run(job("hello", 2), on_message=Record()).stopped_by == "finished"
        lost = server.pid
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: not is_running(lost), within_s=5)
        assert server.run(job("hello", 2), on_message=Record()).stopped_by == "finished"
        assert server.pid != lost


def test_a_message_over_the_cap_is_a_bug_of_the_sender(tmp_path):
    error = _fails(job("talk_too_much", 1, log_dir=str(tmp_path)), Record())
    assert "over the cap" in str(error)


def test_the_supervising_modules_import_no_torch():
    code = (
        "import sys, plait.launch.local.run, plait.launch.local.torchrun; "
        "import plait.hosts.leader, plait.hosts.member; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
