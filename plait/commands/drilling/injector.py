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
_SLOW_S, _STOPPED_S, _RUNNING_S = 2.0, 0.08, 0.02
"""A slow rank runs for a fifth of each tenth of a second, for two seconds: a hang takes five at a stretch."""
PLANTED = ".planted"
"""The folder in a run's, where its ranks look for bad numbers: see trainer/watching/planted.py."""
_SIGNALS: Mapping[FaultKind, signal.Signals] = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


class Injector:
    """A thread that carries out `faults`, in their order, in the run in `folder`; `done_at` has when each was, by its
    place in that order and the clock of the day.

    Bad numbers are planted in the folder beforehand: the rank itself finds them there, as nobody else reaches them.
    """

    def __init__(self, faults: Sequence[Fault], folder: Path) -> None:
        self.done_at: dict[int, float] = {}
        self.past_at: dict[int, float] = {}
        """When the run had reported a step after one that was only slow was itself again."""
        self._faults, self._folder = faults, folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry_out, name="drill", daemon=True)

    def __enter__(self) -> Injector:
        for number, fault in enumerate(self._faults):
            if fault.kind == "nan":
                self._planted(number, fault).parent.mkdir(parents=True, exist_ok=True)
                self._planted(number, fault).touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _carry_out(self) -> None:
        for number, fault in enumerate(self._faults):
            # Each waits until the run is back at work after the one before it.
            before = 2 * sum(one.restarts for one in self._faults[:number])
            while lines_in(self._folder / "incidents.jsonl") < before or self._newest_step() < _awaited_step(fault):
                if self._ended.wait(_LOOK_S):
                    return
            if fault.kind == "nan":
                self._await_planted(number, fault)
            elif (pid := self._rank_of(fault)) is not None:
                with suppress(ProcessLookupError):
                    self._signal(number, fault, pid)

    def _rank_of(self, fault: Fault) -> int | None:
        """The process of the fault's rank, when the fault's moment has come."""
        self._ended.wait(fault.after_s)
        pid = rank_process(self._folder, fault.rank)
        while pid is None and not self._ended.wait(_LOOK_S):
            pid = rank_process(self._folder, fault.rank)
        return pid

    def _signal(self, number: int, fault: Fault, pid: int) -> None:
        if fault.kind != "slow":
            os.kill(pid, _SIGNALS[fault.kind])
            self.done_at[number] = time.time()
            return
        self.done_at[number], until_s = time.time(), time.monotonic() + _SLOW_S
        while time.monotonic() < until_s and not self._ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            self._ended.wait(_STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            self._ended.wait(_RUNNING_S)
        step = self._newest_step()
        while self._newest_step() <= step and not self._ended.wait(_LOOK_S):
            pass
        self.past_at[number] = time.time()

    def _await_planted(self, number: int, fault: Fault) -> None:
        while self._planted(number, fault).exists():
            if self._ended.wait(_LOOK_S):
                return
        self.done_at[number] = time.time()

    def _planted(self, number: int, fault: Fault) -> Path:
        return self._folder / PLANTED / f"{fault.kind}-{fault.rank}@{fault.step}.{number:03d}"

    def _newest_step(self) -> int:
        return lines_in(self._folder / "metrics.jsonl", having=b'"loss"')


def _awaited_step(fault: Fault) -> int:
    """The step after whose report a fault comes; bad numbers come before their step."""
    return fault.step - 1 if fault.kind == "nan" else fault.step


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
