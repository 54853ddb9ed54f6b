"""The life of one rank, from the fork to its exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from plait.errors import RunFailed, disk_advice
from plait.launch.in_memory.memory import RankMemory
from plait.launch.local.channel import send_line
from plait.launch.local.guard import die_with_parent
from plait.launch.local.heap import keep_freed_memory
from plait.launch.local.signals import STOP_SIGNALS
from plait.launch.network import network_facts, network_variables
from plait.launch.values.entries import Entry
from plait.launch.values.failure import RESUME_ADVICE, RankRaised, describe_exception
from plait.launch.values.job import Job, RankContext
from plait.launch.values.progress import ProgressReport
from plait.launch.watching.board import STACK_SIGNAL, SlotWriter, stack_writer
from plait.regular_file import append_to_file


class StopFlag:
    """Set by a signal and read between steps. The handler does nothing else: saving inside one could deadlock."""

    def __init__(self) -> None:
        self._requested = False

    def listen(self, *numbers: signal.Signals) -> None:
        """Have these signals set the flag; main thread only."""
        for number in numbers:
            signal.signal(number, self._set)
            # A write or fsync that the signal finds halfway goes on; library code rarely expects EINTR.
            signal.siginterrupt(number, False)

    def requested(self) -> bool:
        return self._requested

    def _set(self, number: int, frame: FrameType | None) -> None:
        self._requested = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """What a forked process needs to become a rank: what to run, its number, its rendezvous, its wire to the
    supervisor, its parent, its progress board."""

    entry: Entry
    local_rank: int
    rendezvous: str
    interface: str
    wire: socket.socket
    server_pid: int
    board: int
    """Descriptor of the page where it writes how far it is."""
    memory: int
    """Descriptor of the file in memory that outlives it, for copies of its state."""


def live_as_rank(job: Job, place: RankPlacement, inherited: Iterable[socket.socket]) -> NoReturn:
    """Turn the freshly forked process into a rank, call the entry, report, and leave without unwinding the caller.

    `inherited` are open sockets of other processes. Leaves by os._exit: no atexit handler and no teardown of
    threads, which could make a finished rank fail.
    """
    code = 1
    try:
        code = _work(job, place, inherited)
        _flush()
    finally:
        os._exit(code)


def _take_signals(stop: StopFlag) -> None:
    """Ctrl-C and the end of the terminal reach every process of its group, but only the supervisor reacts to them."""
    # The fork server's, which is among the strangers. From Python 3.12 on asyncio, which torch imports, has reset it.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    stop.listen(signal.SIGTERM)
    # Blocked since before the fork server's exec: none is lost between the fork and this line.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _redirect(job: Job, rank: int) -> TextIO:
    """Rank 0 keeps the terminal; the others print into their log. Answers the stream for tracebacks."""
    if job.log_dir is None:
        return sys.stderr
    path = Path(job.log_dir) / f"rank-{rank}.log"
    try:
        log = append_to_file(path, buffering=1)
    except OSError as error:
        raise RunFailed(
            f"rank {rank} cannot write {path} ({error.strerror}); {disk_advice(error)}, then {RESUME_ADVICE}"
        ) from error
    if rank > 0:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return log


def _set_environment(job: Job, place: RankPlacement) -> None:
    os.environ.update(thread_environment(job.threads))
    os.environ.update(RANK=str(job.first_rank + place.local_rank), LOCAL_RANK=str(place.local_rank))
    os.environ.update(WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.ranks))
    facts = network_facts(place.interface, is_ipv6=place.rendezvous.startswith("tcp://["))
    for variable in network_variables(facts, spans_hosts=job.ranks < job.world_size):
        os.environ.setdefault(variable.name, variable.value)
    # Measured: a torch loaded before the fork keeps the thread count of the fork server's environment.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(job.threads)


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that OpenMP and MKL read when they are loaded."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**counts, "OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE"}


def _context(job: Job, place: RankPlacement, stop: StopFlag, progress: ProgressReport) -> RankContext:
    lock = threading.Lock()

    def channel(kind: str, values: Mapping[str, Any]) -> None:
        with lock:
            send_line(place.wire, {"message": kind, "values": values})

    return RankContext(
        rank=job.first_rank + place.local_rank,
        world_size=job.world_size,
        local_rank=place.local_rank,
        local_world_size=job.ranks,
        threads=job.threads,
        rendezvous=place.rendezvous,
        channel=channel,
        stop=stop.requested,
        progress=progress,
        memory=RankMemory(place.memory, place.local_rank),
    )


def _work(job: Job, place: RankPlacement, inherited: Iterable[socket.socket]) -> int:
    """Call the entry between the two marks that bound a rank's life; answers the exit code.

    Whatever fails on the way there is reported like a failure of the entry itself.
    """
    stop = StopFlag()
    progress = SlotWriter(place.board, place.local_rank)
    context, wire, log = _context(job, place, stop, progress), place.wire, sys.stderr
    try:
        die_with_parent(place.server_pid)
        log = _redirect(job, context.rank)
        keep_freed_memory()
        _take_signals(stop)
        for inherited_socket in inherited:
            inherited_socket.close()
        _set_environment(job, place)
        faulthandler.enable(log)
        faulthandler.register(STACK_SIGNAL, stack_writer(place.board), all_threads=True)
        progress.phase("its preparation")
        send_line(wire, {"started": os.getpid()})
        place.entry(context, job.argument)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # torch's CheckpointException, among others, is no Exception
        _report(describe_exception(error, context.rank), wire, log, at=job.log_dir)
        return 1
    send_line(wire, {"returned": True})
    return 0


def _report(failure: RankRaised, wire: socket.socket, log: TextIO, *, at: str | None) -> None:
    # Without a log the supervisor prints the root cause's traceback alone; ranks would print theirs on top of it.
    if at is not None and not failure.plait_classes:
        with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
            log.write(failure.traceback)
    with contextlib.suppress(OSError):
        send_line(wire, {"raised": asdict(failure)})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
