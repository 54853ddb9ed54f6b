"""How much of its core a worker keeps while the workers of all hosts work: hosts may be machines within one machine, or
containers of it, whose cores they share. Processor time, by which a probe measures, does not tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from plait.cluster.core_limits import core_share
from plait.cluster.measured import WorkTiming
from plait.cluster.probe.timing import Clock, Lockstep, ProcessorClock, TimingSetup
from plait.cluster.probe.verdict import ProbedHost

BUSY_S = 0.4
NOTICED = 0.05
"""A smaller share of the time is lost to other programs on any machine."""


def with_processor_clock(bench: TimingSetup, ranks: int) -> TimingSetup:
    """Count processor time where a worker has one thread on a processor; threads also wait for each other."""
    if bench.device.type != "cpu" or torch.get_num_threads() > 1:
        return bench
    return replace(bench, clock=ProcessorClock(share=core_share(ranks)))


def share_beside_other_hosts(
    hosts: Sequence[ProbedHost], rank: int, lockstep: Lockstep, clock: Clock, work: Callable[[], object]
) -> float:
    """The share of processor time that this worker has while all hosts work, of that while only its own host works; 1
    where that is all of it, and for a single host. Every rank must call it; `work` keeps one thread busy.

    What programs outside the probe take is taken in both cases, and does not count.
    """
    if len(hosts) == 1:
        return 1.0
    lockstep.barrier()
    together = _share_of_time(clock, work)
    if lockstep.largest(1 - together) < NOTICED:
        return 1.0
    alone = together
    for host in hosts:
        lockstep.barrier()
        if rank in host.ranks:
            alone = _share_of_time(clock, work)
    lockstep.barrier()
    share = together / alone
    return share if share < 1 - NOTICED else 1.0


def with_share(timings: Sequence[WorkTiming], share: float) -> tuple[WorkTiming, ...]:
    """Times as they are for a worker that has this share of its core."""
    return tuple(replace(one, seconds=one.seconds / share) for one in timings)


def _share_of_time(clock: Clock, work: Callable[[], object]) -> float:
    """Processor seconds over the wall seconds that went by while this worker was busy."""
    first_s, _ = clock.time(work, 1)
    wall_s, cpu_s = clock.time(work, max(1, round(BUSY_S / max(first_s, 1e-6))))
    return min(1.0, cpu_s / wall_s)
