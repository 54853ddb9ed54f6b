"""The supervisor's handle on its fork server: start it, write to it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.launch.local.channel import LineReader, send_line
from plait.launch.local.guard import require_linux
from plait.launch.local.rank import thread_environment
from plait.launch.local.signals import STOP_SIGNALS
from plait.launch.values.entries import EntryTable
from plait.launch.values.failure import FailureFacts, WorkersFailed, signal_name

_SEND_S = 60
_CLOSE_S = 5


class ServerProcess:
    """A running `plait.launch.local.forkserver` and the socket to it; close() ends it and all that it started."""

    def __init__(self, *, entries: EntryTable, threads: int, working_folder: Path | None) -> None:
        require_linux()
        ours, theirs = socket.socketpair()
        # Bounds a request to a server that has stopped reading; what it tells is read without blocking anyway.
        ours.settimeout(_SEND_S)
        self._control = ours
        self._killed = False
        self.answers = LineReader(ours, sender="the fork server")
        with theirs:
            self._process = _start(theirs, entries, threads, working_folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, value: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one request; raises WorkersFailed when the server is gone or does not read."""
        try:
            send_line(self._control, value, descriptors)
        except OSError:
            raise WorkersFailed(self.exit_description(), FailureFacts(cause="no answer")) from None

    def exit_description(self) -> str:
        """How the server ended, for a person."""
        try:
            code = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            return "the process that starts the workers does not answer"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"the process that starts the workers {how}"

    @property
    def is_usable(self) -> bool:
        """Whether it can be sent a job: it was neither killed here nor did it end."""
        return not self._killed and self._process.poll() is None

    def kill(self) -> None:
        """Kill the server at once and, through the kernel, its ranks."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """End the server and wait until it is gone; between jobs it has nothing to clean up. May be called twice."""
        self._control.close()
        self.kill()
        self._process.wait(_CLOSE_S)


def _start(
    control: socket.socket, entries: EntryTable, threads: int, working_folder: Path | None
) -> subprocess.Popen[bytes]:
    configuration = {
        "control": control.fileno(),
        "supervisor_pid": os.getpid(),
        "entries": asdict(entries),
        "python_path": os.environ.get("PYTHONPATH"),
    }
    # -P with our own sys.path: the server finds the modules that we find, and then forgets the current folder.
    command = [sys.executable, "-P", "-m", "plait.launch.local.forkserver", json.dumps(configuration)]
    with _stop_signals_blocked():
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[control.fileno()],
            env=_environment(threads),
            cwd=working_folder,
        )


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)  # the server may have another folder
    # OpenBLAS, which comes with numpy, starts its threads when it is loaded: before the fork.
    single = {"OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **thread_environment(threads), **single, "PYTHONPATH": path}


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """A child inherits the mask: until the ranks' own handlers stand, no signal can end or reach it halfway."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
