"""How much travels together, from a measurement of the link: large enough that the start of a sum costs little of
it."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from plait.accelerator import synchronize
from plait.custom.group import Workers
from plait.units import format_bytes

SMALL, LARGE = 16 * 2**10, 4 * 2**20
REPEATS = 5
START_SHARE = 0.1
"""Share of a bucket's time that may be its start."""
LEAST, MOST = 2**18, 2**25


def measured_bucket_bytes(workers: Workers, total_bytes: int) -> int:
    """A bucket's size in bytes, a power of two, the same on all workers. Every worker must call it; blocks for 11 sums.

    `total_bytes` of gradients make four buckets at least, so that most of them travel while backward goes on.
    """
    small_s, large_s = _seconds(workers, SMALL), _seconds(workers, LARGE)
    rate = (LARGE - SMALL) / max(large_s - small_s, 1e-9)
    start_s = max(small_s - SMALL / rate, 0.0)
    chosen = chosen_bucket_bytes(start_s, rate, total_bytes)
    workers.say(
        f"buckets of {format_bytes(chosen)}: a sum takes {start_s * 1000:.3g} ms to start, then {format_bytes(rate)}/s"
    )
    return chosen


def chosen_bucket_bytes(start_s: float, rate: float, total_bytes: int) -> int:
    """The smallest power of two of which the start is at most START_SHARE of the time."""
    wanted = start_s * rate * (1 - START_SHARE) / START_SHARE
    size = LEAST
    while size < min(wanted, MOST):
        size *= 2
    while size > LEAST and 4 * size > total_bytes:
        size //= 2
    return size


def _seconds(workers: Workers, nbytes: int) -> float:
    """The median time of a sum of this many bytes, of the worker for whom it is longest."""
    values, times = torch.zeros(nbytes // 4, device=workers.device), []
    for number in range(1 + REPEATS):
        began = time.perf_counter()
        dist.all_reduce(values)
        synchronize(workers.device)
        if number:  # the first makes connections
            times.append(time.perf_counter() - began)
    return float(workers.sums.largest(torch.tensor([median(times)], dtype=torch.float64)))
