"""Carries out faults from outside of a run: finds its ranks, waits for the moment, sends signals, damages files."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from plait.checkpoint.store import published_checkpoints
from plait.commands.drilling.faults import (
    FAILED_SAVE,
    FAULT_FOLDER,
    FULL_DISK,
    WRITING,
    Fault,
    FaultKind,
    carried_out,
    nan_file,
)
from plait.commands.drilling.report import InjectedFault, outcome_of
from plait.commands.drilling.running_ranks import RunningRanks
from plait.errors import PlaitError
from plait.private_folder import make_private_folder
from plait.report.incidents import read_incidents

_LOOK_S, _LOOK_AT_SAVES_S, _LOOK_CLOSELY_S = 0.005, 0.001, 0.0002
_WRITING_S = 0.02
"""What writing a checkpoint takes at least."""
_SLOW_S, _STOPPED_S, _RUNNING_S = 2.0, 0.08, 0.02
"""A slow rank runs for a fifth of each tenth of a second, for two seconds: a hang takes five at a stretch."""
_NAN_AHEAD_STEPS = 3
_CUT_BYTES = 4096


LoseHost = Callable[[int], None]


class _Over(Exception):
    """The run has ended."""


class Injector:
    """A thread that carries out `faults`, in their order, while the block lasts; each waits until the run is back at
    work after the one before it, but not until a full disk has room again. `injected` has what was done, by the fault's
    place in that order.

    The run has these `steps` and its files in `folder`; `lose_host` kills all processes of a host.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        ranks: RunningRanks,
        *,
        folder: Path,
        steps: int,
        lose_host: LoseHost = lambda host: None,
    ) -> None:
        self.injected: dict[int, InjectedFault] = {}
        self._faults, self._ranks, self._steps, self._lose_all_of = faults, ranks, steps, lose_host
        self._folder, self._messages, self._checkpoints = folder, folder / FAULT_FOLDER, folder / "checkpoints"
        self._ended = threading.Event()
        self._began_s = float("inf")
        self._nan_steps = {fault.step for fault in faults if fault.kind == "nan"}
        self._full_disk, self._failed_save = self._messages / FULL_DISK, self._messages / FAILED_SAVE
        self._thread = threading.Thread(target=self._carry_out, name="drill", daemon=True)
        self._disks: list[threading.Thread] = []

    def __enter__(self) -> Injector:
        if any(fault.kind in ("nan", "fill-disk") for fault in self._faults):
            make_private_folder(self._messages)
        for number, fault in enumerate(self._faults):
            if fault.kind == "nan" and fault.at_s is None:
                nan_file(self._messages, fault.rank, fault.step, number).touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in (self._thread, *self._disks):
            thread.join()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _carry_out(self) -> None:
        acts: dict[FaultKind, Callable[[int, Fault], InjectedFault]] = {
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
                self.injected[number] = injected = acts[fault.kind](number, fault)
                if fault.kind == "fill-disk":
                    self._disks.append(threading.Thread(target=self._give_disk_back, args=(number,), daemon=True))
                    self._disks[-1].start()
                elif fault.restarts and fault.kind != "lose-host":
                    self._await(lambda fault=fault, injected=injected: self._is_back(fault, injected), _LOOK_S)

    # When.

    def _await_step(self, fault: Fault) -> None:
        rank = self._watched(fault)
        at_s = fault.at_s
        if at_s is None:
            # The rank itself finds the step at which its numbers are to be bad.
            step = 0 if fault.kind == "nan" else fault.step
            self._await(lambda: self._step(rank) > step, _LOOK_S)
            return
        self._await(lambda: self._step(rank) > 0, _LOOK_S)
        self._began_s = min(self._began_s, time.monotonic())
        self._await(lambda: time.monotonic() - self._began_s >= at_s, _LOOK_S)
        self._await(lambda: self._step(rank) > 0, _LOOK_S)

    def _await_phase(self, fault: Fault) -> tuple[int, str]:
        """Wait for the fault's moment within the step; returns the process to hit, and the phase that it is in."""
        rank, phase = self._watched(fault), fault.phase
        if phase == WRITING:
            self._await(lambda: self._is_writing() or self._is_near_end(rank), _LOOK_AT_SAVES_S)
            self._ended.wait(fault.fraction * _WRITING_S)
        elif phase:
            self._await(lambda: self._phase(rank) == phase or self._is_near_end(rank), _LOOK_CLOSELY_S)
            seen = self._ranks.published(rank)
            self._ended.wait(fault.fraction * (seen.longest_s if seen else 0.0))
        self._await(lambda: self._ranks.pid(rank) is not None, _LOOK_S)
        pid, where = self._ranks.pid(rank), WRITING if self._is_writing() else self._phase(rank)
        if pid is None:
            return self._await_phase(fault)
        return pid, where

    # What.

    def _signal(self, number: int, fault: Fault) -> InjectedFault:
        while True:
            pid, where = self._await_phase(fault)
            step = self._step(fault.rank)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
                return _injected(fault, phase=where, step=step)

    def _spoil(self, number: int, fault: Fault) -> InjectedFault:
        step = fault.step
        if fault.at_s is not None:
            step = self._step(fault.rank) + _NAN_AHEAD_STEPS
            while step in self._nan_steps:  # a second time at a step its samples would be skipped
                step += 1
            self._nan_steps.add(step)
            nan_file(self._messages, fault.rank, step, number).touch()
        done = carried_out(nan_file(self._messages, fault.rank, step, number))
        self._await(done.exists, _LOOK_S)
        return InjectedFault(at=done.stat().st_ctime, step=step)  # its rank may have done it long ago

    def _slow_down(self, number: int, fault: Fault) -> InjectedFault:
        pid, where = self._await_phase(fault)
        injected, until_s = _injected(fault, phase=where, step=self._step(fault.rank)), time.monotonic() + _SLOW_S
        with suppress(ProcessLookupError):
            while time.monotonic() < until_s and not self._ended.is_set():
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait(_STOPPED_S)
                os.kill(pid, signal.SIGCONT)
                self._ended.wait(_RUNNING_S)
        step = self._step(fault.rank)
        self._await(lambda: self._step(fault.rank) > step or self._is_near_end(fault.rank), _LOOK_S)
        return replace(injected, back_at=time.time())

    def _fill_disk(self, number: int, fault: Fault) -> InjectedFault:
        """From now on no checkpoint finds room; `_give_disk_back` ends that."""
        self._await(lambda: bool(published_checkpoints(self._checkpoints)) and not self._full_disk.exists(), _LOOK_S)
        self._failed_save.unlink(missing_ok=True)
        self._full_disk.touch()
        return _injected(fault, step=self._step(0))

    def _give_disk_back(self, number: int) -> None:
        """Wait until a save has failed for want of room and a later one has gone well, while other faults come."""
        injected = self.injected[number]
        with suppress(_Over):
            try:
                # At the end the save must go well: there the disk is given back in any case.
                self._await(lambda: self._failed_save.exists() or self._is_near_end(0), _LOOK_AT_SAVES_S)
                # Only now: a save that found room before the fault may have been published since.
                before = published_checkpoints(self._checkpoints)[-1:]
            finally:
                self._full_disk.unlink()
            if not self._failed_save.exists():
                self.injected[number] = replace(injected, failure="no save came before the run's end")
                return
            self.injected[number] = injected = replace(injected, found_at=time.time())
            self._await(lambda: published_checkpoints(self._checkpoints)[-1:] not in ((), before), _LOOK_AT_SAVES_S)
            self.injected[number] = replace(injected, back_at=time.time())

    def _corrupt(self, number: int, fault: Fault) -> InjectedFault:
        """Damage the newest of two checkpoints at least, and kill rank 0, so that the run reads it."""
        self._await(lambda: len(published_checkpoints(self._checkpoints)) > 1, _LOOK_S)
        while True:
            pid, where = self._await_phase(fault)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # so that no newer one is published meanwhile
                found = published_checkpoints(self._checkpoints)
                what = damage_checkpoint(found[-1], random.Random(fault.dice)) if len(found) > 1 else ""
                step = self._step(0)
                os.kill(pid, signal.SIGKILL)
                return _injected(fault, phase=where, step=step, what=what)

    def _lose_host(self, number: int, fault: Fault) -> InjectedFault:
        _, where = self._await_phase(fault)
        before = self._ranks.pid(0)
        step = self._step(self._watched(fault))
        self._lose_all_of(fault.rank)
        self.injected[number] = injected = _injected(fault, phase=where, step=step)
        self._await(lambda: self._ranks.pid(0) not in (None, before) and self._step(0) > 0, _LOOK_S)
        first = self._step(0)
        self._await(lambda: self._step(0) > first, _LOOK_S)
        return replace(injected, back_at=time.time())

    # What is seen of the run.

    def _watched(self, fault: Fault) -> int:
        """The rank whose progress decides when a fault comes."""
        return self._ranks.hosts[fault.rank].ranks.start if fault.kind == "lose-host" else fault.rank

    def _step(self, rank: int) -> int:
        """The step that a rank is in; 0 while it has not begun any."""
        seen = self._ranks.published(rank)
        return seen.step if seen else 0

    def _phase(self, rank: int) -> str:
        seen = self._ranks.published(rank)
        return seen.phase if seen else ""

    def _is_near_end(self, rank: int) -> bool:
        return self._step(rank) >= self._steps - 1

    def _is_writing(self) -> bool:
        return any(self._checkpoints.glob(".step-*.staging"))

    def _is_back(self, fault: Fault, injected: InjectedFault) -> bool:
        try:
            incidents, back = read_incidents(self._folder / "incidents.jsonl")
        except (OSError, PlaitError):  # a line that is being written
            return False
        return outcome_of(fault, injected, incidents, back).back_after_s is not None

    def _await(self, fact: Callable[[], bool], look_s: float) -> None:
        while not fact():
            if self._ended.wait(look_s):
                raise _Over


def _injected(fault: Fault, *, phase: str = "", step: int = 0, what: str = "") -> InjectedFault:
    done_step = fault.step if fault.at_s is None else max(0, step - 1)
    return InjectedFault(at=time.time(), step=done_step, phase=phase, what=what)


def damage_checkpoint(checkpoint: Path, dice: random.Random) -> str:
    """Flip one bit of one of a checkpoint's files, cut off its end, or delete it, as the dice say; returns what was
    done."""
    path = dice.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))
    name, size = f"{checkpoint.name}/{path.name}", path.stat().st_size
    how = dice.choice(("bit", "end", "whole"))
    if how == "bit":
        at, bit = dice.randrange(size), dice.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))
        return f"bit {bit} of byte {at} of {name} was flipped"
    if how == "end":
        lost = dice.randint(1, min(size, _CUT_BYTES))
        os.truncate(path, size - lost)
        return f"the last {lost} bytes of {name} were cut off"
    path.unlink()
    return f"{name} was deleted"
