"""Watches the ranks of one job from their start to the last one's end, and decides how it ended."""

from __future__ import annotations

import contextlib
import math
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.errors import PlaitError, RunFailed
from plait.launch.channel import LineReader
from plait.launch.failure import AGAIN, Died, Failure, Raised, as_error, raised_from, root_cause
from plait.launch.job import Job, Message, StoppedBy
from plait.launch.server import ServerProcess
from plait.launch.signals import SignalMailbox, StopSignal

# starting: some ranks have not said so yet. stopping: asked to save and return. collecting: one died badly, and
# the others may tell why. ending: nobody is left, or all have been killed; only the fork server's word is missing.
Phase = Literal["starting", "running", "stopping", "collecting", "ending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long each phase of a job may last; running alone has no bound."""

    start_s: float
    grace_s: float
    collect_s: float = 0.7
    end_s: float = 3.0
    report_s: float = 4.0
    silence_s: float = 1.0


class Supervision:
    """One job under watch; call `run` once. `server` must have been sent the job already."""

    def __init__(
        self,
        job: Job,
        server: ServerProcess,
        ranks: Sequence[LineReader],
        signals: SignalMailbox,
        on_message: Callable[[Message], None],
        bounds: Bounds,
    ) -> None:
        self._job = job
        self._server = server
        self._ranks = ranks
        self._signals = signals
        self._on_message = on_message
        self._bounds = bounds
        self._selector = selectors.DefaultSelector()
        self._forked = False
        self._over = False
        self._not_started = set(range(job.world_size))
        self._alive = set(range(job.world_size))
        self._returned: set[int] = set()
        self._failures: list[Failure] = []
        self._report_due: dict[int, float] = {}
        self._verdict: PlaitError | None = None
        self._stopped_by: StoppedBy = "finished"
        self._enter("starting", bounds.start_s)

    def run(self) -> StoppedBy:
        """Block until every rank has ended; raises what ended the job when that was neither its work nor a stop."""
        with self._selector:
            self._watch()
            try:
                while not self._over:
                    self._turn()
                self._drain(self._hear_rank)
            finally:
                if not self._over:  # the caller's on_message raised, or a wire is garbled
                    self._abandon()
        return self._conclusion()

    def _watch(self) -> None:
        register = self._selector.register
        register(self._signals.wire, selectors.EVENT_READ, self._read_signals)
        register(self._server.answers.wire, selectors.EVENT_READ, self._read_server)
        for rank, reader in enumerate(self._ranks):
            register(reader.wire, selectors.EVENT_READ, lambda rank=rank: self._read_rank(rank))

    def _turn(self) -> None:
        left_s = max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(None if math.isinf(left_s) else left_s):
            key.data()
        if time.monotonic() >= self._deadline and not self._over:
            self._time_is_up()

    def _enter(self, phase: Phase, for_at_most_s: float) -> None:
        self._phase: Phase = phase
        self._deadline = time.monotonic() + for_at_most_s

    # What arrives.

    def _read_signals(self) -> None:
        for name in self._signals.read():
            self._stop(name)

    def _read_rank(self, rank: int) -> None:
        reader = self._ranks[rank]
        for value in reader.read():
            self._hear_rank(rank, value)
        if reader.ended:
            self._selector.unregister(reader.wire)
            # Its death must be reported soon, or the server is stuck.
            self._report_due[rank] = time.monotonic() + self._bounds.report_s
            if self._phase == "running":
                self._deadline = min(self._deadline, self._report_due[rank])

    def _read_server(self) -> None:
        for value in self._server.answers.read():
            self._hear_server(value)
        if self._server.answers.ended:
            self._over = True

    def _hear_rank(self, rank: int, value: Mapping[str, Any]) -> None:
        if "told" in value:
            self._on_message(Message(rank=rank, kind=value["told"], values=value["values"]))
        elif "started" in value:
            self._not_started.discard(rank)
            self._note_start()
        elif "returned" in value:
            self._returned.add(rank)
        elif "raised" in value:
            self._fail(raised_from(value["raised"]))

    def _note_start(self) -> None:
        if self._forked and not self._not_started and self._phase == "starting":
            self._enter("running", math.inf)

    def _hear_server(self, value: Mapping[str, Any]) -> None:
        if "forked" in value:
            self._forked = True
            self._note_start()
        elif "died" in value:
            self._bury(Died(rank=value["died"], code=value["code"], at_s=value["at_s"]))
        elif "raised" in value:
            self._fail(raised_from(value["raised"]))
        elif "over" in value:
            self._over = True

    def _bury(self, death: Died) -> None:
        for value in self._ranks[death.rank].read_all():  # its last words come before the verdict
            self._hear_rank(death.rank, value)
        self._alive.discard(death.rank)
        well = death.code == 0 and death.rank in self._returned
        if not well and not any(failure.rank == death.rank for failure in self._failures):
            self._fail(death)
        if not self._alive and self._phase != "ending":
            self._enter("ending", self._bounds.end_s)

    # What is decided.

    def _stop(self, name: StopSignal) -> None:
        if self._stopped_by != "finished":
            self._verdict = RunFailed(f"stopped at once by a second {name}, without saving; {AGAIN}")
            self._kill()
            return
        self._stopped_by = name
        if not self._forked and len(self._not_started) == self._job.world_size:  # nothing to save yet
            self._server.kill()
        elif self._phase in ("starting", "running"):
            self._server.request({"signal": "SIGTERM"})
            self._enter("stopping", self._bounds.grace_s)

    def _fail(self, failure: Failure) -> None:
        if self._phase == "ending":  # killed by ourselves
            return
        self._failures.append(failure)
        if self._phase != "collecting":
            self._enter("collecting", self._bounds.collect_s)

    def _time_is_up(self) -> None:
        if self._phase == "ending":  # a word from the server is not worth more patience: its death ends all
            self._server.kill()
            self._over = True
        elif self._phase == "running":
            self._look_for_unreported_deaths()
        else:
            self._give_up_waiting()

    def _look_for_unreported_deaths(self) -> None:
        due = [self._report_due[rank] for rank in self._alive if rank in self._report_due]
        self._enter("running", min(due, default=math.inf) - time.monotonic())
        if self._deadline <= time.monotonic():
            self._verdict = RunFailed(f"the process that starts the workers does not answer; {AGAIN}")
            self._server.kill()

    def _give_up_waiting(self) -> None:
        if self._phase == "starting":
            self._verdict = RunFailed(f"{self._who_is_missing()} within {self._bounds.start_s:g} s; {AGAIN}")
        if self._phase == "stopping":
            self._verdict = RunFailed(
                f"the workers were killed because they had not saved and ended {self._bounds.grace_s:g} s after "
                f"{self._stopped_by}; {AGAIN}"
            )
        self._kill()

    def _kill(self) -> None:
        self._enter("ending", self._bounds.end_s)
        with contextlib.suppress(RunFailed):  # a dead server's ranks are dead as well
            self._server.request({"signal": "SIGKILL"})

    def _abandon(self) -> None:
        self._kill()
        answers = self._server.answers
        while not (self._over or answers.ended) and answers.wait(self._deadline - time.monotonic()):
            self._over = any("over" in value for value in answers.read())
        if not self._over:
            self._server.kill()
        self._drain(lambda rank, value: None)

    def _who_is_missing(self) -> str:
        if not self._forked:
            return "the process that starts the workers was not ready"
        missing = sorted(self._not_started)
        return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not start"

    # How it ended.

    def _drain(self, hear: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Take what the ranks left in their wires, until each is closed: then its rank is gone."""
        deadline = time.monotonic() + self._bounds.silence_s
        for rank, reader in enumerate(self._ranks):
            while not reader.ended and reader.wait(deadline - time.monotonic()):
                for value in reader.read():
                    hear(rank, value)

    def _conclusion(self) -> StoppedBy:
        if self._verdict:
            raise self._verdict
        if self._failures:
            raise self._cause()
        if self._alive and (self._forked or self._stopped_by == "finished"):
            raise RunFailed(self._server.obituary())
        return self._stopped_by

    def _cause(self) -> PlaitError:
        cause = root_cause(self._failures)
        if self._job.log_dir is not None and cause.rank is not None:
            return as_error(cause, f"in {Path(self._job.log_dir) / f'rank-{cause.rank}.log'}")
        if isinstance(cause, Raised) and not cause.plait_classes:
            print(cause.traceback, file=sys.stderr, flush=True)
        return as_error(cause, "above")
