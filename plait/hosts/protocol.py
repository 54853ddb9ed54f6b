"""The frames that hosts exchange, as frozen values: nothing that arrives is used before it was checked here."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from plait.checked_json import SingleLine, typed_value
from plait.errors import PlaitError
from plait.hosts.wire import BLOB_BYTES_AT_MOST
from plait.launch.local.signals import StopSignal
from plait.launch.local.site import KillOrder, RankEvent
from plait.launch.values.failure import RankRaised
from plait.launch.values.job import RANKS_AT_MOST, Job, ReleasedBy
from plait.launch.values.progress import RankProgress

_T = TypeVar("_T")
_RENDEZVOUS = re.compile(r"tcp://(\[[0-9a-f:.]+\]|[0-9.]+):[0-9]{1,5}/job-[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind:
    """How many bytes may stand beside a request's and its reply's values, and how long the reply may take."""

    blob_bytes: int = 0
    reply_blob_bytes: int = 0
    reply_within_s: float = 600.0
    """Seconds in which the other host replies to nothing at all, after which it counts as lost."""


REQUESTS: Mapping[str, RequestKind] = {
    "take": RequestKind(reply_within_s=6 * 3600.0),  # it hashes the files that it has
    "block": RequestKind(blob_bytes=BLOB_BYTES_AT_MOST, reply_within_s=3600.0),  # after the last one it waits for disks
    "put": RequestKind(blob_bytes=BLOB_BYTES_AT_MOST),
    "read": RequestKind(reply_blob_bytes=BLOB_BYTES_AT_MOST),
}
"""The requests that carry bytes or take long; all other requests, and all other frames, carry none."""


class UnexpectedMessage(PlaitError):
    """The other end of a connection sent what no plait of this version sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """Host 0: start your ranks of this job; `rendezvous` is None where they are all yours."""

    number: int
    job: Job
    rendezvous: str | None

    def __post_init__(self) -> None:
        # Any other text would be the path of a file, which ranks would write.
        if self.rendezvous is not None and not _RENDEZVOUS.fullmatch(self.rendezvous):
            raise ValueError("StartOrder.rendezvous is no address")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalOrder:
    """Host 0: send a signal to your ranks of job `number`, and tell a person why, if it says so."""

    number: int
    order: KillOrder
    why: SingleLine = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillServerOrder:
    """Host 0: end the process that started your ranks of job `number`."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Host 0: you are not admitted, and why."""

    sentence: SingleLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Host 0: tell your user this."""

    sentence: SingleLine


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """Host 0: your part in the run is over; `failed` says why, where the run failed."""

    stopped_by: ReleasedBy = "finished"
    failed: SingleLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """Either end: I am about to hang up, and why, as the end of a sentence."""

    why: SingleLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Host 0: what does your handler of this kind reply?"""

    number: int
    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A joined host: what the handler replied to question `number`, or the error that it raised."""

    number: int
    values: Mapping[str, Any] | None = None
    raised: RankRaised | None = None

    def __post_init__(self) -> None:
        if (self.values is None) == (self.raised is None):
            raise ValueError("an answer holds either values or an error")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesQuestion:
    """Host 0: of which steps do you hold whole copies of the state of all your ranks, of this lineage?"""

    ranks: int
    lineage: int

    def __post_init__(self) -> None:
        if not 0 <= self.ranks <= RANKS_AT_MOST:
            raise ValueError(f"{self.ranks} ranks on one host")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesAnswer:
    """A joined host: of these."""

    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReport:
    """A joined host: what happened to a rank of job `number`, and when this was sent, by that host's clock."""

    number: int
    event: Mapping[str, Any]
    sent_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    rank: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    rank: int
    told: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Returned:
    rank: int
    returned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised:
    raised: RankRaised
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    rank: int
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Died:
    died: int
    code: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Over:
    over: bool
    reason: SingleLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forked:
    forked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    progress: tuple[RankProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    stop: StopSignal


_Event = _Started | _Told | _Returned | _Raised | _Ended | _Died | _Over | _Forked | _Progress | _Stop
_EVENTS: Mapping[str, type[_Event]] = {
    "started": _Started,
    "told": _Told,
    "returned": _Returned,
    "raised": _Raised,
    "ended": _Ended,
    "died": _Died,
    "over": _Over,
    "forked": _Forked,
    "progress": _Progress,
    "stop": _Stop,
}
"""What can happen at a joined host, by the key that says it (see the note on events in local/site.py)."""


def parse_message(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A frame's values as the message that it must be; raises UnexpectedMessage for anything else."""
    try:
        return typed_value(kind, values)
    except ValueError as error:
        raise UnexpectedMessage(
            f"it sent what plait does not send ({error}); install the same commit on both"
        ) from None


def parse_event(report: EventReport, job: Job) -> RankEvent:
    """An event of another host's part of a job, with moments of our clock; the journey's own time is left in them.

    Raises UnexpectedMessage for what is no event, and for one of a rank that this host does not run.
    """
    kinds = [kind for key, kind in _EVENTS.items() if key in report.event]
    event = parse_message(kinds[0] if kinds else _Forked, report.event)
    if any(rank is not None and rank not in job.own_ranks for rank in _ranks_of(event)):
        raise UnexpectedMessage("it sent word of a rank that it does not run; install the same commit on both")
    later_s = time.monotonic() - report.sent_at_s
    if isinstance(event, _Died):
        event = replace(event, at_s=event.at_s + later_s)
    if isinstance(event, _Raised):
        event = replace(event, raised=replace(event.raised, at_s=event.raised.at_s + later_s))
    return asdict(event)


def _ranks_of(event: _Event) -> list[int | None]:
    """Every rank that an event speaks of; None for an error before there were ranks."""
    if isinstance(event, _Raised):
        return [event.rank, event.raised.rank]
    if isinstance(event, _Died):
        return [event.died]
    if isinstance(event, _Progress):
        return [one.rank for one in event.progress]
    return [] if isinstance(event, _Over | _Forked | _Stop) else [event.rank]
