"""Another host's part of a job, as host 0's supervisor sees it through the link to that host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from plait.hosts.connection import HostConnection
from plait.hosts.protocol import EventReport, UnexpectedMessage, parse_event, parse_message
from plait.hosts.wire import Frame
from plait.launch.local.site import KillOrder, RankEvent
from plait.launch.values.failure import RESUME_ADVICE
from plait.launch.values.job import Job
from plait.launch.values.progress import RankProgress


class RemoteWorkerHost:
    """One host's part of job `number`; `start` sends it there. A WorkerHost whose events travel over the link."""

    def __init__(self, job: Job, link: HostConnection, *, host: str, number: int) -> None:
        self.job = job
        self.host = host
        self.address = link.address
        self.link = link
        self._number = number
        self._forked = self._over = False
        self._progress: Sequence[RankProgress] = ()

    def start(self, rendezvous: str | None) -> None:
        """Have the host start its ranks; a host that is lost meanwhile is heard of through `read`."""
        self.link.send("run", {"number": self._number, "job": asdict(self.job), "rendezvous": rendezvous})

    def fileno(self) -> int:
        return self.link.fileno()

    def read(self) -> list[RankEvent]:
        events: list[RankEvent] = []
        for frame in self.link.read():
            if frame.kind in ("event", "progress") and not self._over:
                events += self._events(frame)
        if self.link.lost is not None and not self._over:
            events.append(self._end(self.link.lost))
        return events

    def signal(self, order: KillOrder, why: str = "") -> None:
        self.link.send("signal", {"number": self._number, "order": order, "why": why})

    def kill(self) -> None:
        self.link.send("kill", {"number": self._number})

    def observe(self) -> Sequence[RankProgress]:
        """As the host last said; it looks every half a second."""
        return self._progress

    def stack_of(self, rank: int) -> str:
        """None: the host keeps it to itself."""
        return ""

    def is_server_stopped(self) -> bool:
        """No: the host looks after its own, and says how it ended."""
        return False

    def _events(self, frame: Frame) -> Iterator[RankEvent]:
        """The event in a frame, if it is of this job; a host that sends anything else is left."""
        try:
            report = parse_message(EventReport, frame.values)
            if report.number == self._number:
                event = parse_event(report, self.job)
                if ("progress" in event) != (frame.kind == "progress"):
                    raise UnexpectedMessage("it sent one event as another; install the same commit on both")
                if "progress" in event:
                    self._progress = [RankProgress(**one) for one in event["progress"]]
                else:
                    yield self._noted(event)
        except UnexpectedMessage as error:
            yield self._end(str(error))
            self.link.leave(str(error))

    def _noted(self, event: RankEvent) -> RankEvent:
        if "forked" in event:
            if self._forked:
                raise UnexpectedMessage("it started its workers twice; install the same commit on both")
            self._forked = True
        self._over = "over" in event
        if event.get("reason"):
            return {**event, "reason": f"on {self.host}: {event['reason']}"}
        return event

    def _end(self, how: str) -> RankEvent:
        self._over = True
        return {"over": True, "lost": True, "reason": f"{self.host} was lost: {how}; {RESUME_ADVICE}"}
