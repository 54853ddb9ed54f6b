"""Run jobs on this machine: `run_job` for one, `ForkServer` for several after one another."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from plait.errors import PlaitError
from plait.launch.in_memory.memory import AgentMemory
from plait.launch.local.server import ServerProcess
from plait.launch.local.signals import collected_signals
from plait.launch.local.site import LocalWorkerHost
from plait.launch.local.supervise import Supervision
from plait.launch.values.copies import CopiesByStep, CopyPart, ReadableCopy
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import RANKS_AT_MOST, Job, JobResult, Message
from plait.launch.values.phase import PhaseTimeouts
from plait.launch.watching.board import ProgressBoard


def run_job(
    job: Job,
    entries: EntryTable,
    *,
    on_message: Callable[[Message], None],
    grace_s: float = 120,
    start_s: float = 120,
) -> JobResult:
    """Start the ranks of one job and block until all have ended; the timeouts and errors are `ForkServer.run`'s."""
    with ForkServer(entries, threads=job.threads) as server:
        return server.run(job, on_message=on_message, grace_s=grace_s, start_s=start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a job over several hosts find each other, and the interface that their traffic takes here.

    `listener`, on rank 0's host, is the bound and listening socket of the rendezvous; starting the job uses it up.
    """

    rendezvous: str
    interface: str
    listener: socket.socket | None = None


class ForkServer:
    """A process that has imported what `entries` preloads, and starts the ranks of job after job within milliseconds.

    The thread that enters the block must outlive it: the kernel ties the server's life to that thread. `threads` is
    what OpenMP reads when the server loads it; each job's own count replaces it in the ranks. `working_folder` is the
    current folder of the ranks: this process's own if left out. `starts` "with a job": where nothing is imported ahead,
    nothing is gained by starting before there is one.
    """

    def __init__(
        self,
        entries: EntryTable,
        *,
        threads: int = 1,
        working_folder: Path | None = None,
        starts: Literal["at once", "with a job"] = "at once",
    ) -> None:
        self._entries = entries
        self._starts = starts
        self._is_entered = False
        self._threads = threads
        self._working_folder = working_folder
        self._process: ServerProcess | None = None
        self._memory: AgentMemory | None = None

    def __enter__(self) -> ForkServer:
        self._is_entered = True
        self._process = self._new_process() if self._starts == "at once" else None
        self._memory = AgentMemory()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_entered = False
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @property
    def pid(self) -> int:
        return self._entered().pid

    def run(
        self, job: Job, *, on_message: Callable[[Message], None], grace_s: float = 120, start_s: float = 120
    ) -> JobResult:
        """Start the job's ranks, pass their messages to `on_message`, and block until all have ended.

        The first SIGINT, SIGTERM or SIGHUP makes the ranks save and return within `grace_s`, or kills them where the
        job's `at_stop` says so; a second SIGINT or SIGTERM kills them, unless it repeats the first within a second.
        Raises RunFailed when a rank dies, is not running after `start_s`, or is killed here; raises the PlaitError that
        a rank raised. If `on_message` raises, the ranks are killed.
        """
        began_s = time.monotonic()
        with collected_signals() as signals, self.start(job) as site:
            stopped_by = Supervision([site], signals, on_message, PhaseTimeouts(start_s=start_s, grace_s=grace_s)).run()
        return JobResult(stopped_by=stopped_by, wall_s=time.monotonic() - began_s)

    def whole_steps(self, ranks: int, lineage: int) -> Sequence[int]:
        """The steps of which this host's ranks of the jobs so far, this many, have left whole copies of their state
        here, the newest first; see `in_memory/`. From any thread."""
        return self._memory.whole_steps(ranks, lineage) if self._memory is not None else ()

    def copies(self, ranks: range, lineage: int) -> CopiesByStep:
        """The whole copies of this host's `ranks`, of each step of which all of them have one. From any thread."""

        def readable(place: int, step: int) -> ReadableCopy:
            def read(what: CopyPart, offset: int, nbytes: int) -> tuple[int, bytes]:
                found = self.kept(place, step, lineage, what, offset, nbytes)
                if found is None:
                    raise PlaitError(f"the copy of step {step} of rank {ranks[place]} is no longer in memory")
                return found

            return ReadableCopy(rank=ranks[place], read=read)

        steps = self.whole_steps(len(ranks), lineage)
        return {step: [readable(place, step) for place in range(len(ranks))] for step in steps}

    def kept(
        self, local_rank: int, step: int, lineage: int | None, what: CopyPart, offset: int, nbytes: int
    ) -> tuple[int, bytes] | None:
        """As in AgentMemory. From any thread."""
        memory = self._memory
        return None if memory is None else memory.kept(local_rank, step, lineage, what, offset, nbytes)

    @contextlib.contextmanager
    def start(self, job: Job, meeting: Rendezvous | None = None) -> Iterator[LocalWorkerHost]:
        """Start this machine's ranks of a job, for a caller that supervises them until they end: see
        `LocalWorkerHost`. Without a `meeting` all ranks are here, and rendezvous in a private file. Raises PlaitError
        for a job that cannot be, or whose entry is not in the table."""
        self._entries.require(job.entry)
        if not 1 <= job.ranks <= RANKS_AT_MOST:
            raise PlaitError(
                f"{job.ranks} workers cannot be started on one machine; choose 1 to {RANKS_AT_MOST} workers"
            )
        process = self._usable_process()
        with (
            # A folder that only this user can enter: whoever can write the rendezvous file can join the job.
            tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as directory,
            _wires(job.ranks) as (ours, theirs),
            contextlib.closing(ProgressBoard(job.ranks)) as board,
        ):
            here = meeting or Rendezvous(rendezvous=f"{directory}/rendezvous", interface="lo")
            request = {"run": asdict(job), "rendezvous": here.rendezvous, "interface": here.interface}
            listeners = [here.listener] if here.listener is not None else []
            shared = board.descriptor, self._kept().descriptor
            process.request(request, [*(each.fileno() for each in (*theirs, *listeners)), *shared])
            for each in (*theirs, *listeners):
                each.close()
            with contextlib.closing(LocalWorkerHost(job, process, ours, board)) as site:
                yield site

    def _usable_process(self) -> ServerProcess:
        """The server; a new one where there is none yet, or it was lost in an earlier job."""
        if not self._is_entered or (self._process is not None and self._process.is_usable):
            return self._entered()
        if self._process is not None:
            self._process.close()
        self._process = self._new_process()
        return self._process

    def _new_process(self) -> ServerProcess:
        return ServerProcess(entries=self._entries, threads=self._threads, working_folder=self._working_folder)

    def _kept(self) -> AgentMemory:
        if self._memory is None:
            raise RuntimeError("a ForkServer serves only within its with block")
        return self._memory

    def _entered(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("a ForkServer serves only within its with block")
        return self._process


@contextlib.contextmanager
def _wires(count: int) -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """A socket pair for each rank: our ends and theirs."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        for ours, theirs in pairs:
            stack.enter_context(ours)
            stack.enter_context(theirs)
        yield [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
