"""Saves checkpoints while training goes on: a copy of this rank's part, which a thread writes and rank 0 publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Literal

import torch
from torch import Tensor

from plait.checkpoint.arrival import await_parts, refuse_part
from plait.checkpoint.durable import NoRoom, is_full_disk
from plait.checkpoint.generation import require_newest
from plait.checkpoint.host_bytes import HostCopies
from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import TensorSlice, WritePart, write_rank
from plait.errors import PlaitError, RunFailed
from plait.launch.values.copies import CopyStore
from plait.launch.values.progress import NO_REPORT, ProgressReport
from plait.machines.machine import free_memory_bytes
from plait.parallel.communicator import Communicator
from plait.parallel.exchange import agree_on_any, run_on_all_ranks
from plait.planner.plan import Plan
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.carrier import MEMORY_KEPT, PartsCarrier, Slices
from plait.trainer.checkpointing.copies import StateCopies
from plait.trainer.checkpointing.fits import described_model, needed_tensors
from plait.trainer.checkpointing.persist import rank_slices
from plait.trainer.checkpointing.save_progress import SaveProgress
from plait.trainer.state import TrainState
from plait.units import format_duration

NOTHING, WRITING, FAILED = 0, 1, 2
"""What a rank says of its save at each agreement; the largest of all ranks is how the save stands."""
_TOGETHER_S, _LOOK_S = 2.0, 0.25
_TRY_AGAIN_AFTER_S = 3.0
"""Less than the shortest silence that counts as a hang."""
_TRY_FOR_S, _TRY_AT_STOP_FOR_S = 600.0, 60.0
"""How long the last state of a run is kept for a disk that is full; the second where the run was asked to stop, and
has two minutes for it."""

# Note [one agreement]: ranks agree once, when a save begins: that all numbers are finite, and whether copies have the
# memory. Then no rank waits for another. Rank 0 sees by files when all parts are there, or why one does not come; the
# others hear how it ended by a number in the agreement that every step has anyway. Where training waits for a save,
# ranks agree every two seconds whether it still goes on: a save may take longer than the process group lets one rank
# wait for another, and rank 0 hears soon of a part that will not come.


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnd:
    """How the save after `step` ended; `failure` says why it failed, and is "" where it did not.

    `cost_s` is the time from its beginning to its end, `blocked_s` the part of it for which training waited.
    """

    step: int
    cost_s: float
    blocked_s: float
    failure: str = ""
    lacks_room: bool = False
    """Whether a full disk was the only reason of the failure."""


@dataclass(slots=True, kw_only=True)
class _Writing:
    """A save that goes on."""

    state: TrainState
    staging: Path
    began_s: float
    blocked_s: float = 0.0
    status: int = WRITING
    error: PlaitError | None = None
    ended_s: float = 0.0
    thread: threading.Thread | None = None
    total_bytes: int = 0
    arrived_bytes: int = 0
    """Of all ranks' parts; the second, on rank 0 alone, is what has come into its folder by now."""
    from_memory: bool = False
    """Whether what is written is a copy for the case that a worker dies."""
    given_up: threading.Event = field(default_factory=threading.Event)  # a rank cannot write: rank 0 need not wait


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverReports:
    """What a saver reports to while training waits for it: the log (on rank 0), the watch for hangs, and from which
    it hears of a stop."""

    say: Callable[[str], None] = lambda line: None
    progress: ProgressReport = NO_REPORT
    stop_requested: Callable[[], bool] = lambda: False


_NO_REPORTS = SaverReports()


class CheckpointSaver:
    """Saves the checkpoints of one rank in `folder`; every rank has one and makes the same calls in the same order.

    `fence` raises RunFailed where its start of the run, `generation`, may no longer write. A rank whose `folder` is not
    on rank 0's host passes a `carrier`. Where there are `copies`, a save that goes on beside training writes one of
    them. The state that a run ends with is kept for `try_for_s` where a disk has no room for it.
    """

    def __init__(
        self,
        assembly: Assembly,
        folder: Path,
        world: Communicator,
        fence: Callable[[], None],
        carrier: PartsCarrier | None,
        generation: int = 0,
        copies: StateCopies | None = None,
        reports: SaverReports = _NO_REPORTS,
        try_for_s: float = _TRY_FOR_S,
        write_part: WritePart = write_rank,
        host: HostCopies | None = None,
    ) -> None:
        self._assembly, self._folder, self._world, self._carrier = assembly, folder, world, carrier
        self._reports, self._try_for_s, self._write_part = reports, try_for_s, write_part
        self.fence, self._generation, self._copies = fence, generation, copies
        self._now: _Writing | None = None
        self._agreed = NOTHING
        self._host = host or HostCopies()

    @property
    def status(self) -> int:
        """NOTHING, WRITING or FAILED: for the agreement of all ranks."""
        return NOTHING if self._now is None else self._now.status

    def agree(self, largest: int) -> None:
        """Take note of the largest status of all ranks."""
        self._agreed = largest

    def ended(self) -> SaveEnd | None:
        """How the save that went on has ended, as the ranks agreed; None while it goes on, or where there is none."""
        if self._now is None or self._agreed == WRITING:
            return None
        return self._ended(self._now, time.monotonic()) if self._agreed == NOTHING else self.finish()

    def begin(self, state: TrainState) -> None:
        """Copy this rank's part of a state, and have a thread save it. Every rank must call it. Blocks for the copy,
        unless a device makes it in its own time (HostCopies); for the whole save where there is no memory for copies.

        No other save may go on. Raises RunFailed on every rank where a value is not finite.
        """
        if self._start(state, "copies") == "as it is":
            assert self._now is not None
            self._wait_together(self._now)

    def save_now(self, state: TrainState) -> SaveEnd:
        """Save a state, and return when it is on the disk. Every rank must call it; raises RunFailed on all of them
        where one could not write, or holds a value that is not finite; earlier checkpoints stay. Where a disk has no
        room the state stays in memory, and saving is tried again for some minutes, or until a stop is requested."""
        began_s, said_after_s = time.monotonic(), 0.0
        stopped_before = agree_on_any(self._world, self._reports.stop_requested())
        try_for_s = min(self._try_for_s, _TRY_AT_STOP_FOR_S) if stopped_before else self._try_for_s
        while True:
            self._start(state, "as it is")
            end = self.finish()
            assert end is not None
            if not end.failure:
                return end
            tried_s = time.monotonic() - began_s
            gives_up = tried_s > try_for_s or (self._reports.stop_requested() and not stopped_before)
            if not end.lacks_room or agree_on_any(self._world, gives_up):
                raise RunFailed(end.failure)
            if tried_s >= said_after_s:
                said_after_s = max(10.0, 2 * said_after_s)
                left = format_duration(max(1.0, round(try_for_s - tried_s)))
                self._reports.say(
                    f"warning  {end.failure.partition(';')[0]}; step {state.step} is kept in memory, and saving is "
                    f"tried again for {left}: free some space, or end the run by {'another ' * stopped_before}Ctrl-C"
                )
            self._pause()

    def _pause(self) -> None:
        """Wait until the next try, or until a stop is requested here."""
        until_s = time.monotonic() + _TRY_AGAIN_AFTER_S
        stopped = self._reports.stop_requested()
        while time.monotonic() < until_s and self._reports.stop_requested() == stopped:
            time.sleep(_LOOK_S)
        self._reports.progress.phase("saving")

    def finish(self) -> SaveEnd | None:
        """Wait until the save that goes on has ended, and say how; None where there is none. Every rank must call
        it."""
        now, waited_from_s = self._now, time.monotonic()
        if now is None:
            return None
        self._wait_together(now)
        clears = self._carrier is not None or self._world.index == 0
        of_room = isinstance(now.error, NoRoom)
        follows = now.error is not None and isinstance(now.error.__cause__, FileNotFoundError)
        others = now.error is not None and not of_room and not follows
        by_room, by_others = self._world.largest(torch.tensor([int(of_room), int(others)])).tolist()

        def raise_failure() -> None:
            if now.error is not None:
                raise now.error

        failure = ""
        try:
            run_on_all_ranks(self._world, raise_failure, now.staging if clears else None)
        except RunFailed as error:
            failure = str(error)
        return self._ended(now, waited_from_s, failure, lacks_room=bool(by_room and not by_others))

    def _wait_together(self, now: _Writing) -> None:
        """Wait until no rank is writing any more; says now and then how far the save is. Every rank must call it."""
        stops = self._reports.stop_requested()
        told = SaveProgress(now.state.step, now.total_bytes, was_stopped=stops)
        while True:
            until_s = time.monotonic() + _TOGETHER_S
            while now.thread is not None and now.thread.is_alive() and time.monotonic() < until_s:
                now.thread.join(_LOOK_S)
                self._reports.progress.moved(now.arrived_bytes)
                line = told.look(now.arrived_bytes, stop_requested=self._reports.stop_requested())
                if line and self._world.index == 0:
                    self._reports.say(line)
            writes = now.thread is not None and now.thread.is_alive()
            flags = self._world.largest(torch.tensor([int(writes), int(now.status == FAILED)])).tolist()
            if flags[1]:
                now.given_up.set()
            if not flags[0]:
                return

    def _ended(self, now: _Writing, waited_from_s: float, failure: str = "", *, lacks_room: bool = False) -> SaveEnd:
        """Take note that the save is over, as all ranks know."""
        self._now = None
        if now.thread is not None:
            now.thread.join()
        if now.from_memory and self._copies is not None:
            self._copies.saved()
        if self._carrier is not None:
            self._carrier.clear()
            rmtree(now.staging, ignore_errors=True)
        blocked_s = now.blocked_s + time.monotonic() - waited_from_s
        cost_s = now.ended_s - now.began_s
        return SaveEnd(step=now.state.step, cost_s=cost_s, blocked_s=blocked_s, failure=failure, lacks_room=lacks_room)

    def _start(self, state: TrainState, how: Literal["copies", "as it is"]) -> Literal["copies", "as it is"]:
        """Begin a save in a thread of its own; returns whether it writes copies or, which is the same on all ranks, the
        state itself, which may not change then before it is over."""
        assert self._now is None, "one save at a time"
        began_s, slices = time.monotonic(), dict[str, list[TensorSlice]]()

        def look() -> None:
            slices.update(rank_slices(self._assembly, state, self._world))

        is_short = run_on_all_ranks(
            self._world, look, None, number=lambda: int(how == "copies" and self._is_short(slices))
        )
        now = _Writing(state=state, staging=staging_for(self._folder, state.step, self._generation), began_s=began_s)
        own = sum(one.tensor.nbytes for some in slices.values() for one in some)
        now.total_bytes = int(self._world(torch.tensor([own]))[0])
        self._now, self._agreed = now, WRITING
        done: Literal["copies", "as it is"] = "as it is" if is_short else how
        write = partial(self._write, now, slices) if done == "as it is" else self._copied(now, slices)
        now.thread = threading.Thread(target=write, name="save", daemon=True)
        now.thread.start()
        now.blocked_s = time.monotonic() - began_s
        return done

    def _is_short(self, slices: Slices) -> bool:
        """Whether this rank's host lacks the memory for copies; those that survive the worker have theirs already."""
        if self._makes_copies:
            return False
        nbytes = self._host.new_bytes(_tensors_of(slices))
        sharers = self._assembly.plan.workers_beside(self._world.index)
        return nbytes * sharers > (1 - MEMORY_KEPT) * free_memory_bytes()

    @property
    def _makes_copies(self) -> bool:
        return self._copies is not None and self._copies.are_prepared

    def _copied(self, now: _Writing, slices: Slices) -> Callable[[], None]:
        """Copy this rank's slices, into memory that survives the worker if there is any; returns what writes the
        copy."""
        if self._copies is not None and self._makes_copies and (copy := self._copies.copy(now.state, slices)):
            now.from_memory = True
            return partial(self._write_kept, now, self._copies.begin_saving(copy), self._copies)
        copied, wait = self._host.begin(_tensors_of(slices))
        tensors = iter(copied)
        whole = {key: [replace(one, tensor=next(tensors)) for one in some] for key, some in slices.items()}
        return partial(self._write_once_there, now, whole, wait)

    def _write_kept(self, now: _Writing, slices: Slices, copies: StateCopies) -> None:
        copies.take_third_slot()
        self._write(now, slices)

    def _write_once_there(self, now: _Writing, slices: Slices, wait: Callable[[], None]) -> None:
        def arrived() -> None:
            try:
                wait()
            except RuntimeError as error:
                raise RunFailed(f"step {now.state.step} could not be copied from the device: {error}") from None

        self._write(now, slices, arrived)

    def _write(self, now: _Writing, slices: Slices, arrived: Callable[[], None] = lambda: None) -> None:
        """Write this rank's part once `arrived` returns; rank 0 then publishes the parts of all."""
        may_write = self._carrier is not None  # what is sent is not asked for any more where a later start has begun
        try:
            if not may_write:
                self.fence()
                may_write = True
            try:
                arrived()
                self._write_own_part(now, slices)
            except (OSError, PlaitError) as error:
                own = error if isinstance(error, PlaitError) else _run_failed(error)
                raise self._with_host(own) from own.__cause__
            if self._world.index == 0:
                self._publish(now)
            now.ended_s, now.status = time.monotonic(), NOTHING
        except (OSError, PlaitError) as error:
            now.error = error if isinstance(error, PlaitError) else _run_failed(error)
            with suppress(OSError):  # then rank 0 hears of it in the agreement after the next step
                if may_write:
                    why = "no room" if isinstance(now.error, NoRoom) else "another reason"
                    refuse_part(now.staging, self._world.index, str(now.error), why)
            now.ended_s, now.status = time.monotonic(), FAILED

    def _publish(self, now: _Writing) -> None:
        """Wait for the parts of all ranks, and make them a checkpoint; rank 0 alone calls it."""
        note = partial(setattr, now, "arrived_bytes")
        await_parts(now.staging, self._world.size, is_given_up=now.given_up.is_set, note_bytes=note)
        self.fence()
        publish(
            now.staging,
            checkpoint_for(self._folder, now.state.step),
            step=now.state.step,
            cursor=now.state.position,
            model=described_model(self._assembly.plan),
            world_size=self._world.size,
            needs=needed_tensors(self._assembly.plan),
        )

    def _write_own_part(self, now: _Writing, slices: Slices) -> None:
        """Write this rank's part to the disk and, where it is not rank 0's, have it sent there: from memory, where the
        disk is full."""
        if self._carrier is None:
            self._write_part(now.staging, self._world.index, slices)
            return
        try:
            self._write_part(now.staging, self._world.index, slices, when_full="clear own")
        except NoRoom as full:
            try:
                self._carrier.put_in_memory(slices, now.state.step)
            except (OSError, MemoryError):
                self._carrier.cannot_send(now.staging, str(full).partition(";")[0])
                raise full from None
            self._carrier.send(now.staging, "memory")
        else:
            self._carrier.send(now.staging, "disk")

    def _with_host(self, error: PlaitError) -> PlaitError:
        """The same error with the name of this rank's host, where the run has several."""
        plan = self._assembly.plan
        if len(plan.machines.hosts) < 2 or isinstance(error.__cause__, FileNotFoundError):
            return error
        return (NoRoom if isinstance(error, NoRoom) else RunFailed)(f"on {_host_of(plan, self._world.index)}: {error}")


def saver_of(
    assembly: Assembly,
    folder: Path,
    parts: Literal["here", "sent"],
    generation: int,
    tell: Callable[..., None],
    copies: StateCopies | None = None,
    reports: SaverReports = _NO_REPORTS,
    memory: CopyStore | None = None,
    local_rank: int = 0,
    write_part: WritePart = write_rank,
    host: HostCopies | None = None,
) -> CheckpointSaver:
    """The saver of the run's checkpoints in `folder`; refuses to write once a start later than `generation` has begun.
    Saves from the in-memory `copies` if there are any.

    A rank whose part is "sent" uses `tell` to have the supervisors send it on to rank 0's folder, and `memory` where
    its own disk is full.
    """
    fence = partial(require_newest, folder, generation)
    world, checkpoints = assembly.sums, folder / "checkpoints"
    carrier = None
    if parts == "sent":
        sharers = assembly.plan.workers_beside(world.index)
        carrier = PartsCarrier(
            tell, memory, rank=world.index, local_rank=local_rank, sharers=sharers, lineage=generation
        )
    return CheckpointSaver(
        assembly, checkpoints, world, fence, carrier, generation, copies, reports, write_part=write_part, host=host
    )


def _host_of(plan: Plan, rank: int) -> str:
    names = [share.name for share in plan.machines.hosts for _ in range(share.workers)]
    return names[rank]


def _tensors_of(slices: Slices) -> list[Tensor]:
    return [one.tensor for some in slices.values() for one in some]


def _run_failed(error: OSError) -> RunFailed:
    kind = NoRoom if is_full_disk(error) else RunFailed
    failed = kind(f"could not save the checkpoint ({error.strerror}: {error.filename}); earlier ones are whole")
    failed.__cause__ = error  # a missing file is heard last: another rank's failure took it away
    return failed
