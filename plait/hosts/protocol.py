"""The messages between the hosts of a run, as frozen values; what arrives is checked here before it is used.

Host 0 sends orders, and requests that a joined host answers; a joined host sends reports about its ranks. A request
stands with its question, its reply and its handler in the file of its subject.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from plait.checked_json import SingleLine, typed_value
from plait.errors import PlaitError
from plait.launch.local.site import KillOrder
from plait.launch.values.failure import RankRaised
from plait.launch.values.job import Job, ReleasedBy
from plait.launch.values.progress import RankProgress

_T = TypeVar("_T")
_Q = TypeVar("_Q")
_A = TypeVar("_A")
_RENDEZVOUS = re.compile(r"tcp://(\[[0-9a-f:.]+\]|[0-9.]+):[0-9]{1,5}/job-[0-9]{1,9}")
ODD_REQUEST_ADVICE = "the host that leads asks for it; install the same commit of plait on both"
"""The end of a sentence about a request that plait does not send."""


class UnexpectedMessage(PlaitError):
    """The other end of a connection sent what no plait of this version sends."""


def parse_message(kind: type[_T], values: object) -> _T:
    """A frame's values as the message that it must be; raises UnexpectedMessage for anything else."""
    try:
        return typed_value(kind, values)
    except ValueError as error:
        raise UnexpectedMessage(f"it sent an unknown message ({error}); install the same commit on both") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind(Generic[_Q, _A]):
    """Something that host 0 may ask of a joined host: the types of the question and of the reply, how many bytes may
    stand beside each, and how long the reply may take."""

    name: str
    question: type[_Q]
    reply: type[_A]
    blob_bytes: int = 0
    reply_blob_bytes: int = 0
    reply_within_s: float = 600.0
    """Seconds in which the other host replies to nothing at all, after which it counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A question or a reply without values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[_A]):
    """The reply to a request, and the bytes beside it."""

    values: _A
    blob: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReply:
    """How many bytes a file has in all; some of them come beside it."""

    size: int


DONE = Reply(values=Nothing())
Handlers = Mapping[RequestKind[Any, Any], Callable[[Any, bytes], Reply[Any]]]
"""What a joined host answers: for each request a function of the question and the bytes beside it."""


class Peer(Protocol):
    """Another host that answers requests; `ask` blocks until it has replied."""

    @property
    def name(self) -> str: ...
    def ask(self, request: RequestKind[_Q, _A], question: _Q, blob: bytes = b"") -> Reply[_A]: ...


def answer_request(handlers: Handlers, name: str, values: object, blob: bytes) -> Reply[Any]:
    """This host's reply; raises PlaitError for an unknown or invalid request."""
    request = next((one for one in handlers if one.name == name), None)
    if request is None:
        raise UnexpectedMessage("it received an unknown request; install the same commit on both")
    try:
        question = typed_value(request.question, values)
    except ValueError as error:
        raise PlaitError(
            f"the host that leads sent an invalid request ({error}); install the same commit on both"
        ) from None
    return handlers[request](question, blob)


def parse_reply(request: RequestKind[Any, _A], values: object, blob: bytes, host: str) -> Reply[_A]:
    """Another host's reply; raises PlaitError, with the host's name, for an invalid one."""
    try:
        return Reply(values=typed_value(request.reply, values), blob=blob)
    except ValueError as error:
        raise PlaitError(f"{host} sent an invalid reply ({error}); install the same commit on both") from None


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
    """Host 0: send a signal to your ranks of job `number`; `why`, if any, is for the user there."""

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
class EventReport:
    """A joined host: what happened to a rank of job `number` (see remote_ranks.py), and when this was sent, by that
    host's clock."""

    number: int
    event: Mapping[str, Any]
    sent_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProgress:
    """A joined host: how far its ranks of job `number` are."""

    number: int
    ranks: tuple[RankProgress, ...]


HostMessage = StartOrder | SignalOrder | KillServerOrder | Refusal | Notice | RunEnd | EventReport | RanksProgress
MESSAGES: Mapping[str, type[HostMessage]] = {
    "run": StartOrder,
    "signal": SignalOrder,
    "kill": KillServerOrder,
    "refused": Refusal,
    "notice": Notice,
    "end": RunEnd,
    "event": EventReport,
    "progress": RanksProgress,
}
MESSAGE_NAMES = {kind: name for name, kind in MESSAGES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Either end: I am about to disconnect, and why, as the end of a sentence."""

    why: SingleLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Host 0: a request of this kind, with the values of its question."""

    number: int
    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A joined host: the values of the answer to request `number`, or the error that the handler raised."""

    number: int
    values: Mapping[str, Any] | None = None
    raised: RankRaised | None = None

    def __post_init__(self) -> None:
        if (self.values is None) == (self.raised is None):
            raise ValueError("an answer holds either values or an error")
