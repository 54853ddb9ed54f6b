"""Carries out faults from outside of a run: finds its ranks, waits for the moment, and sends signals."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.store import published_checkpoints
from plait.commands.drilling.damage import damage_checkpoint, full_disk, limits_below_parts
from plait.commands.drilling.faults import FAULT_FOLDER, WRITING, Fault, FaultKind, carried_out, nan_file
from plait.commands.drilling.outcome import Carried, what_followed
from plait.commands.drilling.running_ranks import RunningRanks
from plait.errors import PlaitError
from plait.private_folder import make_private_folder
from plait.report.incidents import read_incidents

_LOOK_S, _LOOK_AT_SAVES_S, _LOOK_CLOSELY_S = 0.005, 0.001, 0.0002
_WRITING_S = 0.02
"""What writing a checkpoint takes at least."""
_SLOW_S, _STOPPED_S, _RUNNING_S = 2.0, 0.08, 0.02
"""A slow rank runs for a fifth of each tenth of a second, for two seconds: a hang takes five at a stretch."""
_PLANTED_AHEAD = 3
_FAILED_SAVE = "warning  could not save"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrilledRun:
    """A run as the injector sees it; `first_rank` has the first rank of each host, and `lose_host` kills all of a
    host."""

    folder: Path
    ranks: RunningRanks
    steps: int
    first_rank: Sequence[int] = (0,)
    lose_host: Callable[[int], None] = lambda host: None


class _Over(Exception):
    """The run has ended."""


class Injector:
    """A thread that carries out `faults`, in their order, while the block lasts; each waits until the run is back at
    work after the one before it. `carried` has what became of each, by its place in that order."""

    def __init__(self, faults: Sequence[Fault], run: DrilledRun) -> None:
        self.carried: dict[int, Carried] = {}
        self._faults, self._run = faults, run
        self._ended, self._save_failed = threading.Event(), threading.Event()
        self._began_s = float("inf")
        self._nan_steps = {fault.step for fault in faults if fault.kind == "nan"}
        self._thread = threading.Thread(target=self._carry_out, name="drill", daemon=True)

    def __enter__(self) -> Injector:
        if any(fault.kind == "nan" for fault in self._faults):
            make_private_folder(self._run.folder / FAULT_FOLDER)
        for number, fault in enumerate(self._faults):
            if fault.kind == "nan" and fault.at_s is None:
                self._planted(number, fault.rank, fault.step).touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._run.ranks.close()

    def heard(self, note: str) -> None:
        """Take note of what the run has said."""
        if note.startswith(_FAILED_SAVE):
            self._save_failed.set()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return not self._thread.is_alive()

    def _carry_out(self) -> None:
        acts: dict[FaultKind, Callable[[int, Fault], Carried]] = {
            "kill": self._signal,
            "hang": self._signal,
            "nan": self._spoil,
            "slow": self._slow_down,
            "fill-disk": self._fill_disk,
            "corrupt": self._corrupt,
            "lose-host": self._lose_host,
        }
        with suppress(_Over):
            for number, fault in enumerate(self._faults):
                self._await_step(fault)
                self.carried[number] = carried = acts[fault.kind](number, fault)
                if fault.restarts and fault.kind != "lose-host":
                    self._await(lambda at=carried.at: self._is_back(at), _LOOK_S)

    # When.

    def _await_step(self, fault: Fault) -> None:
        rank = self._watched(fault)
        at_s = fault.at_s
        if at_s is None:
            # Bad numbers were planted for a step of their own, which their rank finds.
            step = 0 if fault.kind == "nan" else fault.step
            self._await(lambda: self._step(rank) > step, _LOOK_S)
            return
        self._await(lambda: self._step(rank) > 0, _LOOK_S)
        self._began_s = min(self._began_s, time.monotonic())
        self._await(lambda: time.monotonic() - self._began_s >= at_s, _LOOK_S)
        self._await(lambda: self._step(rank) > 0, _LOOK_S)

    def _await_phase(self, fault: Fault) -> tuple[int, str]:
        """Wait for the fault's moment within the step, and return the process that is hit and where it is."""
        rank, phase = self._watched(fault), fault.phase
        if phase == WRITING:
            self._await(lambda: self._is_writing() or self._is_near_end(rank), _LOOK_AT_SAVES_S)
            self._ended.wait(fault.fraction * _WRITING_S)
        elif phase:
            self._await(lambda: self._phase(rank) == phase or self._is_near_end(rank), _LOOK_CLOSELY_S)
            seen = self._run.ranks.published(rank)
            self._ended.wait(fault.fraction * (seen.longest_s if seen else 0.0))
        self._await(lambda: self._run.ranks.pid(rank) is not None, _LOOK_S)
        pid, where = self._run.ranks.pid(rank), WRITING if self._is_writing() else self._phase(rank)
        if pid is None:
            return self._await_phase(fault)
        return pid, where

    # What.

    def _signal(self, number: int, fault: Fault) -> Carried:
        while True:
            pid, where = self._await_phase(fault)
            step = self._step(fault.rank)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
                return self._done(fault, phase=where, step=step)

    def _spoil(self, number: int, fault: Fault) -> Carried:
        step = fault.step
        if fault.at_s is not None:
            step = self._step(fault.rank) + _PLANTED_AHEAD
            while step in self._nan_steps:  # a second time at a step its samples would be skipped
                step += 1
            self._nan_steps.add(step)
            self._planted(number, fault.rank, step).touch()
        planted = self._planted(number, fault.rank, step)
        done = carried_out(planted)
        self._await(done.exists, _LOOK_S)
        return Carried(at=done.stat().st_ctime, step=step)  # its rank may have done it long ago

    def _slow_down(self, number: int, fault: Fault) -> Carried:
        pid, where = self._await_phase(fault)
        carried, until_s = self._done(fault, phase=where, step=self._step(fault.rank)), time.monotonic() + _SLOW_S
        with suppress(ProcessLookupError):
            while time.monotonic() < until_s and not self._ended.is_set():
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait(_STOPPED_S)
                os.kill(pid, signal.SIGCONT)
                self._ended.wait(_RUNNING_S)
        step = self._step(fault.rank)
        self._await(lambda: self._step(fault.rank) > step or self._is_near_end(fault.rank), _LOOK_S)
        return carried.back(time.time())

    def _fill_disk(self, number: int, fault: Fault) -> Carried:
        folder = self._run.folder / "checkpoints"
        self._await(lambda: bool(published_checkpoints(folder)), _LOOK_S)
        newest = published_checkpoints(folder)[-1]
        limits = limits_below_parts(self._run.ranks.of_host(0), self._run.folder, newest)
        if not limits:
            return self._done(fault).failed("the run's logs are larger than a checkpoint's files")
        self._save_failed.clear()
        carried = self._done(fault, step=self._step(0))
        with full_disk(limits):
            # At the end the save must go well: there the disk is given back in any case.
            self._await(lambda: self._save_failed.is_set() or self._is_near_end(0), _LOOK_AT_SAVES_S)
        if not self._save_failed.is_set():
            return carried.failed("no save came before the run's end")
        carried = carried.found(time.time())
        self._await(lambda: published_checkpoints(folder)[-1:] not in ((), (newest,)), _LOOK_AT_SAVES_S)
        return carried.back(time.time())

    def _corrupt(self, number: int, fault: Fault) -> Carried:
        """Damage the newest of two checkpoints at least, and kill rank 0, so that somebody reads it."""
        folder = self._run.folder / "checkpoints"
        self._await(lambda: len(published_checkpoints(folder)) > 1, _LOOK_S)
        while True:
            pid, where = self._await_phase(fault)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # so that no newer one is published meanwhile
                found = published_checkpoints(folder)
                what = damage_checkpoint(found[-1], random.Random(fault.dice)) if len(found) > 1 else ""
                step = self._step(0)
                os.kill(pid, signal.SIGKILL)
                return self._done(fault, phase=where, step=step, what=what)

    def _lose_host(self, number: int, fault: Fault) -> Carried:
        _, where = self._await_phase(fault)
        before = self._run.ranks.pid(0)
        step = self._step(self._watched(fault))
        self._run.lose_host(fault.rank)
        self.carried[number] = carried = self._done(fault, phase=where, step=step)
        self._await(lambda: self._run.ranks.pid(0) not in (None, before) and self._step(0) > 0, _LOOK_S)
        first = self._step(0)
        self._await(lambda: self._step(0) > first, _LOOK_S)
        return carried.back(time.time())

    # What is seen of the run.

    def _done(self, fault: Fault, *, phase: str = "", step: int = 0, what: str = "") -> Carried:
        done_step = fault.step if fault.at_s is None else max(0, step - 1)
        return Carried(at=time.time(), step=done_step, phase=phase, what=what)

    def _watched(self, fault: Fault) -> int:
        """The rank whose progress decides when a fault comes."""
        return self._run.first_rank[fault.rank] if fault.kind == "lose-host" else fault.rank

    def _step(self, rank: int) -> int:
        """The step that a rank is in; 0 while it has not begun any."""
        seen = self._run.ranks.published(rank)
        return seen.step if seen else 0

    def _phase(self, rank: int) -> str:
        seen = self._run.ranks.published(rank)
        return seen.phase if seen else ""

    def _is_near_end(self, rank: int) -> bool:
        return self._step(rank) >= self._run.steps - 1

    def _is_writing(self) -> bool:
        return any((self._run.folder / "checkpoints").glob(".step-*.staging"))

    def _is_back(self, at: float) -> bool:
        try:
            followed = what_followed(at, *read_incidents(self._run.folder / "incidents.jsonl"))
        except (OSError, PlaitError):  # a line that is being written
            return False
        return followed is not None and followed.back_after_s is not None

    def _planted(self, number: int, rank: int, step: int) -> Path:
        return nan_file(self._run.folder / FAULT_FOLDER, rank, step, number)

    def _await(self, fact: Callable[[], bool], look_s: float) -> None:
        while not fact():
            if self._ended.wait(look_s):
                raise _Over
