"""After a user's program has lost a worker: whether to start it again, to continue from its last saved state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.checked_json import one_line
from plait.commands.monitoring.restarts import decision_after, kernel_memory_kills, may_pass, pause_s, true_facts
from plait.custom.process.launcher import LESS_MEMORY, RESUMED, SAVED
from plait.errors import GaveUp
from plait.launch.values.failure import FailureFacts, WorkersFailed, likely_reason
from plait.launch.values.job import Message
from plait.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlace:
    """The newest state of a program: the folder that its run.save was given, and the step."""

    folder: str
    step: int

    def __str__(self) -> str:
        return f"step {self.step}, saved in {one_line(self.folder)}"


class ProgramRestarts:
    """Follows the starts of one program, whose name and log folder appear in its messages. `saved` is where its newest
    state is, None before the first."""

    def __init__(self, name: str, logs: Path) -> None:
        self._name, self._logs = name, logs
        self.saved: SavedPlace | None = None
        self._is_progress, self._without_progress = False, 0
        self._memory_kills = 0

    def begins(self) -> None:
        """A start of the workers begins."""
        self._memory_kills = kernel_memory_kills()

    def on_message(self, message: Message) -> None:
        """Process a worker's message; only rank 0, which is on this machine, reports saved states."""
        if message.rank == 0 and message.kind in (SAVED, RESUMED):
            self.saved = SavedPlace(folder=str(message.values["folder"]), step=int(message.values["step"]))
            self._is_progress = self._is_progress or message.kind == SAVED

    def after(self, error: WorkersFailed) -> str:
        """Decide after a failure: wait a moment and return the line about the new start that the caller makes now, or
        raise the error that ends the program, with advice."""
        from plait.recipe.schema import RecoverSection  # takes a moment, which a program need not wait for

        facts = true_facts(error.facts, self._memory_kills)
        self._without_progress = 1 if self._is_progress else self._without_progress + 1
        self._is_progress = False
        decision = decision_after(RecoverSection(), self._without_progress, self._outlook(error, facts))
        if decision == "started again":
            time.sleep(pause_s(self._without_progress))
            return f"failure  {self._what(error, facts)}; {self._name} starts again, to go on from {self.saved}"
        if decision == "gave up":
            raise GaveUp(
                f"gave up after {counted(self._without_progress, 'failure')} without a new run.save: the last was that "
                f"{self._what(error, facts)}{likely_reason(facts)}; {self._advice(facts)}"
            ) from error
        if facts.cause == "raised":  # by plait itself, as what a program raises is no WorkersFailed
            raise error
        raise WorkersFailed(f"{self._what(error, facts)}{likely_reason(facts)}", facts, self._advice(facts)) from error

    def with_hosts(self, came: Sequence[str]) -> str:
        """The line about a start with hosts that came back."""
        start = f"goes on from {self.saved}" if self.saved is not None else "starts over"
        return f"hosts    {' and '.join(came)} came; {self._name} {start}"

    def _outlook(self, error: WorkersFailed, facts: FailureFacts) -> Literal["may pass", "stays"]:
        """A program that ended itself did so on purpose; one that lost a host continues without it."""
        if self.saved is None or error.stopped_by != "finished" or facts.cause == "ended":
            return "stays"
        passes = facts.cause == "host lost" or may_pass(facts, did_steps=True)  # it has saved, so it did
        return "may pass" if passes else "stays"

    def _what(self, error: WorkersFailed, facts: FailureFacts) -> str:
        if facts == error.facts:
            return error.summary
        return f"rank {facts.rank} was killed by the kernel, which had no memory left"

    def _advice(self, facts: FailureFacts) -> str:
        """The fix, and how the program continues, or would have continued by itself."""
        return "; ".join(part for part in (self._remedy(facts), self._way_on()) if part)

    def _remedy(self, facts: FailureFacts) -> str:
        if facts.cause == "out of memory":
            return LESS_MEMORY
        if facts.what == "SIGKILL":
            return f"if so, {LESS_MEMORY}"
        if facts.what == "SIGBUS":
            return "fix that"
        if facts.cause in ("killed", "ended") and facts.host is None and facts.rank is not None:
            return f"see what it printed {'above and ' if facts.rank == 0 else ''}in {self._logs}/rank-{facts.rank}.log"
        return ""

    def _way_on(self) -> str:
        if self.saved is not None:
            return f"run the same command again: its run.resume goes on from {self.saved}"
        return (
            'a program that calls run.resume(FOLDER, missing="begin") before run.batches, and run.save(FOLDER) every '
            "some steps, is started again by itself"
        )
