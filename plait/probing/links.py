"""Times messages between pairs of ranks, and operations over groups of them, over sizes that grow while they are
quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from plait.accelerator import is_accelerator
from plait.machines.measured import CommOperation, LinkScope, MeasuredOverlap, MessageTiming
from plait.parallel.collectives import all_gather, reduce_scatter, spread_own, swap_parts
from plait.probing.timing import (
    SilentDevice,
    TimingSetup,
    TimingSummary,
    runs_per_reading,
    summarize_readings,
    time_in_rounds,
)

SLOW_S = 0.25
"""No larger message follows the first that takes this long: it would show nothing new and take ever longer."""
PROBE_ROUNDS = 5
LONG_MESSAGE_ROUNDS, LONG_MESSAGE_S = 2, 0.05
"""Messages that take longer than LONG_S get FEW_ROUNDS: over a slow link one round is as good as the next."""
PROBE_TAG = 900_000
"""Tag of the probe's sends; the buckets of training use tags of the same group, which count from 0."""

BlockingOperation = Callable[[Tensor, dist.ProcessGroup], object]
"""An operation on a buffer whose number of elements is divisible by the number of ranks; blocks until it is done."""


WaitForMessage = Callable[[dist.Work | None], None]
"""Until a message has arrived, or until the device's queue waits for it."""
COLLECTIVE_PROBE_TAG = 910_000
"""Tag of the messages of `swap_parts` and `spread_own`."""
PROBED_BUCKET_BYTES = 8 * 2**20
"""Largest bucket, as in gradient reduction."""
SIDE_S = 0.06
"""Seconds of either side of the overlap: long compared with starting and waiting."""
MOST_BUCKETS = 16
PRODUCT_WIDTH = 512

StartAllReduce = Callable[[Tensor], dist.Work]
"""Starts the all-reduce of one bucket over the group."""


class DeadLink(Exception):
    """The other rank did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPair:
    """Two ranks whose link is measured in round `round` of the schedule."""

    first: int
    second: int
    round: int


def schedule_pairs(hosts: Sequence[Sequence[int]]) -> tuple[RankPair, ...]:
    """The schedule of pairs to measure: neighbours inside each host, and the first ranks of every two hosts; no rank
    is in two pairs of one round. `hosts` lists each host's ranks."""
    wanted = [pair for ranks in hosts for pair in pairwise(ranks)]
    firsts = [ranks[0] for ranks in hosts]
    wanted += [(a, b) for i, a in enumerate(firsts) for b in firsts[i + 1 :]]
    rounds: list[set[int]] = []
    found = []
    for pair in wanted:
        number = next((i for i, busy in enumerate(rounds) if not busy & set(pair)), len(rounds))
        if number == len(rounds):
            rounds.append(set())
        rounds[number] |= set(pair)
        found.append(RankPair(first=pair[0], second=pair[1], round=number))
    return tuple(sorted(found, key=lambda pair: pair.round))


def time_pair(
    ends: tuple[int, int], sizes: Sequence[int], *, rank: int, bench: TimingSetup, timeout_s: float
) -> tuple[MessageTiming, ...]:
    """Time growing messages one way, as half of a round trip; both ranks of the pair must call it, and no other.

    Raises DeadLink if the other rank does not answer within `timeout_s`.
    """
    first = rank == ends[0]
    peer = ends[1] if first else ends[0]
    points = []
    for tag, size in enumerate(sizes, PROBE_TAG):
        sent, received = (torch.zeros(size // 4, device=bench.device) for _ in range(2))

        def there_and_back(
            wait: WaitForMessage, sent: Tensor = sent, received: Tensor = received, tag: int = tag
        ) -> None:
            order = (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend)
            for operation in order:
                wait(operation(sent if operation is dist.isend else received, peer, tag=tag))

        there_and_back(partial(_wait, timeout_s=timeout_s))
        run = partial(there_and_back, _timed_wait(bench, timeout_s))
        readings = _readings(run, bench, LONG_MESSAGE_ROUNDS)
        if _tell_peer(readings[-1][0] < LONG_MESSAGE_S, first, peer, bench, tag, timeout_s):
            readings += _readings(run, bench, PROBE_ROUNDS - LONG_MESSAGE_ROUNDS)
        took = summarize_readings(readings)
        points.append(_point(size, took, share=0.5))
        if _tell_peer(took.seconds / 2 > SLOW_S, first, peer, bench, tag, timeout_s):
            break
    return tuple(points)


def time_collectives(
    operations: Mapping[CommOperation, BlockingOperation],
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    bench: TimingSetup,
) -> dict[CommOperation, tuple[MessageTiming, ...]]:
    """Time each operation over growing buffers; seconds are those of the slowest rank. Every rank of the group must
    call it, with a timing setup that keeps this group in step."""
    return {kind: tuple(_growing(begin, sizes, group, bench)) for kind, begin in operations.items()}


def _growing(
    begin: BlockingOperation, sizes: Sequence[int], group: dist.ProcessGroup, bench: TimingSetup
) -> Iterator[MessageTiming]:
    ranks = dist.get_world_size(group)
    for size in sizes:
        numbers = -(-size // 4 // ranks) * ranks
        buffer = torch.zeros(numbers, device=bench.device)

        def run(buffer: Tensor = buffer) -> None:
            begin(buffer, group)

        times = min(20, runs_per_reading(run, bench))
        readings = [bench.clock.time(run, times)]
        rounds = LONG_MESSAGE_ROUNDS if bench.lockstep.largest(readings[0][0]) > LONG_MESSAGE_S else PROBE_ROUNDS
        took = summarize_readings([*readings, *(bench.clock.time(run, times) for _ in range(rounds - 1))])
        took = replace(took, seconds=bench.lockstep.largest(took.seconds))
        yield _point(4 * numbers, took)
        if took.seconds > SLOW_S:
            return


def _timed_wait(bench: TimingSetup, timeout_s: float) -> WaitForMessage:
    """How a timed message is waited for. A GPU's queue waits, and the host only where the clock's last mark is: NCCL's
    own wait with a time limit looks once a millisecond, which is longer than a short message takes."""
    return _queue_behind if is_accelerator(bench.device) else partial(_wait, timeout_s=timeout_s)


def _readings(run: Callable[[], object], bench: TimingSetup, count: int) -> list[tuple[float, float]]:
    try:
        return [bench.clock.time(run, 1) for _ in range(count)]
    except SilentDevice as error:
        raise DeadLink(str(error)) from error


def _tell_peer(verdict: bool, first: bool, peer: int, bench: TimingSetup, tag: int, timeout_s: float) -> bool:
    """The first rank's verdict, on both ranks: they must do the same, and their clocks differ."""
    verdicts = torch.tensor([float(verdict)], device=bench.device)
    _wait((dist.isend if first else dist.irecv)(verdicts, peer, tag=tag), timeout_s)
    return bool(verdicts.item())


def _point(size: int, took: TimingSummary, share: float = 1.0) -> MessageTiming:
    return MessageTiming(bytes=size, seconds=took.seconds * share, spread=took.spread, cpu_s=took.cpu_s * share)


def _queue_behind(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _wait(work: dist.Work | None, timeout_s: float) -> None:
    assert work is not None
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise DeadLink(str(error)) from error


def begin_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin the sum of a bucket of gradients."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work


def _swap_parts(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """A split bucket's sum: the parts change places, and each rank adds up its own."""
    own = _own_part(buffer, group)
    received = buffer.new_empty(dist.get_world_size(group) - 1, len(own))
    for work in swap_parts(buffer, received, group, COLLECTIVE_PROBE_TAG):
        work.wait()
    for other in received:
        own += other


def _spread_own(buffer: Tensor, group: dist.ProcessGroup) -> None:
    for work in spread_own(buffer, group, COLLECTIVE_PROBE_TAG):
        work.wait()


def _own_part(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    return buffer.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


LIBRARY_COLLECTIVES: Mapping[CommOperation, BlockingOperation] = {
    "all_reduce": lambda buffer, group: begin_all_reduce(buffer, group).wait(),
    "all_gather": lambda buffer, group: all_gather(buffer, _own_part(buffer, group).clone(), group=group),
    "reduce_scatter": lambda buffer, group: reduce_scatter(
        torch.empty_like(_own_part(buffer, group)), buffer, group=group
    ),
    "all_to_all": lambda buffer, group: dist.all_to_all_single(torch.empty_like(buffer), buffer, group=group),
}
CPU_COLLECTIVES: Mapping[CommOperation, BlockingOperation] = {"swap_parts": _swap_parts, "spread_own": _spread_own}


def collective_operations(device: torch.device) -> Mapping[CommOperation, BlockingOperation]:
    """The operations that training uses on a kind of device; GPUs take the library's for all."""
    return {**LIBRARY_COLLECTIVES, **CPU_COLLECTIVES} if device.type == "cpu" else LIBRARY_COLLECTIVES


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
    rows = 8 * PRODUCT_WIDTH if is_accelerator(bench.device) else PRODUCT_WIDTH
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
