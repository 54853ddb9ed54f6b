"""Turns the failure that ended a job into the error for its caller: one sentence for people, facts for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import PlaitError, ProgramFailed, RunFailed
from plait.launch.values.failure import (
    RESUME_ADVICE,
    Failure,
    HostLost,
    RankDied,
    RankHung,
    RankRaised,
    class_name,
    signal_name,
)
from plait.launch.values.job import StoppedBy

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
    """Workers were lost by what may not happen again: not by what the user asked for, and told of by no PlaitError."""

    def __init__(self, sentence: str, facts: FailureFacts) -> None:
        super().__init__(sentence)
        self.facts = facts
        self.stopped_by: StoppedBy = "finished"
        """The stop signal that had come before, if any."""

    @property
    def summary(self) -> str:
        """What happened, without advice: for one who need not do anything."""
        return str(self).partition(";")[0].partition(", often ")[0]


class HostNotServed(PlaitError):
    """A joined host could not take what a start of the workers needs there, for a reason of its own."""

    def __init__(self, sentence: str, host: str) -> None:
        super().__init__(sentence)
        self.facts = FailureFacts(cause="no room", host=host, what=sentence.partition(";")[0])


def lost_host(host: str, how: str | None) -> WorkersFailed:
    """Another host was lost while no ranks ran; `how` is the end of a sentence."""
    return WorkersFailed(f"{host} was lost: {how}; {RESUME_ADVICE}", FailureFacts(cause="host lost", host=host))


def error_for_caller(failure: Failure, log: str, *, host: str | None = None) -> PlaitError:
    """The exception for the supervisor's caller; `log` says where more can be read ("in runs/x/rank-1.log").

    `host` names the machine of the failure where it is not this one.
    """
    where = f" on {host}" if host else ""
    if isinstance(failure, RankRaised) and failure.plait_classes:
        prefix = f"on {host}: " if host else ""
        return _known_class(failure.plait_classes)(prefix + failure.text)
    if isinstance(failure, HostLost):
        return WorkersFailed(failure.sentence, FailureFacts(cause=failure.cause, host=host))
    if isinstance(failure, RankDied):
        name = signal_name(-failure.code) if failure.code < 0 else f"exit code {failure.code}"
        facts = FailureFacts(cause="killed" if failure.code < 0 else "ended", rank=failure.rank, host=host, what=name)
        return WorkersFailed(_death_sentence(failure, where, log), facts)
    if isinstance(failure, RankHung):
        return WorkersFailed(_hang_sentence(failure, where), _hang_facts(failure, host))
    cause = "out of memory" if failure.out_of_memory else "lost connection" if failure.lost_peer else "raised"
    facts = FailureFacts(cause=cause, rank=failure.rank, host=host, what=f"{failure.type_name}: {failure.text}")
    return WorkersFailed(_exception_sentence(failure, where, log), facts)


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


def _hang_sentence(hang: RankHung, where: str) -> str:
    who = f"rank {hang.rank}{where}"
    line = f" ({hang.line})" if hang.line else ""
    others = f", while the others waited in {hang.others_in}" if hang.others_in else ""
    how = {"stopped": "was stopped by a signal", "working": "got no further while it computed"}.get(
        hang.state, "got no further"
    )
    return f"{who} {how} in {hang.place}{line} for {hang.silent_s:.0f} s{others}, and was ended; {RESUME_ADVICE}"


def _death_sentence(death: RankDied, where: str, log: str) -> str:
    who = f"rank {death.rank}{where}"
    if death.code == 0:
        return f"{who} left before its work was done; see what it printed {log}, and please report it"
    if death.code > 0:
        return f"{who} ended with exit code {death.code}; see what it printed {log}, then {RESUME_ADVICE}"
    name = signal_name(-death.code)
    return f"{who} was killed by {name}{_SIGNAL_HINTS.get(name, f'; see what it printed {log}, then')} {RESUME_ADVICE}"


# Each ends so that the advice to run again follows.
_SIGNAL_HINTS = {
    "SIGKILL": ", often the kernel's out-of-memory killer; if so, try a smaller layout.micro_sequences, else",
    "SIGBUS": ", often a full disk or /dev/shm, or a data file cut short while in use; fix that, then",
}


def _exception_sentence(failure: RankRaised, where: str, log: str) -> str:
    who = ("starting the workers" if failure.rank is None else f"rank {failure.rank}") + where
    what = f"{failure.type_name}: {failure.text}" if failure.text else failure.type_name
    if failure.out_of_memory:
        return f"{who} ran out of memory ({what}); try a smaller layout.micro_sequences"
    if failure.lost_peer:
        return f"{who} lost its connection to another rank ({what}; at {failure.place}); {RESUME_ADVICE}"
    return (
        f"{who} failed with {what} (at {failure.place}); this is a bug in plait, "
        f"please report it with the full traceback {log}"
    )


def _known_class(names: Sequence[str]) -> type[PlaitError]:
    """The nearest of the classes that are made of one sentence; nothing is imported on a rank's word."""
    known = {class_name(kind): kind for kind in (ProgramFailed, RunFailed, PlaitError)}
    return next((known[name] for name in names if name in known), PlaitError)
