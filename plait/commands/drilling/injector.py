"""Carries out faults from outside of a run that trains on this machine: finds its ranks, waits, sends signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plait.commands.drilling.faults import Fault, FaultKind

_LOOK_S = 0.01
_SIGNALS: Mapping[FaultKind, signal.Signals] = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


class Injector:
    """A thread that carries out `faults`, in their order, in the run in `folder`; `done_at` has when each was, by the
    clock of the day."""

    def __init__(self, faults: Sequence[Fault], folder: Path) -> None:
        self.done_at: dict[Fault, float] = {}
        self._faults, self._folder = faults, folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry_out, name="drill", daemon=True)

    def __enter__(self) -> Injector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _carry_out(self) -> None:
        for number, fault in enumerate(self._faults):
            # Each waits until the run is back at work after the one before it.
            while lines_in(self._folder / "incidents.jsonl") < 2 * number or self._newest_step() < fault.step:
                if self._ended.wait(_LOOK_S):
                    return
            self._ended.wait(fault.after_s)
            pid = rank_process(self._folder, fault.rank)
            while pid is None and not self._ended.wait(_LOOK_S):
                pid = rank_process(self._folder, fault.rank)
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, _SIGNALS[fault.kind])
                    self.done_at[fault] = time.time()

    def _newest_step(self) -> int:
        return lines_in(self._folder / "metrics.jsonl", having=b'"loss"')


def lines_in(path: Path, having: bytes = b"") -> int:
    """Whole lines of a file that contain something; 0 where there is no file."""
    with suppress(OSError):
        return sum(having in line for line in path.read_bytes().split(b"\n")[:-1])
    return 0


def rank_process(folder: Path, rank: int) -> int | None:
    """The process that writes the log of a rank of a run, among those that this process started; None where there is
    none."""
    log = str((folder / "logs" / f"rank-{rank}.log").resolve())
    return next((pid for pid in descendants(os.getpid()) if log in _open_files(pid)), None)


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these did."""
    own: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            own += [int(child) for child in (task / "children").read_text().split()]
    return [*own, *(below for child in own for below in descendants(child))]


def _open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(str(link.readlink()))
    return found
