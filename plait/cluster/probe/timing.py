"""Times pieces of work in rounds, on all ranks alike, until the figures are steady or the time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

RunKey = TypeVar("RunKey", bound=Hashable)

LEAST_ROUNDS = 4
MOST_ROUNDS = 10
STEADY_SPREAD = 0.08
"""Spread below which a figure needs no further round."""
SHORTEST_S = 2e-3
"""Shorter work is repeated within one reading of the clock."""


class Lockstep(Protocol):
    """Keeps ranks in step."""

    def meet(self) -> None:
        """Block until all ranks are here."""
        ...

    def largest(self, value: float) -> float:
        """The largest of all ranks' values; blocks."""
        ...


class SingleRank:
    """One rank, in step with itself."""

    def meet(self) -> None:
        """Everybody is here."""

    def largest(self, value: float) -> float:
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Median over rounds (of two the lower), the distance of its quartiles as a share of it, processor time a run."""

    seconds: float
    spread: float
    cpu_s: float = 0.0
    rounds: tuple[float, ...] = ()
    """The wall seconds of each round."""


class Clock(Protocol):
    """Times a function over some runs in a row: its wall and processor seconds."""

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClock:
    """The machine's clock; `wait` blocks until all that was begun on the device is done."""

    wait: Callable[[], None]

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        """Wall and processor seconds of one run, the mean over `times` runs in a row."""
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            run()
        self.wait()
        return (time.perf_counter() - began) / times, (time.process_time() - cpu) / times


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how a rank is timed."""

    device: Any
    """torch's."""
    clock: Clock
    together: Lockstep


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorClock:
    """Processor time of a process that works in one thread, in place of the wall's: what other programs take from it
    then does not count, but a limit on its cores does, as the `share` of a core that it leaves."""

    share: float

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        """The wall seconds of one run where nobody else runs, and its processor seconds."""
        began = time.process_time()
        for _ in range(times):
            run()
        cpu_s = (time.process_time() - began) / times
        return cpu_s / self.share, cpu_s


def time_in_rounds(
    runs: Mapping[RunKey, Callable[[], object]], bench: Bench, *, seconds: float
) -> dict[RunKey, Reading]:
    """Time all of `runs`, one after the other, in rounds; every rank must call it with the same names.

    A burst of somebody else's work then spoils one reading of several kinds, which medians forgive, and not all
    readings of one. Further rounds come while a rank's figures are unsteady and `seconds` are not over.
    """
    clock, together = bench.clock, bench.together
    times = {name: runs_per_reading(run, bench) for name, run in runs.items()}
    readings: dict[RunKey, list[tuple[float, float]]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    for done in range(1, MOST_ROUNDS + 1):
        together.meet()
        for name, run in runs.items():
            readings[name].append(clock.time(run, times[name]))
        unsteady = (
            done < LEAST_ROUNDS or _upper_quartile([reading_of(r).spread for r in readings.values()]) > STEADY_SPREAD
        )
        late = time.perf_counter() > end and done >= 2
        # Two votes in one message: whether anybody wants another round, and whether time is up for anybody.
        votes = together.largest(2.0 * late + 1.0 * unsteady)
        if votes >= 2 or votes < 1:
            break
    return {name: reading_of(values) for name, values in readings.items()}


def reading_of(readings: list[tuple[float, float]]) -> Reading:
    """The figure of several readings of wall and processor seconds; of two, the shorter: disturbances only lengthen."""
    walls = tuple(wall for wall, _ in readings)
    middle = statistics.median_low(walls)
    quarters = statistics.quantiles(walls, n=4, method="inclusive") if len(walls) > 1 else [middle] * 3
    return Reading(
        seconds=middle,
        spread=(quarters[2] - quarters[0]) / middle,
        cpu_s=statistics.median_low([cpu for _, cpu in readings]),
        rounds=walls,
    )


def runs_per_reading(run: Callable[[], object], bench: Bench) -> int:
    """Runs that one reading covers, the same number on all ranks, after one or two to warm up."""
    clock, together = bench.clock, bench.together
    first = together.largest(clock.time(run, 1)[0])
    if first > 10 * SHORTEST_S:
        return 1
    second = together.largest(clock.time(run, 1)[0])
    return max(1, min(200, round(SHORTEST_S / max(second, 1e-7))))


def _upper_quartile(values: list[float]) -> float:
    return sorted(values)[int(0.75 * (len(values) - 1))]
