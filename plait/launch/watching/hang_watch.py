"""Decides from what ranks publish whether they are stuck, and which of them the others wait for. Pure but for numbers
that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from plait.launch.values.phase import HangTimeouts
from plait.launch.values.progress import RankProgress

LOOK_EVERY_S = 0.5


# Note [no false alarms]: a run that is ended for nothing costs more than a hang that is found late. So silence counts
# only while this watch itself is awake (not while the machine sleeps, nor while a terminal has stopped us all); not
# while a rank waits for a processor or a disk without getting any of it; and it is measured against the longest time
# that the rank itself has spent in the same phase before.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Nobody gets on: `culprit` is the one that the others wait for; `others_in` is where they are, "" if nowhere
    else."""

    culprit: RankProgress
    silent_s: float
    others_in: str


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What is known of one rank since its last sign of life."""

    last: RankProgress
    silent_s: float = 0.0
    stopped_s: float = 0.0
    computed_s: float = 0.0
    """Processor time used in this silence."""


@dataclass(slots=True)
class HangWatch:
    """Follows the ranks of one job; call `look` every LOOK_EVERY_S with what is seen of all that are alive."""

    timeouts: HangTimeouts = field(default_factory=HangTimeouts)
    _seen: dict[int, _Seen] = field(default_factory=dict)
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

    def longest_phase_s(self, now_s: float) -> float:
        """The longest step so far, one that still goes on included, together with the longest silence in any phase."""
        unfinished_s = max(0.0, now_s - self._step_began_s)
        return max([unfinished_s, *self._steps_s], default=0.0) + self._longest_s

    def _note(self, rank: RankProgress, passed_s: float, now_s: float) -> None:
        seen = self._seen.setdefault(rank.rank, _Seen(last=rank))
        if rank.changes != seen.last.changes:
            self._longest_s = max(self._longest_s, seen.silent_s, rank.longest_s or 0.0)
            if rank.step != seen.last.step and rank.rank == min(self._seen):
                if self._step_began_s < inf:
                    self._steps_s.append(now_s - self._step_began_s)
                    del self._steps_s[:-20]
                self._step_began_s = now_s
            self._seen[rank.rank] = _Seen(last=rank)
            return
        used_s = 0.0
        if rank.cpu_s is not None and seen.last.cpu_s is not None:
            used_s = max(0.0, rank.cpu_s - seen.last.cpu_s)
        if rank.state != "working" or used_s > 0.1 * passed_s:  # else it is hungry, not stuck
            seen.silent_s += passed_s
        seen.stopped_s = seen.stopped_s + passed_s if rank.state == "stopped" else 0.0
        seen.computed_s += used_s
        seen.last = rank

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
