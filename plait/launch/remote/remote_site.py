"""Another host's part of a job, as host 0's supervisor sees it through the link to that host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from plait.launch.local.site import KillOrder, RankEvent
from plait.launch.remote.link import HostConnection
from plait.launch.values.failure import RESUME_ADVICE
from plait.launch.values.job import Job


class RemoteWorkerHost:
    """One host's part of job `number`; `start` sends it there. A WorkerHost whose events travel over the link."""

    def __init__(self, job: Job, link: HostConnection, *, host: str, number: int) -> None:
        self.job = job
        self.host = host
        self._link = link
        self._number = number
        self._over = False

    def start(self, rendezvous: str | None) -> None:
        """Have the host start its ranks; a host that is lost meanwhile is heard of through `read`."""
        self._link.send("run", {"number": self._number, "job": asdict(self.job), "rendezvous": rendezvous})

    def fileno(self) -> int:
        return self._link.fileno()

    def read(self) -> list[RankEvent]:
        events = [
            self._event(frame.values)
            for frame in self._link.read()
            if frame.kind == "event" and frame.values["number"] == self._number
        ]
        self._over = self._over or any("over" in event for event in events)
        if self._link.lost is not None and not self._over:
            self._over = True
            events.append({"over": True, "obituary": f"{self.host} was lost: {self._link.lost}; {RESUME_ADVICE}"})
        return events

    def signal(self, order: KillOrder) -> None:
        self._link.send("signal", {"number": self._number, "order": order})

    def kill(self) -> None:
        self._link.send("kill", {"number": self._number})

    def _event(self, values: Mapping[str, Any]) -> RankEvent:
        """The event as it was there, its times converted to our clock; they include the message's travel time."""
        event = dict(values["event"])
        later_s = time.monotonic() - values["sent_at_s"]
        if "died" in event:
            event["at_s"] += later_s
        if "raised" in event:
            event["raised"] = {**event["raised"], "at_s": event["raised"]["at_s"] + later_s}
        if event.get("obituary"):
            event["obituary"] = f"on {self.host}: {event['obituary']}"
        return event
