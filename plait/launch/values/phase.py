"""The phases of a job under supervision, and how long each may last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# starting: some ranks have not said so yet. stopping: asked to save and return. collecting: one died badly, and
# the others may tell why. ending: nobody is left, or all have been killed; only the fork servers' word is missing.
# killed: not even that came, so they were killed as well, and the kernel ends what they started.
Phase = Literal["starting", "running", "stopping", "collecting", "ending", "killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HangTimeouts:
    """How long a rank may be silent, in seconds; see Note [no false alarms] in watching/hang_watch.py."""

    stopped_s: float = 5.0
    """By a signal: only another signal ends that, and none of ours stops."""
    least_s: float = 10.0
    unknown_s: float = 600.0
    """In a phase that no rank has yet come to the end of."""
    computing_s: float = 60.0
    """While it uses its processor: a loop without end, or a step that is longer than all before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimeouts:
    """How long each phase of a job may last; running has no limit but `hang_timeouts` for ranks that are silent.

    `host_s` is how long it takes to notice that another host is lost, and 0 where there is none. `host_lost_s` is what
    is left of the time to collect once one was: what others report then follows from that. The death of a rank whose
    wire is closed is reported within `report_s`, and `busy_s` later at most by a server that runs: on a machine that is
    busy with something else it comes to it late.
    """

    start_s: float
    grace_s: float
    collect_s: float = 0.7
    host_lost_s: float = 0.1
    end_s: float = 3.0
    kernel_s: float = 1.5
    report_s: float = 4.0
    busy_s: float = 60.0
    host_s: float = 0.0
    hang_timeouts: HangTimeouts = HangTimeouts()
