"""Times pieces of work in rounds, the same on all ranks, until the times are steady or the time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from plait.accelerator import module_of
from plait.errors import RunFailed
from plait.parallel.mesh import GroupCommunicator
from plait.units import format_duration

RunKey = TypeVar("RunKey", bound=Hashable)

LEAST_ROUNDS = 4
MOST_ROUNDS = 10
HURRIED_ROUNDS = 2
"""Rounds that are timed also where the time is up before."""
WARM_UP_SHARE = 0.3
"""Part of the way that finding out how often each piece is to be repeated counts as, where it is told."""
STEADY_SPREAD = 0.08
"""Spread below which the times need no further round."""
SHORTEST_S = 2e-3
"""Work that takes less time is repeated within one reading of the clock."""
EVENT_POLL_S = 5e-5
"""Seconds between two looks whether a device has finished; no reading depends on it."""


class Lockstep(Protocol):
    """Keeps ranks in step."""

    def barrier(self) -> None:
        """Block until all ranks have called it."""
        ...

    def largest(self, value: float) -> float:
        """The largest of all ranks' values; blocks."""
        ...


class SingleRank:
    """The lockstep of a single rank: never waits."""

    def barrier(self) -> None:
        """Return at once."""

    def largest(self, value: float) -> float:
        return value


class GroupBarrier:
    """Keeps the ranks of a process group in step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._sums = GroupCommunicator(group)

    def barrier(self) -> None:
        self._sums(torch.zeros(1))

    def largest(self, value: float) -> float:
        return self._sums.largest(torch.tensor([value], dtype=torch.float64)).item()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSummary:
    """Summary of several readings: median seconds per run (of two, the lower), the distance between the quartiles as
    a share of it, and processor seconds per run."""

    seconds: float
    spread: float
    cpu_s: float = 0.0
    rounds: tuple[float, ...] = ()
    """Wall seconds per run in each round."""


class Clock(Protocol):
    """Measures wall and processor seconds of a function."""

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]: ...


class WallClock:
    """The wall clock of a processor, whose work is done when its call returns."""

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        """Wall and processor seconds of one run, the mean over `times` runs in a row."""
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            run()
        return (time.perf_counter() - began) / times, (time.process_time() - cpu) / times


def ignore_share(share: float) -> None:
    """A progress callback that does nothing."""


class DeviceEvent(Protocol):
    """A mark in a device's queue of work: an Event of torch.cuda or torch.xpu, with timing."""

    def record(self) -> None:
        """Put the mark behind all work that was submitted."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this mark to a later one that the device has passed."""
        ...


class SilentDevice(RunFailed):
    """A device did not finish its work in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventClock:
    """Times work on the device itself, between two marks in its queue: how the host waits for it does not count, so
    that messages of microseconds can be told apart."""

    make_event: Callable[[], DeviceEvent]
    timeout_s: float

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        """Seconds of one run on the device, and the processor seconds that it takes to submit it; the mean over `times`
        runs in a row. Raises SilentDevice where the device does not finish in time."""
        first, last = self.make_event(), self.make_event()
        cpu = time.process_time()
        first.record()
        for _ in range(times):
            run()
        last.record()
        cpu_s = time.process_time() - cpu
        self._wait_for(last)
        return first.elapsed_time(last) / 1e3 / times, cpu_s / times

    def _wait_for(self, event: DeviceEvent) -> None:
        end = time.perf_counter() + self.timeout_s
        while not event.query():
            if time.perf_counter() > end:
                raise SilentDevice(
                    f"a GPU did not finish its work within {format_duration(self.timeout_s)}; "
                    "see what nvidia-smi says, then probe again"
                )
            time.sleep(EVENT_POLL_S)


def event_clock(device: torch.device, timeout_s: float) -> EventClock:
    """The clock of this rank's accelerator, which waits `timeout_s` at most."""
    return EventClock(make_event=partial(module_of(device).Event, enable_timing=True), timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSetup:
    """How a rank is timed: device, clock, lockstep, and who is told how far it is."""

    device: torch.device
    clock: Clock
    lockstep: Lockstep
    tell: Callable[[float], None] = ignore_share
    """Takes, between two readings, how much of `time_in_rounds` is done, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorClock:
    """Counts the processor time of a single-threaded process in place of wall time: what other programs take from it
    then does not count, but a limit on its cores does, as `share`, the share of a core that the limit leaves."""

    share: float

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        """Wall seconds of one run if no other program ran, and its processor seconds; the mean over `times` runs in
        a row."""
        began = time.process_time()
        for _ in range(times):
            run()
        cpu_s = (time.process_time() - began) / times
        return cpu_s / self.share, cpu_s


def processor_clock(share: float) -> Clock:
    """The clock of a rank that computes on a processor: processor time where it has one thread, which other programs do
    not lengthen; else wall time, as threads wait for each other. `share` is that of a core which a limit leaves it."""
    return ProcessorClock(share=share) if torch.get_num_threads() == 1 else WallClock()


def time_in_rounds(
    runs: Mapping[RunKey, Callable[[], object]], bench: TimingSetup, *, seconds: float
) -> dict[RunKey, TimingSummary]:
    """Time all of `runs`, one after the other, in rounds; every rank must call it with the same keys.

    A burst of another program's work then spoils one reading of several runs, which medians forgive, and not all
    readings of one run. Further rounds follow while the times of any rank are unsteady and `seconds` have not passed.
    """
    clock, together = bench.clock, bench.lockstep
    times: dict[RunKey, int] = {}
    for number, (name, run) in enumerate(runs.items()):
        bench.tell(WARM_UP_SHARE * number / len(runs))
        times[name] = runs_per_reading(run, bench)
    readings: dict[RunKey, list[tuple[float, float]]] = {name: [] for name in runs}
    began = time.perf_counter()
    end = began + seconds
    for done in range(1, MOST_ROUNDS + 1):
        together.barrier()
        for number, (name, run) in enumerate(runs.items()):
            passed = (time.perf_counter() - began) / max(seconds, 1e-9)
            needed = (done - 1 + number / len(runs)) / HURRIED_ROUNDS
            bench.tell(WARM_UP_SHARE + (1 - WARM_UP_SHARE) * min(1.0, passed, needed))
            readings[name].append(clock.time(run, times[name]))
        unsteady = (
            done < LEAST_ROUNDS
            or _upper_quartile([summarize_readings(r).spread for r in readings.values()]) > STEADY_SPREAD
        )
        late = time.perf_counter() > end and done >= HURRIED_ROUNDS
        # Two votes in one message: whether anybody wants another round, and whether time is up for anybody.
        votes = together.largest(2.0 * late + 1.0 * unsteady)
        if votes >= 2 or votes < 1:
            break
    return {name: summarize_readings(values) for name, values in readings.items()}


def summarize_readings(readings: list[tuple[float, float]]) -> TimingSummary:
    """Summary of several readings of wall and processor seconds; of two, the shorter counts: disturbances only
    lengthen."""
    walls = tuple(wall for wall, _ in readings)
    middle = statistics.median_low(walls)
    quarters = statistics.quantiles(walls, n=4, method="inclusive") if len(walls) > 1 else [middle] * 3
    return TimingSummary(
        seconds=middle,
        spread=(quarters[2] - quarters[0]) / middle,
        cpu_s=statistics.median_low([cpu for _, cpu in readings]),
        rounds=walls,
    )


def runs_per_reading(run: Callable[[], object], bench: TimingSetup) -> int:
    """Number of runs that one reading covers, the same on all ranks, found by one or two runs that also warm up;
    every rank must call it."""
    clock, together = bench.clock, bench.lockstep
    first = together.largest(clock.time(run, 1)[0])
    if first > 10 * SHORTEST_S:
        return 1
    second = together.largest(clock.time(run, 1)[0])
    return max(1, min(200, round(SHORTEST_S / max(second, 1e-7))))


def _upper_quartile(values: list[float]) -> float:
    return sorted(values)[int(0.75 * (len(values) - 1))]
