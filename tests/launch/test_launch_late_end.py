"""A joined host that says late that its part of a job is over."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

from plait.launch.local.signals import collected_signals
from plait.launch.local.site import KillOrder, RankEvent
from plait.launch.local.supervise import Supervision
from plait.launch.values.job import HostRanks
from plait.launch.values.phase import PhaseTimeouts
from plait.launch.values.progress import RankProgress
from tests.launch.processes import Record, job


class BusyHost:
    """A WorkerHost whose only rank does its work at once, and which says so a while after it was to be killed."""

    def __init__(self, late_s: float) -> None:
        self.job = replace(job("hello", 1), part=HostRanks(first_rank=0, ranks=1))
        self.host, self.address = "busy", "127.0.0.2"
        self._late_s, self._bell = late_s, socket.socketpair()
        self._events: list[RankEvent] = [
            {"forked": True},
            {"rank": 0, "started": 1},
            {"rank": 0, "returned": True},
            {"died": 0, "code": 0, "at_s": 0.0},
        ]
        self.is_over = False
        self._bell[1].send(b"!")

    def fileno(self) -> int:
        return self._bell[0].fileno()

    def read(self) -> list[RankEvent]:
        self._bell[0].recv(16)
        events, self._events = self._events, []
        self.is_over = any("over" in event for event in events)
        return events

    def signal(self, order: KillOrder, why: str = "") -> None:
        pass

    def kill(self) -> None:
        self._events = [{"over": True}]
        threading.Timer(self._late_s, self._bell[1].send, [b"!"]).start()

    def observe(self) -> Sequence[RankProgress]:
        return ()

    def stack_of(self, rank: int) -> str:
        return ""

    def is_server_stopped(self) -> bool:
        return False


def test_a_job_ends_once_every_joined_host_has_said_so() -> None:
    """Else the next job reaches a host that has not ended this one, which leaves the run for that."""
    site = BusyHost(late_s=0.3)
    timeouts = PhaseTimeouts(start_s=60, grace_s=5, end_s=0.01, kernel_s=0.01)
    with collected_signals() as signals:
        assert Supervision([site], signals, Record(), timeouts).run() == "finished"
    assert site.is_over
