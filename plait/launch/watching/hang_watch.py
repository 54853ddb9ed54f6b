"""Decides from what ranks publish whether they are stuck, and which of them the others wait for. Pure but for numbers
that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from plait.launch.values.phase import HangTimeouts
from plait.launch.values.progress import RankProgress

LOOK_EVERY_S = 0.5
LEAST_RATE = 4096.0
"""Bytes per second that count as progress of a wait: below the slowest link that anybody trains over, and above what
connections carry while nothing happens (heartbeats, questions to a store)."""


# Note [no false alarms]: a run that is ended for nothing costs more than a hang that is found late. So silence counts
# only while this watch itself is awake (not while the machine sleeps, nor while a terminal has stopped us all); not
# while a rank waits for a processor or a disk without getting any of it; and it is measured against the longest time
# that the rank itself has spent in the same phase before. And a wait in which bytes move is slow, not stuck: each
# LEAST_RATE bytes that the kernel has carried for a rank, or that a file it waits for has grown by, take back a second
# of its silence. That holds for every wait (sums of gradients, saving, copies), regardless of its name.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Nobody gets on: `culprit` is the one that the others wait for; `others_in` is where they are, "" if nowhere
    else."""

    culprit: RankProgress
    silent_s: float
    others_in: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWait:
    """A rank that has waited longer than it ever did in this phase, while its connections carry less than before."""

    rank: RankProgress
    waited_s: float
    rate: float
    """Bytes per second during this wait."""
    rate_before: float
    """The highest bytes per second seen before it."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The facts about one rank since its last sign of life."""

    last: RankProgress
    since_s: float
    silent_s: float = 0.0
    stopped_s: float = 0.0
    computed_s: float = 0.0
    """Processor time used in this silence."""
    waited_s: float = 0.0
    """Like `silent_s`, but whether bytes move or not."""
    carried: int = 0
    """Bytes of its connections in this wait."""
    moved_at_s: float = -inf
    """When bytes were last seen to move in this wait."""


@dataclass(slots=True, kw_only=True)
class _Connections:
    """The traffic of one rank when it was last read, and the highest rate so far in bytes per second."""

    at_s: float = inf
    nbytes: int = 0
    highest: float = 0.0

    def note(self, now_s: float, nbytes: int | None, since_s: float) -> int:
        """Take note of the count at this moment; returns the bytes since the one before, 0 where that one was taken
        before `since_s`."""
        if nbytes is None:
            return 0
        before_s, more = self.at_s, max(0, nbytes - self.nbytes)
        self.at_s, self.nbytes = now_s, nbytes
        if before_s >= now_s:
            return 0
        self.highest = max(self.highest, more / (now_s - before_s))
        return more if before_s >= since_s else 0


@dataclass(slots=True)
class HangWatch:
    """Follows the ranks of one job; call `look` every LOOK_EVERY_S with what is seen of all that are alive."""

    timeouts: HangTimeouts = field(default_factory=HangTimeouts)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _connections: dict[int, _Connections] = field(default_factory=dict)
    _longest_s: float = 0.0
    _step_began_s: float = inf
    _steps_s: list[float] = field(default_factory=list)
    _last_look_s: float | None = None

    def look(self, now_s: float, ranks: Sequence[RankProgress]) -> Hang | None:
        """Take note of all ranks at this moment; the hang, once there is one."""
        passed_s = min(now_s - (now_s if self._last_look_s is None else self._last_look_s), 2 * LOOK_EVERY_S)
        self._last_look_s = now_s
        alive = [rank for rank in ranks if rank.state != "gone" and rank.changes > 0]
        for rank in alive:
            self._note(rank, passed_s, now_s)
        if not alive or not all(self._is_stuck(self._seen[rank.rank]) for rank in alive):
            return self._hang_of_stopped(alive)
        return self._hang(alive)

    def slow_waits(self) -> Sequence[SlowWait]:
        """Ranks that would count as stuck if their connections carried nothing, and carry far less than before."""
        slow: list[SlowWait] = []
        for seen in self._seen.values():
            known_s, highest = seen.last.longest_s, self._connections[seen.last.rank].highest
            if seen.last.step == 0 or known_s is None or seen.waited_s < self._waiting_limit_s(known_s):
                continue
            rate = seen.carried / seen.waited_s
            if LEAST_RATE <= rate < highest / 2:
                wait = SlowWait(rank=seen.last, waited_s=seen.waited_s, rate=rate, rate_before=highest)
                slow.append(wait)
        return slow

    @property
    def furthest_step(self) -> int:
        """The largest step that any rank has begun."""
        return max((seen.last.step for seen in self._seen.values()), default=0)

    def has_moved(self, now_s: float, *, within_s: float, last_step: int) -> bool:
        """Whether bytes have moved, this short time ago at most, for a rank that waits in a step up to `last_step`: it
        finishes that step or saves, and does not go on regardless."""
        waiting = [seen for seen in self._seen.values() if 0 < seen.last.step <= last_step]
        return any(now_s - seen.moved_at_s <= within_s for seen in waiting)

    def longest_phase_s(self, now_s: float) -> float:
        """The longest step so far, one that still goes on included, together with the longest silence in any phase."""
        unfinished_s = max(0.0, now_s - self._step_began_s)
        return max([unfinished_s, *self._steps_s], default=0.0) + self._longest_s

    def _note(self, rank: RankProgress, passed_s: float, now_s: float) -> None:
        seen = self._seen.setdefault(rank.rank, _Seen(last=rank, since_s=now_s))
        connections = self._connections.setdefault(rank.rank, _Connections())
        carried = connections.note(now_s, rank.network_bytes, seen.since_s)
        if rank.changes != seen.last.changes:
            self._longest_s = max(self._longest_s, seen.silent_s, rank.longest_s or 0.0)
            if rank.step != seen.last.step and rank.rank == min(self._seen):
                if self._step_began_s < inf:
                    self._steps_s.append(now_s - self._step_began_s)
                    del self._steps_s[:-20]
                self._step_began_s = now_s
            self._seen[rank.rank] = _Seen(last=rank, since_s=now_s)
            return
        used_s = 0.0
        if rank.cpu_s is not None and seen.last.cpu_s is not None:
            used_s = max(0.0, rank.cpu_s - seen.last.cpu_s)
        if rank.state != "working" or used_s > 0.1 * passed_s:  # else it is hungry, not stuck
            seen.silent_s += passed_s
        self._take_back_silence(seen, carried, max(0, rank.file_bytes - seen.last.file_bytes), passed_s, now_s)
        seen.stopped_s = seen.stopped_s + passed_s if rank.state == "stopped" else 0.0
        seen.computed_s += used_s
        seen.last = rank

    def _take_back_silence(self, seen: _Seen, carried: int, of_files: int, passed_s: float, now_s: float) -> None:
        """See Note [no false alarms]."""
        seen.waited_s += passed_s
        seen.carried += carried
        seen.silent_s = max(0.0, seen.silent_s - (carried + of_files) / LEAST_RATE)
        if carried + of_files > LEAST_RATE * passed_s:
            seen.moved_at_s = now_s
            seen.computed_s = min(seen.computed_s, seen.silent_s)

    def _is_stuck(self, seen: _Seen) -> bool:
        return seen.stopped_s >= self.timeouts.stopped_s or seen.silent_s >= self._limit_s(seen)

    def _limit_s(self, seen: _Seen) -> float:
        if seen.last.step == 0:  # it prepares, or does not say how far it is: there is nothing to compare with
            return inf
        known_s, computes = seen.last.longest_s, _computes(seen)
        if known_s is None:
            return inf if computes else self.timeouts.unknown_s
        if computes:
            return max(self.timeouts.computing_s, 10 * known_s)
        return self._waiting_limit_s(known_s)

    def _waiting_limit_s(self, known_s: float) -> float:
        return max(self.timeouts.least_s, 3 * known_s + 2)

    def _hang_of_stopped(self, alive: Sequence[RankProgress]) -> Hang | None:
        """A rank that was stopped, as soon as the others too have come to a halt: they will not get on without it."""
        stopped = [rank for rank in alive if self._seen[rank.rank].stopped_s >= self.timeouts.stopped_s]
        halted = all(self._seen[rank.rank].silent_s >= self.timeouts.stopped_s / 2 for rank in alive)
        return self._hang(alive) if stopped and halted else None

    def _hang(self, alive: Sequence[RankProgress]) -> Hang:
        culprit = min(alive, key=self._order)
        others = sorted({rank.place for rank in alive if rank.rank != culprit.rank})
        return Hang(
            culprit=culprit,
            silent_s=self._seen[culprit.rank].silent_s,
            others_in=others[0] if len(others) == 1 else "",
        )

    def _order(self, rank: RankProgress) -> tuple[bool, int, int, bool, float]:
        """First who was stopped, then who is furthest behind, then who computes while the others sleep, then who has
        been silent for longest."""
        seen = self._seen[rank.rank]
        return rank.state != "stopped", rank.step, rank.collective, not _computes(seen), -seen.silent_s


def _computes(seen: _Seen) -> bool:
    return seen.computed_s > 0.2 * seen.silent_s
