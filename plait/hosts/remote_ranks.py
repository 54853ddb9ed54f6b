"""The ranks of a job on another host: what happens to them, and the orders to them, as host 0's supervisor sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, make_dataclass
from typing import Any

from plait.checked_json import SingleLine
from plait.errors import StopSignal
from plait.hosts.connection import HostConnection
from plait.hosts.protocol import (
    EventReport,
    KillServerOrder,
    RanksProgress,
    SignalOrder,
    StartOrder,
    UnexpectedMessage,
    parse_message,
)
from plait.launch.local.site import KillOrder, RankEvent
from plait.launch.values.failure import RankRaised
from plait.launch.values.job import Job
from plait.launch.values.progress import RankProgress


def _event(**fields: Any) -> type[Any]:
    """The type of an event with these fields; a pair is a type and the value of a field that is left out."""
    parts = [(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in fields.items()]
    return make_dataclass("Event", parts, frozen=True, slots=True, kw_only=True)


_EVENTS: Mapping[str, type[Any]] = {
    "started": _event(rank=int, started=int),
    "message": _event(rank=int, message=str, values=Mapping[str, Any]),
    "returned": _event(rank=int, returned=bool),
    "raised": _event(raised=RankRaised, rank=(int | None, None)),
    "ended": _event(rank=int, ended=bool),
    "died": _event(died=int, code=int, at_s=float),
    "over": _event(over=bool, reason=(SingleLine | None, None)),
    "forked": _event(forked=bool),
    "stop": _event(stop=StopSignal),
}
"""What can happen at a joined host, by the key that says it: see Note [events] in launch/local/site.py."""


class RemoteWorkerHost:
    """One host's part of job `number`; `start` sends it there. A WorkerHost whose events travel over the link.

    A host that reports what no plait reports is left. It can report of its own ranks alone, and of each only one start,
    one error and one end, so that it cannot fill this host's memory.
    """

    def __init__(self, job: Job, link: HostConnection, *, host: str, number: int) -> None:
        self.job = job
        self.host = host
        self.address = link.address
        self.link = link
        self._number = number
        self._over = False
        self._reported = set[tuple[str, int | None]]()
        """The reports that may come once for each rank, and came: their kind and the rank."""
        self._progress: Sequence[RankProgress] = ()

    def start(self, rendezvous: str | None) -> None:
        """Have the host start its ranks; a host that is lost meanwhile is heard of through `read`."""
        self.link.send(StartOrder(number=self._number, job=self.job, rendezvous=rendezvous))

    def fileno(self) -> int:
        return self.link.fileno()

    def read(self) -> list[RankEvent]:
        events: list[RankEvent] = []
        for message in self.link.read():
            if not isinstance(message, EventReport | RanksProgress) or message.number != self._number or self._over:
                continue
            try:
                if isinstance(message, EventReport):
                    events.append(self._noted(parse_event(message, self.job)))
                else:
                    _require_own([one.rank for one in message.ranks], self.job)
                    self._progress = message.ranks
            except UnexpectedMessage as error:
                self.link.leave(str(error))
        if self.link.lost is not None and not self._over:
            self._over = True
            reason = f"{self.host} was lost: {self.link.lost}"
            events.append({"over": True, "lost": True, "reason": reason})
        return events

    def signal(self, order: KillOrder, why: str = "") -> None:
        self.link.send(SignalOrder(number=self._number, order=order, why=why))

    def kill(self) -> None:
        self.link.send(KillServerOrder(number=self._number))

    def observe(self) -> Sequence[RankProgress]:
        """The progress that the host last reported; it looks every half second."""
        return self._progress

    def stack_of(self, rank: int) -> str:
        """None: the host keeps it to itself."""
        return ""

    def is_server_stopped(self) -> bool:
        """No: the host looks after its own, and says how it ended."""
        return False

    def _noted(self, event: RankEvent) -> RankEvent:
        for kind in event.keys() & _ONCE.keys():
            reported = kind, event.get("rank", event.get("died"))
            if reported in self._reported:
                raise UnexpectedMessage(f"{_ONCE[kind]}; install the same commit on both")
            self._reported.add(reported)
        self._over = "over" in event
        if event.get("reason"):
            return {**event, "reason": f"on {self.host}: {event['reason']}"}
        return event


_ONCE = {
    "forked": "it started its workers twice",
    "raised": "it reported two errors of one rank",
    "died": "it reported the end of one rank twice",
}


def parse_event(report: EventReport, job: Job) -> RankEvent:
    """An event of another host's part of a job, with moments of our clock; the journey's own time is left in them.

    Raises UnexpectedMessage for what is no event, and for one of a rank that this host does not run.
    """
    kinds = [kind for key, kind in _EVENTS.items() if key in report.event]
    event = asdict(parse_message(kinds[0] if kinds else _EVENTS["forked"], report.event))
    raised = event.get("raised", {})  # its rank is None for an error before there were ranks
    _require_own([event.get("rank"), event.get("died"), raised.get("rank")], job)
    later_s = time.monotonic() - report.sent_at_s
    for dated in (event, raised):
        if "at_s" in dated:
            dated["at_s"] += later_s
    return event


def _require_own(ranks: Sequence[int | None], job: Job) -> None:
    if any(rank is not None and rank not in job.own_ranks for rank in ranks):
        raise UnexpectedMessage("it sent word of a rank that it does not run; install the same commit on both")
