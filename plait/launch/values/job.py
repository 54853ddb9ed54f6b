"""The values of the launch floor: what to start, what a rank knows of itself, what it sends, how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plait.errors import Interrupted, StopSignal
from plait.launch.values.copies import CopyStore
from plait.launch.values.progress import NO_REPORT, ProgressReport

RANKS_AT_MOST = 250
"""One message carries every rank's channel to the fork server, with three more; Linux passes 253 descriptors in one."""

_ENTRY_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

LONGEST_ARGUMENT = 1 << 19
NO_LIMIT_S = 1e9
"""Longer than any job runs."""
THREADS_AT_MOST = 1 << 16
"""More than any machine has processors."""

NOTE = "note"
"""Kind of the message, of rank 0 or as if of rank 0, whose "text" is a line for the log."""
DETAIL = "detail"
"""Kind of the message, of rank 0, whose "text" is a line for the log of somebody who asked for details."""
STOPPING = "stopping"
"""Kind of the message, as if of rank 0, by which a supervisor says that the ranks have been asked to end."""

StoppedBy = Literal["finished", StopSignal]
STOP_IN_WORDS = "finishing this step and saving"
AtStop = Literal["save", "abandon"]
"""The effect of the first stop signal on a job's ranks: they save and return, or are killed at once."""
JobEnd = Literal["over", "paused"]
"""paused: its ranks ended before they were done, because the hosts of the run change; they have saved, as a job with
`at_stop` "save" does then, and a program before."""
LeftBy = Literal["left by SIGINT", "left by SIGTERM", "left by SIGHUP"]
"""A signal stopped one joined host, and the run goes on without it."""
SIGNAL_OF_LEAVING: Mapping[LeftBy, StopSignal] = {
    "left by SIGINT": "SIGINT",
    "left by SIGTERM": "SIGTERM",
    "left by SIGHUP": "SIGHUP",
}
"""Signals that stop a host and not the run; SIGUSR1 is a scheduler's warning, which it sends to all."""
ReleasedBy = Literal[StoppedBy, "not needed", LeftBy]
"""The reason why a joined host's part in a run ended: the run's end, the layout left the host out, or the host left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """The ranks of a job that one of several hosts runs: their number, and the first of them."""

    first_rank: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """N ranks of one entry, named as in the EntryTable of the host that runs them; each rank calls it with its context
    and `argument`.

    All are on this machine, unless it is one of several hosts and `part` says which are its own. `log_dir` (an
    existing directory) gets `rank-N.log`: everything the ranks but rank 0 print, and every rank's traceback. Without
    it the ranks share the terminal. With `at_stop` "abandon" a stop signal kills the ranks at once, in the
    middle of a step: an unfinished measurement, say, is worth nothing. After `limit_s` seconds, counted from when all
    ranks run, the ranks are killed and the job raises OutOfTime.
    """

    entry: str
    argument: str
    world_size: int
    threads: int
    log_dir: str | None = None
    part: HostRanks | None = None
    at_stop: AtStop = "save"
    limit_s: float = NO_LIMIT_S
    needs: tuple[str, ...] = ()
    """Names in EntryTable.optional: imported once for all ranks of a host, and not by each for itself."""

    def __post_init__(self) -> None:
        if not _ENTRY_NAME.fullmatch(self.entry):
            raise ValueError(f"entry {self.entry!r} is not a name of small letters, digits and underscores")
        if not 0 <= self.first_rank <= self.first_rank + self.ranks <= self.world_size:
            raise ValueError(f"{self.part} is no part of {self.world_size} ranks")
        if len(self.argument) > LONGEST_ARGUMENT:
            raise ValueError(f"an argument of {len(self.argument)} characters; a job has {LONGEST_ARGUMENT} at most")
        if not 1 <= self.threads <= THREADS_AT_MOST:
            raise ValueError(f"threads = {self.threads}: a rank needs 1 to {THREADS_AT_MOST}")

    @property
    def ranks(self) -> int:
        """How many ranks run on this machine."""
        return self.part.ranks if self.part else self.world_size

    @property
    def first_rank(self) -> int:
        """The number of this machine's first rank; the others follow it."""
        return self.part.first_rank if self.part else 0

    @property
    def own_ranks(self) -> range:
        """The numbers of the ranks that run on this machine."""
        return range(self.first_rank, self.first_rank + self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message from a rank to its supervisor: a kind and JSON values."""

    rank: int
    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's place among its peers, and its two wires: `send` to the supervisor, `stop_requested` from it.

    `rendezvous` is for `parallel.mesh.open_store`: a file's path; for several hosts "tcp://HOST:PORT/NAME";
    "env://" under torchrun.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    threads: int
    rendezvous: str
    channel: Callable[[str, Mapping[str, Any]], None]
    stop: Callable[[], bool]
    progress: ProgressReport = NO_REPORT
    """Where the rank reports its progress, to detect ranks that hang."""
    memory: CopyStore | None = None
    """Keeps copies of its state that outlive it; None if no process holds them, as under torchrun."""

    def send(self, kind: str, **values: Any) -> None:
        """Send one message to the supervisor; values must be JSON, at most 1 MiB; may be called from any thread."""
        self.channel(kind, values)

    def stop_requested(self) -> bool:
        """Whether this rank should save and return; ranks may see it at different steps."""
        return self.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job whose ranks all returned came to its end, and how long it ran."""

    stopped_by: StoppedBy
    wall_s: float
    how: JobEnd = "over"

    def require_finished(self) -> None:
        """Raise Interrupted where a signal stopped the job."""
        if self.stopped_by != "finished":
            raise Interrupted(self.stopped_by)
