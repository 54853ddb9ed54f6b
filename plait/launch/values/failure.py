"""The failures of ranks and hosts as values, and the error that a job's caller gets for one: a sentence for people,
facts for programs. Pure but for its clock."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.checked_json import SingleLine
from plait.errors import PlaitError, ProgramFailed, RunFailed
from plait.launch.values.job import StoppedBy
from plait.launch.values.progress import ProcessState

RESUME_ADVICE = "run the same command again to go on from the newest checkpoint, or from the start if there is none yet"
_TEXT_CHARACTERS = 2_000
_TRACEBACK_CHARACTERS = 64_000
_PACKAGE = Path(__file__).parents[2]
_RANK_FILE = _PACKAGE / "launch" / "local" / "rank.py"
# How gloo and the kernel say that it is the other side that has gone.
_LOST_PEER_TEXTS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
_NO_MEMORY_TEXTS = ("can't allocate memory", "CUDA out of memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception that left a rank's entry, in the form that travels; rank None means before any rank existed.

    `plait_classes` names the exception's own classes down to PlaitError, and is empty for any other exception.
    """

    rank: int | None
    at_s: float
    type_name: SingleLine
    text: SingleLine
    """The error; for a PlaitError without its advice, if that is given separately."""
    place: SingleLine
    plait_classes: tuple[str, ...]
    lost_peer: bool
    out_of_memory: bool
    traceback: str
    advice: SingleLine = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied:
    """A rank that ended without a word; `code` is its exit code, or minus the signal that killed it."""

    rank: int
    at_s: float
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost:
    """The process that starts a host's ranks, or the whole host, and with it the ranks; `what` says how.

    `cause` is "no answer" where the host itself lives.
    """

    at_s: float
    what: str
    cause: Literal["host lost", "no answer"] = "host lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHung:
    """A rank that no longer got on, and for which the others waited; it is killed.

    `place` is its phase and step, `line` the innermost line of its Python stack inside plait ("" where none was got).
    """

    rank: int
    at_s: float
    state: ProcessState
    silent_s: float
    place: str
    others_in: str
    line: str
    stack: str


Failure = RankRaised | RankDied | HostLost | RankHung


def describe_exception(error: BaseException, rank: int | None) -> RankRaised:
    """Describe an exception where it was caught; `at_s` is the machine's monotonic clock, the same in all processes."""
    is_plait = isinstance(error, PlaitError)
    text, advice = (error.cause, error.advice) if isinstance(error, PlaitError) else (_first_line(error), "")
    return RankRaised(
        rank=rank,
        at_s=time.monotonic(),
        type_name=type(error).__name__,
        text=text[:_TEXT_CHARACTERS],
        advice=advice[:_TEXT_CHARACTERS],
        place=_place(error),
        plait_classes=_plait_classes(type(error)) if is_plait else (),
        lost_peer=any(_is_lost_peer(link) for link in _chain(error)),
        out_of_memory=isinstance(error, MemoryError) or any(part in _text(error) for part in _NO_MEMORY_TEXTS),
        traceback=_shown_traceback(error)[-_TRACEBACK_CHARACTERS:],
    )


def is_shown_traceback(failure: RankRaised) -> bool:
    """Whether a person needs the traceback: that of our bugs and of their own programs, not of what a sentence
    fixes."""
    return not failure.plait_classes or class_name(ProgramFailed) in failure.plait_classes


def _shown_traceback(error: BaseException) -> str:
    if isinstance(error, ProgramFailed):
        return error.program_traceback
    return "".join(traceback.format_exception(error))


def rank_raised_from(values: dict[str, Any]) -> RankRaised:
    """A RankRaised from its JSON values; the inverse of `dataclasses.asdict`."""
    return RankRaised(**{**values, "plait_classes": tuple(values["plait_classes"])})


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: the first that is not merely the loss of a peer, else the first."""
    return min(failures, key=lambda failure: (isinstance(failure, RankRaised) and failure.lost_peer, failure.at_s))


def signal_name(number: int) -> str:
    """9 -> "SIGKILL"; real-time signals have no name and keep their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(error: BaseException) -> str:
    return _text(error).partition("\n")[0].strip()


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:
        return "its message cannot be shown"


def _place(error: BaseException) -> str:
    """file:line of the innermost frame inside plait, else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    ours = [frame for frame in frames if _is_ours(Path(frame.filename))]
    frame = (ours or frames)[-1]
    path = Path(frame.filename)
    shown = path.relative_to(_PACKAGE.parent) if ours else path
    return f"{shown}:{frame.lineno}"


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(_PACKAGE) and path != _RANK_FILE


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_lost_peer(error: BaseException) -> bool:
    # By name: torch's DistError and its children, without importing torch here.
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(part in _first_line(error) for part in _LOST_PEER_TEXTS)


def _plait_classes(kind: type) -> tuple[str, ...]:
    return tuple(class_name(base) for base in kind.__mro__ if issubclass(base, PlaitError))


def class_name(kind: type) -> str:
    """How a class is named where it travels."""
    return f"{kind.__module__}:{kind.__qualname__}"


Cause = Literal[
    "killed", "ended", "raised", "out of memory", "lost connection", "hung", "host lost", "no answer", "no room"
]
"""killed: by a signal. ended: left by itself. no answer: what starts the workers, or a worker at its start.
no room: a joined host can keep neither its part of a checkpoint nor what a start needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFacts:
    """What ended a job, for programs: `rank` and `host` where they are known, `host` None for this machine.

    `what` is the signal, the exit code or the exception; `place` and `stack` are known of a rank that hung.
    """

    cause: Cause
    rank: int | None = None
    host: str | None = None
    what: str = ""
    place: str = ""
    stack: str = ""
    silent_s: float = 0.0


class WorkersFailed(RunFailed):
    """Workers were lost to something that may not happen again: no stop by the user, and no PlaitError of theirs."""

    def __init__(self, cause: str, facts: FailureFacts, advice: str = RESUME_ADVICE) -> None:
        super().__init__(cause, advice)
        self.facts = facts
        self.stopped_by: StoppedBy = "finished"
        """The stop signal that had come before, if any."""

    @property
    def summary(self) -> str:
        """The event without advice, for someone who need not do anything."""
        return self.cause.removesuffix(likely_reason(self.facts))


class HostNotServed(PlaitError):
    """A joined host could not take what a start of the workers needs there, for a reason of its own."""

    def __init__(self, error: PlaitError, host: str) -> None:
        super().__init__(error.cause, error.advice)
        self.facts = FailureFacts(cause="no room", host=host, what=error.cause)


def lost_host(host: str, how: str | None) -> WorkersFailed:
    """Another host was lost while no ranks ran; `how` is the end of a sentence."""
    return WorkersFailed(f"{host} was lost: {how}", FailureFacts(cause="host lost", host=host))


def error_for_caller(failure: Failure, log: str, *, host: str | None = None) -> PlaitError:
    """The exception for the supervisor's caller; `log` says where more can be read ("in runs/x/rank-1.log").

    `host` names the machine of the failure where it is not this one.
    """
    where = f" on {host}" if host else ""
    if isinstance(failure, RankRaised) and failure.plait_classes:
        prefix = f"on {host}: " if host else ""
        return _known_class(failure.plait_classes)(prefix + failure.text, failure.advice)
    if isinstance(failure, HostLost):
        return WorkersFailed(failure.what, FailureFacts(cause=failure.cause, host=host))
    if isinstance(failure, RankDied):
        name = signal_name(-failure.code) if failure.code < 0 else f"exit code {failure.code}"
        facts = FailureFacts(cause="killed" if failure.code < 0 else "ended", rank=failure.rank, host=host, what=name)
        return _death_error(failure, where, log, facts)
    if isinstance(failure, RankHung):
        return WorkersFailed(_hang_text(failure, where), _hang_facts(failure, host))
    cause = "out of memory" if failure.out_of_memory else "lost connection" if failure.lost_peer else "raised"
    facts = FailureFacts(cause=cause, rank=failure.rank, host=host, what=f"{failure.type_name}: {failure.text}")
    return _exception_error(failure, where, log, facts)


def _hang_facts(hang: RankHung, host: str | None) -> FailureFacts:
    return FailureFacts(
        cause="hung",
        rank=hang.rank,
        host=host,
        what=hang.state,
        place=hang.place,
        stack=hang.stack,
        silent_s=round(hang.silent_s, 1),
    )


def _hang_text(hang: RankHung, where: str) -> str:
    who = f"rank {hang.rank}{where}"
    line = f" ({hang.line})" if hang.line else ""
    others = f", while the others waited in {hang.others_in}" if hang.others_in else ""
    how = {"stopped": "was stopped by a signal", "working": "got no further while it computed"}.get(
        hang.state, "got no further"
    )
    return f"{who} {how} in {hang.place}{line} for {hang.silent_s:.0f} s{others}, and was ended"


def _death_error(death: RankDied, where: str, log: str, facts: FailureFacts) -> WorkersFailed:
    who, printed = f"rank {death.rank}{where}", f"see what it printed {log}"
    if death.code == 0:
        return WorkersFailed(f"{who} left before its work was done", facts, f"{printed}, and please report it")
    if death.code > 0:
        return WorkersFailed(f"{who} ended with {facts.what}", facts, f"{printed}, then {RESUME_ADVICE}")
    advice = _SIGNAL_ADVICE.get(facts.what, f"{printed}, then")
    return WorkersFailed(f"{who} was killed by {facts.what}{likely_reason(facts)}", facts, f"{advice} {RESUME_ADVICE}")


def likely_reason(facts: FailureFacts) -> str:
    """The usual sender of the signal that killed a rank, as the end of a sentence; empty if unknown."""
    return f", {SIGNAL_CAUSES[facts.what]}" if facts.what in SIGNAL_CAUSES else ""


SIGNAL_CAUSES = {
    "SIGKILL": "often the kernel's out-of-memory killer",
    "SIGBUS": "often a full disk or /dev/shm, or a data file cut short while in use",
}
"""The usual senders of these signals."""
_LESS_MEMORY = "take smaller micro-batches (layout.micro_sequences)"
# Each ends so that the advice to run again follows.
_SIGNAL_ADVICE = {"SIGKILL": f"if so, {_LESS_MEMORY}, else", "SIGBUS": "fix that, then"}


def _exception_error(failure: RankRaised, where: str, log: str, facts: FailureFacts) -> WorkersFailed:
    who = ("starting the workers" if failure.rank is None else f"rank {failure.rank}") + where
    what = f"{failure.type_name}: {failure.text}" if failure.text else failure.type_name
    if failure.out_of_memory:
        return WorkersFailed(f"{who} ran out of memory ({what})", facts, _LESS_MEMORY)
    if failure.lost_peer:
        return WorkersFailed(f"{who} lost its connection to another rank ({what}; at {failure.place})", facts)
    return WorkersFailed(
        f"{who} failed with {what} (at {failure.place})",
        facts,
        f"this is a bug in plait, please report it with the full traceback {log}",
    )


def _known_class(names: Sequence[str]) -> type[PlaitError]:
    """The nearest of the classes that are made of one sentence; nothing is imported on a rank's word."""
    known = {class_name(kind): kind for kind in (ProgramFailed, RunFailed, PlaitError)}
    return next((known[name] for name in names if name in known), PlaitError)
