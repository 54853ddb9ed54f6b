"""How much of a sum over ranks disappears behind arithmetic on this backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.cluster.measured import MeasuredOverlap, Point, Scope
from plait.cluster.probe.timing import Bench, runs_per_reading, time_in_rounds

PROBED_BUCKET_BYTES = 8 * 2**20
"""As gradients are summed."""
SIDE_S = 0.06
"""Length of either side: long against starting and waiting."""
MOST_BUCKETS = 16
PRODUCT_WIDTH = 512

StartAllReduce = Callable[[Tensor], dist.Work]
"""Begins the sum of one bucket over the group."""


def time_overlap(
    start: StartAllReduce, sums: Sequence[Point], bench: Bench, *, scope: Scope, ranks: int, seconds: float
) -> MeasuredOverlap:
    """Arithmetic alone, sums alone, and both at once, each about equally long; every rank of the group must call it.

    `sums` are the measured all-reduces of the same group, on which its ranks agree.
    """
    fitting = [point for point in sums if point.bytes <= PROBED_BUCKET_BYTES and point.seconds <= SIDE_S] or [sums[0]]
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
    slowest = {name: bench.together.largest(figure.seconds) for name, figure in found.items()}
    return MeasuredOverlap(
        scope=scope,
        ranks=ranks,
        bytes=size * count,
        compute_s=slowest["compute"],
        communicate_s=slowest["communicate"],
        both_s=slowest["both"],
    )


def _product(bench: Bench) -> Callable[[], object]:
    rows = 8 * PRODUCT_WIDTH if bench.device.type == "cuda" else PRODUCT_WIDTH
    a, b = (
        torch.randn(rows, PRODUCT_WIDTH, device=bench.device),
        torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, device=bench.device),
    )
    out = torch.empty(rows, PRODUCT_WIDTH, device=bench.device)
    return lambda: torch.mm(a, b, out=out)


def _products_lasting(product: Callable[[], object], seconds: float, bench: Bench) -> int:
    """How many products last so long, the same number on all ranks."""
    times = runs_per_reading(product, bench)
    each_s = bench.together.largest(min(bench.clock.time(product, times)[0] for _ in range(3)))
    return max(1, round(seconds / each_s))
