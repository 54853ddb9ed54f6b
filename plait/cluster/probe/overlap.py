"""Measures how much of an all-reduce is hidden behind arithmetic on this backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.cluster.measured import LinkScope, MeasuredOverlap, MessageTiming
from plait.cluster.probe.timing import TimingSetup, runs_per_reading, time_in_rounds

PROBED_BUCKET_BYTES = 8 * 2**20
"""Largest bucket, as in gradient reduction."""
SIDE_S = 0.06
"""Seconds of either side of the overlap: long compared with starting and waiting."""
MOST_BUCKETS = 16
PRODUCT_WIDTH = 512

StartAllReduce = Callable[[Tensor], dist.Work]
"""Starts the all-reduce of one bucket over the group."""


def time_overlap(
    start: StartAllReduce,
    all_reduce_points: Sequence[MessageTiming],
    bench: TimingSetup,
    *,
    scope: LinkScope,
    ranks: int,
    seconds: float,
) -> MeasuredOverlap:
    """Time arithmetic alone, all-reduces alone, and both at once, the two sides about equally long; every rank of the
    group must call it.

    `all_reduce_points` are the measured all-reduces of the same group, on which its ranks agree.
    """
    fitting = [
        point for point in all_reduce_points if point.bytes <= PROBED_BUCKET_BYTES and point.seconds <= SIDE_S
    ] or [all_reduce_points[0]]
    size, each_s = fitting[-1].bytes, fitting[-1].seconds
    count = max(1, min(MOST_BUCKETS, round(SIDE_S / each_s)))
    buckets = [torch.zeros(size // 4, device=bench.device) for _ in range(count)]
    product = _product(bench)
    products = _products_lasting(product, count * each_s, bench)

    def compute() -> None:
        for _ in range(products):
            product()

    def both() -> None:
        works = [start(bucket) for bucket in buckets]
        compute()
        for work in works:
            work.wait()

    def communicate() -> None:
        for work in [start(bucket) for bucket in buckets]:
            work.wait()

    found = time_in_rounds({"compute": compute, "communicate": communicate, "both": both}, bench, seconds=seconds)
    slowest = {name: bench.lockstep.largest(figure.seconds) for name, figure in found.items()}
    return MeasuredOverlap(
        scope=scope,
        ranks=ranks,
        bytes=size * count,
        compute_s=slowest["compute"],
        communicate_s=slowest["communicate"],
        both_s=slowest["both"],
    )


def _product(bench: TimingSetup) -> Callable[[], object]:
    rows = 8 * PRODUCT_WIDTH if bench.device.type == "cuda" else PRODUCT_WIDTH
    a, b = (
        torch.randn(rows, PRODUCT_WIDTH, device=bench.device),
        torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, device=bench.device),
    )
    out = torch.empty(rows, PRODUCT_WIDTH, device=bench.device)
    return lambda: torch.mm(a, b, out=out)


def _products_lasting(product: Callable[[], object], seconds: float, bench: TimingSetup) -> int:
    """Number of products that take `seconds`, the same on all ranks."""
    times = runs_per_reading(product, bench)
    each_s = bench.lockstep.largest(min(bench.clock.time(product, times)[0] for _ in range(3)))
    return max(1, round(seconds / each_s))
