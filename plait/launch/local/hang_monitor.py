"""Looks at the ranks and fork servers of a job from time to time, and says which of them hangs."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

from plait.launch.local.failure_causes import on_host
from plait.launch.local.site import WorkerHost
from plait.launch.values.failure import RESUME_ADVICE, HostLost, RankHung
from plait.launch.values.phase import HangTimeouts
from plait.launch.watching.board import innermost_place
from plait.launch.watching.hang_watch import LOOK_EVERY_S, Hang, HangWatch

FoundHang = tuple[RankHung | HostLost, WorkerHost]
"""What hangs, and the host it is on."""


class HangMonitor:
    """Watches one job; call `look` whenever `next_at_s` of the monotonic clock has come."""

    def __init__(self, timeouts: HangTimeouts) -> None:
        self._timeouts = timeouts
        self._watch = HangWatch(timeouts)
        self._server_stopped_s: dict[str | None, float] = {}
        self.next_at_s = time.monotonic() + LOOK_EVERY_S

    def look(self, sites: Sequence[WorkerHost]) -> FoundHang | None:
        """A rank or fork server that hangs, with the stack of the rank; None where all get on."""
        now_s = time.monotonic()
        passed_s = min(now_s - self.next_at_s + LOOK_EVERY_S, 2 * LOOK_EVERY_S)
        self.next_at_s = now_s + LOOK_EVERY_S
        for site in sites:
            before_s = self._server_stopped_s.get(site.host, 0.0)
            self._server_stopped_s[site.host] = stopped_s = before_s + passed_s if site.is_server_stopped() else 0.0
            if stopped_s >= self._timeouts.stopped_s:
                return _stopped_server(site, stopped_s), site
        site_of = {rank.rank: (site, rank) for site in sites for rank in site.observe()}
        hang = self._watch.look(now_s, [rank for _, rank in site_of.values()])
        if hang is None:
            return None
        site = site_of[hang.culprit.rank][0]
        return _hung_rank(hang, site.stack_of(hang.culprit.rank)), site

    def stop_grace_s(self) -> float:
        """How long ranks may take to finish their step and save, by what they took so far; 0 where nothing is known."""
        return 3 * self._watch.longest_phase_s(time.monotonic())


class EndReports:
    """Ranks whose wires are closed: their fork server must report their deaths soon, or it is stuck."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._due: dict[int, float] = {}

    def expect(self, rank: int) -> float:
        """Note that the wire of a rank has closed; returns the moment by which its death must be reported."""
        self._due[rank] = time.monotonic() + self._within_s
        return self._due[rank]

    def first_due_s(self, alive: Collection[int]) -> float:
        """The first moment at which one of these ranks is overdue; infinite where none will be."""
        return min((self._due[rank] for rank in alive if rank in self._due), default=math.inf)

    def most_overdue(self, alive: Collection[int]) -> int:
        """The one of these ranks whose report was due first."""
        return min(set(alive) & self._due.keys(), key=self._due.__getitem__)


def _hung_rank(hang: Hang, stack: str) -> RankHung:
    culprit = hang.culprit
    return RankHung(
        rank=culprit.rank,
        at_s=time.monotonic(),
        state=culprit.state,
        silent_s=hang.silent_s,
        place=culprit.place,
        others_in=hang.others_in,
        line=str(innermost_place(stack) or ""),
        stack=stack,
    )


def _stopped_server(site: WorkerHost, stopped_s: float) -> HostLost:
    return HostLost(
        at_s=time.monotonic(),
        sentence=f"the process that starts the workers{on_host(site)} was stopped by a signal for {stopped_s:.0f} s, "
        f"and was ended; {RESUME_ADVICE}",
        cause="no answer",
    )
