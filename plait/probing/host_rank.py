"""The worker that describes this host and measures its peak arithmetic rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from plait.checked_json import parse_object, typed_value
from plait.launch.values.job import RankContext
from plait.machines.catalog import find_device_by_driver_name
from plait.machines.detect import detect_machine
from plait.machines.machine import Machine
from plait.machines.requested_workers import PEAK_S, SurveyRequest
from plait.probing.kept import keep_timings, load_timings
from plait.probing.timing import WallClock
from plait.working_folder import CURRENT_FOLDER


def run_host_rank(context: RankContext, argument: str) -> None:
    """Entry of the worker that describes this host: sends the machine's fingerprint and, where that is wanted, its
    peak arithmetic rate, which is kept once it was measured while nothing else ran.

    `argument` is a SurveyRequest as JSON. Raises PlaitError for GPUs that are not there.
    """
    survey = typed_value(SurveyRequest, parse_object(argument))
    machine = detect_machine(survey.requested)
    flops, doubt = _kept_or_measured(machine, survey.peak_s) if survey.peak == "measured" else (None, "")
    context.send("machine", fingerprint=machine.fingerprint(), peak_flops=flops, peak_doubt=doubt)


def _kept_or_measured(machine: Machine, most_s: float) -> tuple[float | None, str]:
    known = load_timings(CURRENT_FOLDER, machine).peak_flops if machine.device == "cpu" else 0.0
    if known:
        return known, ""
    flops, doubt = machine_peak_flops(machine, most_s)
    if machine.device == "cpu" and flops and not doubt:
        keep_timings(CURRENT_FOLDER, machine, peak_flops=flops)
    return flops, doubt


def machine_peak_flops(machine: Machine, most_s: float = PEAK_S) -> tuple[float | None, str]:
    """Peak FLOP/s of all devices together, of which MFU is a share, None where it is not known; and what makes it
    doubtful, empty where nothing does."""
    if machine.device == "cpu":
        found = measure_matmul_flops(threads=machine.cores, most_s=most_s)
        return found.flops, found.doubt
    known = find_device_by_driver_name(machine.name)
    # Without bf16 plait trains in float32 (planner/derive/training_job.py).
    precision = "bf16" if known and "bf16" in known.peak_flops else "float32"
    if known and precision in known.peak_flops:
        return known.flops(precision) * machine.devices, ""
    return None, f"the peak of {machine.name} is not in plait's catalogue, so MFU is unknown"


UNDISTURBED_SHARE = 0.9
"""Share of its cores' time from which a measurement counts as undisturbed."""
QUIET_PEAK_S = 0.5
"""Seconds of measuring, unless none of the tries was undisturbed."""
TRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """A measured rate of products."""

    flops: float
    """FLOP/s in the fastest try."""
    granted: float
    """Share of the cores' time that the process had, at best in any try; the rest went to other programs, or a limit
    withheld it."""

    @property
    def doubt(self) -> str:
        """A warning about a rate that was measured while other programs ran; empty if none did."""
        if self.granted >= UNDISTURBED_SHARE:
            return ""
        return (
            f"the arithmetic peak was measured while this process had {self.granted:.0%} of its cores' time: it may be "
            "higher, and the forecast faster, when other programs rest"
        )


def measure_matmul_flops(*, threads: int, most_s: float = PEAK_S, size: int = 1024) -> MatmulRate:
    """The rate of float32 products of size × size matrices in the best of several short tries, because a peak is an
    upper limit; more tries where other programs took part of the cores in all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    multiply, flops = partial(torch.mm, a, b, out=torch.empty(size, size)), 2.0 * size**3
    began, tries = time.perf_counter(), [_short_try(multiply, flops, threads)]
    while (spent := time.perf_counter() - began) < most_s:
        if spent >= QUIET_PEAK_S and any(one.granted >= UNDISTURBED_SHARE for one in tries):
            break
        tries.append(_short_try(multiply, flops, threads))
    torch.set_num_threads(before)
    return MatmulRate(flops=max(one.flops for one in tries), granted=max(one.granted for one in tries))


def _short_try(multiply: Callable[[], object], flops: float, threads: int) -> MatmulRate:
    """A tenth of a second of products: the median of the fastest quarter."""
    readings: list[tuple[float, float]] = []
    clock, end = WallClock(), time.perf_counter() + TRY_S
    while not readings or time.perf_counter() < end:  # others may have had the processor for all that time
        readings.append(clock.time(multiply, 1))
    wall_s, cpu_s = (sum(column) for column in zip(*readings, strict=True))
    fastest = sorted(wall for wall, _ in readings)[: max(1, len(readings) // 4)]
    return MatmulRate(flops=flops / statistics.median(fastest), granted=min(cpu_s / (wall_s * threads), 1.0))
