"""Jobs that end well, and what they leave behind: nothing."""

from __future__ import annotations

import os
import resource
import signal
import socket
import tempfile
import threading

import pytest

from plait.errors import PlaitError
from plait.launch.local.run import ForkServer, run_job
from plait.launch.values.job import Job, JobResult
from tests.launch.processes import ENTRIES, Record, is_running, job, listening_sockets, open_descriptors, running
from tests.matrix import few_fast


def test_every_rank_runs_tells_and_ends():
    record = Record()
    result = run_job(job("hello", 3, argument='{"a": 1}\nb', threads=2), ENTRIES, on_message=record)
    assert result.stopped_by == "finished"
    assert result.wall_s > 0
    for rank, hello in record.values("hello").items():
        assert hello["argument"] == '{"a": 1}\nb'
        environment = hello["environment"]
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("2", "2")
        assert (environment["OMP_DYNAMIC"], environment["MKL_DYNAMIC"]) == ("FALSE", "FALSE")
    assert sorted(record.values("hello")) == [0, 1, 2]
    assert running(record.all_pids) == []


def test_the_environment_that_was_set_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    record = Record()
    run_job(job("hello", 1), ENTRIES, on_message=record)
    environment = record.values("hello")[0]["environment"]
    assert (environment["GLOO_SOCKET_IFNAME"], environment["PYTHONPATH"]) == ("eth7", "/nowhere")


@pytest.mark.slow
def test_memory_that_a_step_freed_is_there_for_the_next(monkeypatch):
    size = 64 << 20
    pages = size // resource.getpagesize()
    record = Record()
    run_job(job("come_and_go", 1, argument=str(size)), ENTRIES, on_message=record)
    assert record.values("pages")[0]["later"] < pages / 10
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 20))
    record = Record()
    run_job(job("come_and_go", 1, argument=str(size)), ENTRIES, on_message=record)
    assert record.values("pages")[0]["later"] > pages / 2, "a user's own wish was not kept"


def test_no_message_is_lost_or_reordered():
    record = Record()
    run_job(job("talk", 2, argument="3000"), ENTRIES, on_message=record)
    for rank in (0, 1):
        numbers = [message.values["number"] for message in record.messages if message.rank == rank]
        assert numbers == list(range(3000))


def test_it_runs_off_the_main_thread():
    results: list[JobResult] = []
    thread = threading.Thread(target=lambda: results.append(run_job(job("hello", 1), ENTRIES, on_message=Record())))
    thread.start()
    thread.join(30)
    assert [result.stopped_by for result in results] == ["finished"]


def test_only_rank_0_prints_on_the_terminal(tmp_path, capfd):
    run_job(job("print_some", 2, argument="words", log_dir=str(tmp_path)), ENTRIES, on_message=Record())
    assert capfd.readouterr().out == "rank 0 prints words\n"
    assert (tmp_path / "rank-1.log").read_text() == "rank 1 prints words\n"


def test_what_a_rank_started_ends_with_the_job():
    record = Record()
    with ForkServer(ENTRIES) as server:
        server.run(job("leave_a_child", 2), on_message=record)
        assert len(record.pids) == 2
        assert running(record.pids.values()) == []
        assert is_running(server.pid)


@pytest.mark.slow
def test_fifty_jobs_on_one_server_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ForkServer(ENTRIES) as server:
        server.run(job("hello", 2), on_message=Record())
        before = (open_descriptors("self"), open_descriptors(server.pid))
        for _ in range(50):
            server.run(job("hello", 2), on_message=Record())
        assert (open_descriptors("self"), open_descriptors(server.pid)) == before
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens_on_a_port():
    listening: list[set[str]] = []

    def look(record: Record) -> None:
        listening.extend(listening_sockets(pid) for pid in record.all_pids)
        listening.append(listening_sockets(os.getpid()))
        os.kill(os.getpid(), signal.SIGTERM)

    run_job(job("wait_for_stop", 2), ENTRIES, on_message=Record(2, look))
    assert listening == [set()] * 4


def test_a_listening_port_would_be_seen():
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening_sockets(os.getpid())) == 1


@pytest.mark.parametrize("world_size", few_fast([1, 2, 3, 4], 3))
def test_ranks_meet_through_the_file_store(torch_server: ForkServer, world_size: int):
    record = Record()
    torch_server.run(job("all_reduce", world_size), on_message=record)
    total = world_size * (world_size + 1) / 2
    assert record.values("sum") == {rank: {"value": total} for rank in range(world_size)}


@pytest.mark.parametrize("threads", few_fast([2, 1, 3], 2))
def test_each_job_has_its_own_thread_count(torch_server: ForkServer, threads: int):
    record = Record()
    torch_server.run(job("count_threads", 2, threads=threads), on_message=record)
    for told in record.values("threads").values():
        assert told == {"claimed": threads, "worked": threads}


def test_a_warm_server_starts_ranks_at_once(torch_server: ForkServer):
    walls_s = [torch_server.run(job("hello", 2), on_message=Record()).wall_s for _ in range(5)]
    assert min(walls_s) < 0.5  # importing torch alone takes longer


def test_a_job_that_cannot_be_is_refused():
    with pytest.raises(PlaitError, match="choose 1 to 250 workers"):
        run_job(job("hello", 251), ENTRIES, on_message=Record())
    with pytest.raises(ValueError, match="is not a name of small letters"):
        Job(entry="pydoc:pipepager", argument="", world_size=1, threads=1)
