"""Looks at the ranks and fork servers of a job from time to time, and says which of them hangs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from plait.launch.local.failure_causes import on_host
from plait.launch.local.site import WorkerHost
from plait.launch.values.failure import HostLost, RankHung
from plait.launch.values.phase import HangTimeouts
from plait.launch.watching.board import innermost_place
from plait.launch.watching.hang_watch import LOOK_EVERY_S, Hang, HangWatch, SlowWait
from plait.units import format_bytes, format_duration

_SLOW_SAID_AGAIN_S = 60.0
_STILL_MOVES_S = 15.0
"""A slow link may pause that long, while it sends again what was lost, and is not given up."""
FoundHang = tuple[RankHung | HostLost, WorkerHost]
"""The part that hangs, and the host it is on."""


class HangMonitor:
    """Watches one job; call `look` whenever `next_at_s` of the monotonic clock has come."""

    def __init__(self, timeouts: HangTimeouts) -> None:
        self._timeouts = timeouts
        self._watch = HangWatch(timeouts)
        self._server_stopped_s: dict[str | None, float] = {}
        self._last_step = 0
        self._slow_text, self._say_slow_at_s, self._say_slow_after_s = "", 0.0, _SLOW_SAID_AGAIN_S
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
            self._note_slow_waits(now_s, {rank: site for rank, (site, _) in site_of.items()})
            return None
        site = site_of[hang.culprit.rank][0]
        return _hung_rank(hang, site.stack_of(hang.culprit.rank)), site

    def slow_text(self) -> str:
        """A warning, once, about a network that has become slow: the host, and how slow; else empty."""
        text, self._slow_text = self._slow_text, ""
        return text

    def is_moving(self) -> bool:
        """Whether bytes move that a rank waits for in its step, so that an end that was asked for comes in time."""
        return self._watch.has_moved(time.monotonic(), within_s=_STILL_MOVES_S, last_step=self._last_step)

    def _note_slow_waits(self, now_s: float, site_of: Mapping[int, WorkerHost]) -> None:
        """Have it said when the network between hosts becomes slow, and then ever less often while it stays so."""
        if len(set(site_of.values())) < 2 or now_s < self._say_slow_at_s or not (slow := self._watch.slow_waits()):
            return
        self._slow_text = slow_network_text(slow, site_of)
        self._say_slow_at_s, self._say_slow_after_s = now_s + self._say_slow_after_s, 2 * self._say_slow_after_s

    def stop_grace_s(self) -> float:
        """How long ranks that are asked to end now may take to finish their step and save, by what they took so far; 0
        where nothing is known."""
        self._last_step = self._watch.furthest_step + 1  # ranks may hear of the stop in the step after that
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


def slow_network_text(slow: Sequence[SlowWait], site_of: Mapping[int, WorkerHost]) -> str:
    """A line for the log on ranks that wait for a network that has become slow.

    The host is named at which most of the connections end that have bytes waiting; where several hosts share in them
    alike, all of these are.
    """
    by_address = {site.address: _name(site) for site in site_of.values() if site.address}
    ends = Counter[str]()
    for one in slow:
        if one.rank.sends_to:
            pair = {_name(site_of[one.rank.rank]), by_address.get(one.rank.sends_to, _name(None))}
            ends.update(pair if len(pair) == 2 else ())
    most = [name for name, count in ends.items() if count == max(ends.values())]
    of = f"of {most[0]}" if len(most) == 1 else f"between {' and '.join(sorted(most))}" if most else "between the hosts"
    slowest = min(slow, key=lambda one: one.rate)
    return (
        f"slow     the network {of} carries {format_bytes(slowest.rate)}/s now, {format_bytes(slowest.rate_before)}/s "
        f"at its best before: {slowest.rank.place} has taken {format_duration(slowest.waited_s)} so far, "
        f"{format_duration(slowest.rank.longest_s or 0.0)} at most before; training goes on"
    )


def _name(site: WorkerHost | None) -> str:
    return (site.host if site is not None else None) or "this host"


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
        what=f"the process that starts the workers{on_host(site)} was stopped by a signal for {stopped_s:.0f} s, "
        "and was ended",
        cause="no answer",
    )
