"""The process that has imported torch once and forks ranks in milliseconds: `python -m plait.launch.local.forkserver`.

It is single-threaded, serves one supervisor over one socket, and dies with it. See README.md for the protocol.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.checked_json import typed_value
from plait.launch.local.channel import LineReader, send_line
from plait.launch.local.guard import adopt_orphans, die_with_parent, end_children, thread_count
from plait.launch.local.rank import RankPlacement, live_as_rank
from plait.launch.local.store_process import StoreOutput, live_as_store
from plait.launch.values.entries import Entry, EntryTable
from plait.launch.values.failure import describe_exception
from plait.launch.values.job import RANKS_AT_MOST, Job


def main(configuration: Mapping[str, Any]) -> None:
    """Serve until the supervisor closes the socket; `configuration` is what `plait.launch.local.run` wrote as
    argument."""
    die_with_parent(configuration["supervisor_pid"])
    adopt_orphans()
    _restore_python_path(configuration["python_path"])
    control = socket.socket(fileno=configuration["control"])
    control.set_inheritable(False)
    entries = EntryTable(**configuration["entries"])
    server = _ForkServer(control, entries)
    _forget_working_folder(entries.packages)
    server.serve()
    os._exit(0)  # tearing torch down takes longer than anyone should wait


class _ForkServer:
    def __init__(self, control: socket.socket, entries: EntryTable) -> None:
        self._control = control
        self._entries = entries
        self._requests = LineReader(control, sender="the supervisor", descriptors_at_most=RANKS_AT_MOST + 3)
        self._ranks: dict[int, int] = {}
        self._store: StoreOutput | None = None
        self._selector = selectors.DefaultSelector()
        self._child_ended, self._wakeup = _wake_on_child_end()
        self._preload = list(entries.preload)

    def serve(self) -> None:
        """Carry out requests and report ended processes until the supervisor is gone; then kill all that is left.

        Modules are imported ahead, in their order, while no ranks run: their imports would slow down a job that
        measures.
        """
        with self._selector, contextlib.suppress(BrokenPipeError):
            self._selector.register(self._control, selectors.EVENT_READ)
            self._selector.register(self._child_ended, selectors.EVENT_READ)
            while not self._requests.ended:
                is_idle = bool(self._preload) and not self._ranks
                if is_idle and not self._selector.select(timeout=0):
                    self._import_next()
                    continue
                self._selector.select()
                if self._store is not None:
                    self._store.read()
                for request in self._requests.read():
                    self._handle_request(request)
                self._reap()
        end_children()

    def _import_until(self, module: str) -> None:
        """Import what comes before a job's own module and that one too; the job need not wait for the rest."""
        while self._preload and (module in self._preload or module not in self._entries.preload):
            self._import_next()

    def _import_next(self) -> None:
        """Only a head start: a module that cannot be imported is reported by the job that needs it."""
        gc.disable()  # nothing of what is imported goes again, and looking for it takes a fifth of the imports' time
        try:
            importlib.import_module(self._preload.pop(0))
        except Exception:
            self._preload.clear()
        finally:
            gc.enable()

    def _handle_request(self, request: Mapping[str, Any]) -> None:
        if "run" in request:
            self._run(request)
        elif "signal" in request:
            for pid in self._ranks:
                # No race with a reused pid: a process that was not reaped keeps its pid.
                os.kill(pid, signal.Signals[request["signal"]])

    def _run(self, request: Mapping[str, Any]) -> None:
        job = typed_value(Job, request["run"])
        *wires, board, memory = self._requests.descriptors
        sockets = [socket.socket(fileno=descriptor) for descriptor in wires]
        self._requests.descriptors.clear()
        try:
            self._import_until(self._entries.module_of(job.entry))
            entry = self._entries.load(job.entry, job.needs)
            _ready_to_fork()
            for local_rank in range(job.ranks):
                pid = self._fork(job, entry, local_rank, sockets, {**request, "board": board, "memory": memory})
                self._ranks[pid] = job.first_rank + local_rank
            if len(sockets) > job.ranks:
                self._fork_store(sockets[-1], sockets[:-1])
        except Exception as error:
            end_children()
            self._ranks.clear()
            self._end_store()
            send_line(self._control, {"raised": asdict(describe_exception(error, None))})
            send_line(self._control, {"over": True})
        else:
            # The wires first: from this word on the end of a rank's wire means the end of the rank.
            _close(sockets)
            send_line(self._control, {"forked": True})
        finally:
            _close(sockets)
            os.close(board)
            os.close(memory)

    def _fork(
        self, job: Job, entry: Entry, local_rank: int, sockets: Sequence[socket.socket], request: Mapping[str, Any]
    ) -> int:
        """`sockets`: a wire for each rank here, then, for a job over several hosts, what its store listens on."""
        server_pid, wire = os.getpid(), sockets[local_rank]
        pid = os.fork()
        if pid == 0:
            place = RankPlacement(
                entry=entry,
                local_rank=local_rank,
                rendezvous=request["rendezvous"],
                interface=request["interface"],
                wire=wire,
                server_pid=server_pid,
                board=request["board"],
                memory=request["memory"],
            )
            live_as_rank(job, place, {*self._own_sockets(), *sockets} - {wire})
        return pid

    def _fork_store(self, listener: socket.socket, wires: Sequence[socket.socket]) -> None:
        """After the ranks, which then have no end of its pipe; the listener keeps those waiting that are quick."""
        self._store, server_pid = StoreOutput(), os.getpid()
        self._selector.register(self._store, selectors.EVENT_READ)
        if os.fork() == 0:
            live_as_store(listener, self._store.writing, server_pid, [*self._own_sockets(), *wires])

    def _end_store(self) -> None:
        """Report how many strangers came to the store; its process is gone."""
        if self._store is None:
            return
        self._store.read()
        if self._store.strangers:
            send_line(self._control, {"strangers": self._store.strangers})
        self._selector.unregister(self._store)
        self._store.close()
        self._store = None

    def _own_sockets(self) -> tuple[socket.socket, ...]:
        return self._control, self._child_ended, self._wakeup

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._child_ended.recv(4096)
        if not self._ranks:
            return
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._note_end(*ended)
        if not self._ranks:
            end_children()
            self._end_store()
            send_line(self._control, {"over": True})

    def _note_end(self, pid: int, status: int) -> None:
        rank = self._ranks.pop(pid, None)
        if rank is not None:  # else an orphan of a rank
            code = os.waitstatus_to_exitcode(status)
            send_line(self._control, {"died": rank, "code": code, "at_s": time.monotonic()})


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _ready_to_fork() -> None:
    threads = thread_count()
    if threads != 1:
        raise RuntimeError(
            f"the fork server has {threads} threads after its imports, and a fork would copy locks that they hold"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # What has been imported stays: out of the collector's sight its pages remain shared between the ranks.
    gc.collect()
    gc.freeze()


def _wake_on_child_end() -> tuple[socket.socket, socket.socket]:
    """A socket that becomes readable when a child ends, and the one that Python's signal handler writes to.

    SIGINT, SIGTERM and SIGHUP arrive blocked and stay so.
    """
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)
    return readable, writable


def _restore_python_path(original: str | None) -> None:
    """The supervisor passed its sys.path by PYTHONPATH; programs that ranks start must not inherit that."""
    os.environ.pop("PYTHONPATH", None)
    if original is not None:
        os.environ["PYTHONPATH"] = original


def _forget_working_folder(packages: Sequence[str]) -> None:
    """Take the working folder, and the folders of runs in it, off the path of modules: what lies there was written by
    a run, or sent by another host, and no rank may import it.

    `packages` are imported before, so that plait itself is found where its checkout is the working folder.
    """
    for package in packages:
        with contextlib.suppress(Exception):  # the job that needs it reports it
            importlib.import_module(package)
    working = Path.cwd().resolve()
    written = (working / "runs", working / ".plait")
    paths = {entry: Path(entry).resolve() for entry in sys.path}
    sys.path[:] = [
        entry
        for entry, path in paths.items()
        if path != working and not any(path.is_relative_to(folder) for folder in written)
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
