"""How far a rank is, as a value: what it publishes, and what its supervisor sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

ProcessState = Literal["working", "waiting", "stopped", "gone"]
"""working: it runs, or waits for a processor or a disk. waiting: it sleeps. stopped: by a signal such as SIGSTOP."""


class ProgressReport(Protocol):
    """Where a rank reports its progress; a call costs about a microsecond and never blocks."""

    def phase(self, name: str) -> None:
        """The rank enters a phase of its work; up to 40 characters."""
        ...

    def step(self, number: int) -> None:
        """The rank begins its step of this number."""
        ...

    def collective(self) -> None:
        """The rank enters one more operation in which it waits for others."""
        ...

    def moved(self, nbytes: int) -> None:
        """Bytes, counted from any beginning, of the files that the rank waits for now: where they grow, it is not
        stuck."""
        ...


class NoReport:
    """The report of ranks that are not watched: torchrun's, and tests'."""

    def phase(self, name: str) -> None:
        """Does nothing."""

    def step(self, number: int) -> None:
        """Does nothing."""

    def collective(self) -> None:
        """Does nothing."""

    def moved(self, nbytes: int) -> None:
        """Does nothing."""


NO_REPORT = NoReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """What is seen of one rank at one moment; `changes` counts what it published, so an equal count is silence.

    `cpu_s` is the processor time that its process has used; None right after the rank has published something, when it
    is not looked up. `network_bytes` and `file_bytes` only ever grow, but for connections that close: what the
    process's TCP connections have carried both ways (None if it was not looked up, or the kernel does not say), and
    what the rank itself counts of files that it waits for.
    """

    rank: int
    changes: int
    step: int
    collective: int
    phase: str
    state: ProcessState
    cpu_s: float | None
    longest_s: float | None
    """How long this phase took the rank at most so far; None in a phase that it is in for the first time."""
    network_bytes: int | None = None
    file_bytes: int = 0
    sends_to: str = ""
    """The address that most of its unsent bytes go to; "" where none waits."""

    @property
    def place(self) -> str:
        """The phase and step in words."""
        return f"{self.phase} of step {self.step}" if self.step else self.phase
