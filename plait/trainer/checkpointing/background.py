"""Saves checkpoints while training goes on: a copy of this rank's part, which a thread writes and rank 0 publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Literal

from plait.checkpoint.arrival import refuse_part
from plait.checkpoint.generation import require_newest
from plait.checkpoint.store import checkpoint_for, staging_for
from plait.checkpoint.transfer import TensorSlice, write_rank
from plait.cluster.topology import free_memory_bytes
from plait.errors import PlaitError, RunFailed
from plait.parallel.mesh import Sums
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.all_ranks import run_on_all_ranks
from plait.trainer.checkpointing.in_memory import MemoryCopies, Slices
from plait.trainer.checkpointing.persist import Send, publish_parts, rank_slices
from plait.trainer.state import TrainState

NOTHING, WRITING, FAILED = 0, 1, 2
"""What a rank says of its save at each agreement; the largest of all ranks is how the save stands."""
_MEMORY_KEPT = 0.25
"""Share of the free memory that copies may not take."""

# Note [one agreement]: ranks agree once, when a save begins: that all numbers are finite, and whether copies have the
# memory. Then no rank waits for another. Rank 0 sees by files when all parts are there, or why one does not come; the
# others hear how it ended by a number in the agreement that every step has anyway.


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnd:
    """How the save after `step` ended; `failure` says why it failed, and is "" where it did not.

    `cost_s` is the time from its beginning to its end, `blocked_s` the part of it for which training waited.
    """

    step: int
    cost_s: float
    blocked_s: float
    failure: str = ""


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
    from_memory: bool = False
    """Whether what is written is a copy for the case that a worker dies."""
    given_up: threading.Event = field(default_factory=threading.Event)  # a rank cannot write: rank 0 need not wait


class CheckpointSaver:
    """Saves the checkpoints of one rank in `folder`; every rank has one and makes the same calls in the same order.

    `fence` raises RunFailed where its start of the run, `generation`, may no longer write. A rank whose `folder` is not
    on rank 0's host passes `send`. Where there are `copies`, a save that goes on beside training writes one of them.
    """

    def __init__(
        self,
        assembly: Assembly,
        folder: Path,
        world: Sums,
        fence: Callable[[], None],
        send: Send | None,
        generation: int = 0,
        copies: MemoryCopies | None = None,
    ) -> None:
        self._assembly, self._folder, self._world, self._send = assembly, folder, world, send
        self.fence, self._generation, self._copies = fence, generation, copies
        self._now: _Writing | None = None
        self._agreed = NOTHING

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
        """Copy this rank's part of a state, and have a thread save it. Every rank must call it; blocks for the copy, or
        for the whole save where there is no memory for copies.

        No other save may go on. Raises RunFailed on every rank where a value is not finite.
        """
        self._start(state, "copies")

    def save_now(self, state: TrainState) -> SaveEnd:
        """Save a state, and return when it is on the disk. Every rank must call it; raises RunFailed on all of them
        where one could not write, or holds a value that is not finite; earlier checkpoints stay."""
        self._start(state, "as it is")
        end = self.finish()
        assert end is not None
        if end.failure:
            raise RunFailed(end.failure)
        return end

    def finish(self) -> SaveEnd | None:
        """Wait until the save that goes on has ended, and say how; None where there is none. Every rank must call
        it."""
        now, waited_from_s = self._now, time.monotonic()
        if now is None:
            return None
        if now.thread is not None:
            if self._agreed == FAILED:
                now.given_up.set()
            now.thread.join()
        clears = self._send is not None or self._world.index == 0

        def raise_failure() -> None:
            if now.error is not None:
                raise now.error

        failure = ""
        try:
            run_on_all_ranks(self._world, raise_failure, now.staging if clears else None)
        except RunFailed as error:
            failure = str(error)
        return self._ended(now, waited_from_s, failure)

    def _ended(self, now: _Writing, waited_from_s: float, failure: str = "") -> SaveEnd:
        """Take note that the save is over, as all ranks know."""
        self._now = None
        if now.thread is not None:
            now.thread.join()
        if now.from_memory and self._copies is not None:
            self._copies.saved()
        if self._send is not None:
            rmtree(now.staging, ignore_errors=True)
        blocked_s = now.blocked_s + time.monotonic() - waited_from_s
        return SaveEnd(step=now.state.step, cost_s=now.ended_s - now.began_s, blocked_s=blocked_s, failure=failure)

    def _start(self, state: TrainState, how: Literal["copies", "as it is"]) -> None:
        assert self._now is None, "one save at a time"
        began_s, slices = time.monotonic(), dict[str, list[TensorSlice]]()

        def look() -> None:
            slices.update(rank_slices(self._assembly, state, self._world))

        is_short = run_on_all_ranks(
            self._world, look, None, number=lambda: int(how == "copies" and self._is_short(slices))
        )
        now = _Writing(state=state, staging=staging_for(self._folder, state.step, self._generation), began_s=began_s)
        self._now, self._agreed = now, WRITING
        if how == "copies" and not is_short:
            copies = self._copied(now, slices)
            now.thread = threading.Thread(target=self._write_copies, args=(now, copies), name="save", daemon=True)
            now.thread.start()
        else:
            self._write(now, slices)
        now.blocked_s = time.monotonic() - began_s

    def _is_short(self, slices: Slices) -> bool:
        """Whether this rank's host lacks the memory for copies; those that survive the worker have theirs already."""
        if self._makes_copies:
            return False
        nbytes = sum(one.tensor.nbytes for some in slices.values() for one in some)
        sharers = self._assembly.plan.workers_beside(self._world.index)
        return nbytes * sharers > (1 - _MEMORY_KEPT) * free_memory_bytes()

    @property
    def _makes_copies(self) -> bool:
        return self._copies is not None and self._copies.state == "on" and self._copies.is_prepared

    def _copied(self, now: _Writing, slices: Slices) -> Slices:
        """Copies of this rank's slices: one that survives the worker, where there are such."""
        if self._copies is not None and self._makes_copies and (copy := self._copies.copy(now.state, slices)):
            now.from_memory = True
            return self._copies.begin_saving(copy)
        return {key: [_copied(one) for one in some] for key, some in slices.items()}

    def _write_copies(self, now: _Writing, slices: Slices) -> None:
        if now.from_memory and self._copies is not None:
            self._copies.take_third_slot()
        self._write(now, slices)

    def _write(self, now: _Writing, slices: Slices) -> None:
        """Write this rank's part; rank 0 then publishes the parts of all."""
        may_write = self._send is not None  # what is sent is not asked for any more where a later start has begun
        try:
            if not may_write:
                self.fence()
                may_write = True
            write_rank(now.staging, self._world.index, slices)
            if self._send is not None:
                self._send(now.staging)
            if self._world.index == 0:
                places, given_up = (now.staging, checkpoint_for(self._folder, now.state.step)), now.given_up.is_set
                publish_parts(self._assembly, now.state, places, self._world.size, self.fence, given_up)
            now.ended_s, now.status = time.monotonic(), NOTHING
        except (OSError, PlaitError) as error:
            now.error = error if isinstance(error, PlaitError) else _run_failed(error)
            with suppress(OSError):  # then rank 0 hears of it in the agreement after the next step
                if may_write:
                    refuse_part(now.staging, self._world.index, str(now.error))
            now.ended_s, now.status = time.monotonic(), FAILED


def saver_of(
    assembly: Assembly,
    folder: Path,
    parts: Literal["here", "sent"],
    generation: int,
    tell: Callable[..., None],
    copies: MemoryCopies | None = None,
) -> CheckpointSaver:
    """What saves the checkpoints of the run in `folder`, as its start of that number, unless a later one has begun; by
    way of the `copies` in memory, where there are such.

    A rank whose part is "sent" uses `tell` to have the supervisors send it on to rank 0's folder.
    """

    def send(staging: Path) -> None:
        tell("wrote", staging=staging.name)

    fence = partial(require_newest, folder, generation)
    world, checkpoints = assembly.sums, folder / "checkpoints"
    return CheckpointSaver(
        assembly, checkpoints, world, fence, send if parts == "sent" else None, generation, copies=copies
    )


def _copied(one: TensorSlice) -> TensorSlice:
    """The slice with a copy of its numbers in this host's memory."""
    return TensorSlice(tensor=one.tensor.detach().to("cpu", copy=True), shape=one.shape, offset=one.offset)


def _run_failed(error: OSError) -> RunFailed:
    failed = RunFailed(f"could not save the checkpoint ({error.strerror}: {error.filename}); earlier ones are whole")
    failed.__cause__ = error  # a missing file is heard last: another rank's failure took it away
    return failed
