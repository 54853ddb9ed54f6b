"""Sums a bucket of gradients over a group of ranks; each rank gets the whole sum or its part.

An algorithm is a series of transfers; each begins after the one before. Gradients travel as they are, or rounded to
bfloat16: half the bytes, and other numbers. Note [rounded sums]: from rank to rank (gloo) each number is rounded before
it is sent, the addition is in full precision, and the sum is rounded once more where all are to have it; the rank that
added keeps that rounded sum too, so that copies stay equal to the bit. A library's own sum of bfloat16 (NCCL) rounds
after every addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.accelerator import has_streams, module_of
from plait.parallel.collectives import expect_parts, reduce_scatter, send_parts, spread_own

Transfer = Literal["float32", "bf16"]
"""Precision in which gradients travel; "float32" stands for the weights' own."""

PendingWork = list[dist.Work]
ReductionSteps = Iterator[PendingWork]
"""Yields the transfers that it has begun, and continues once they have ended; after the last the sums are there."""

REDUCE_TAG = 2**20
"""First tag of gradient sums: above those of a pipeline's messages, which may travel in the same group."""
GATHER_TAG = 2**19
"""Tag of the first bucket's weights: receives for a step's sums may be posted while those of the last one are still
in flight."""


class Algorithm(Protocol):
    """A sum over a group, again in each step."""

    transfers: int
    """Number of transfers in a step."""

    @property
    def held(self) -> Sequence[Tensor]:
        """The buffers that it keeps in memory beside the gradients themselves."""
        ...

    def expect(self) -> None:
        """Post receives for what others will send, at the beginning of a step."""
        ...

    def course(self) -> ReductionSteps:
        """Begin a step's sum. Every rank of the group must take its course."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTransfer:
    """How a bucket is summed: over `group`, after a reduce-scatter over `split` where there is one."""

    group: dist.ProcessGroup | None
    tag: int
    """The bucket's number among those of its group, the same on all its ranks."""
    split: dist.ProcessGroup | None
    number: int
    """The bucket's number among those of the split."""
    transfer: Transfer

    @property
    def pieces(self) -> int:
        """Equal parts that the bucket must have: of a split, and of each such part where rounded parts are summed."""
        rounded = dist.get_world_size(self.group) if self.group and self.transfer == "bf16" else 1
        return rounded * (dist.get_world_size(self.split) if self.split else 1)


def algorithms_for(flat: Tensor, own: Tensor, carried: BucketTransfer) -> list[Algorithm]:
    """The algorithms to run one after the other until `own`, the whole or a part of `flat`, holds the sums."""
    found: list[Algorithm] = []
    if carried.split:
        found.append(_scatter(flat, carried.split, carried.number, carried.transfer))
    if carried.group:
        found.append(_sum_to_all(own, carried.group, carried.tag, carried.transfer))
    return found


def wait_for_all(works: PendingWork) -> None:
    """Wait for the end of transfers and forget them; on a GPU it is the stream that waits."""
    for work in works:
        work.wait()
    works.clear()


def own_slice(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The equal part of a tensor that stands at this rank's place."""
    return flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


def _scatter(flat: Tensor, group: dist.ProcessGroup, number: int, transfer: Transfer) -> Algorithm:
    if flat.device.type == "cpu":
        return _SwappedScatter(flat, group, number, transfer)
    return LibraryScatter(flat, group, transfer)


def _sum_to_all(flat: Tensor, group: dist.ProcessGroup, tag: int, transfer: Transfer) -> Algorithm:
    if transfer == "bf16" and flat.device.type == "cpu":
        return _SwappedSum(flat, group, REDUCE_TAG + tag)
    return LibrarySum(flat, group, transfer)


class _ByLibrary:
    """A sum by one operation of the communication library (NCCL or gloo)."""

    transfers = 1

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, transfer: Transfer) -> None:
        self._flat, self._group = flat, group
        self._sent = _carrier(flat, transfer)

    @property
    def held(self) -> Sequence[Tensor]:
        """The buffer for rounded gradients, if they are rounded."""
        return _extra_buffer(self._sent, self._flat)

    def expect(self) -> None:
        """Nothing to do: the library posts its own receives."""


class LibrarySum(_ByLibrary):
    """An all-reduce: every rank gets the whole sum."""

    def course(self) -> ReductionSteps:
        """One all-reduce of the bucket."""
        _copy_if_rounded(self._sent, self._flat)
        yield [_begun(dist.all_reduce(self._sent, group=self._group, async_op=True))]
        _copy_if_rounded(self._flat, self._sent)


class LibraryScatter(_ByLibrary):
    """A reduce-scatter: each rank gets its part of the sum."""

    def course(self) -> ReductionSteps:
        """One reduce-scatter of the bucket."""
        _copy_if_rounded(self._sent, self._flat)
        own = own_slice(self._sent, self._group)
        yield [reduce_scatter(own, self._sent, group=self._group, async_op=True)]
        _copy_if_rounded(own_slice(self._flat, self._group), own)


class _SwappedScatter:
    """A reduce-scatter by messages from rank to rank: see swap_parts."""

    transfers = 1

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, tag: int, transfer: Transfer) -> None:
        self._flat, self._group, self._tag = flat, group, tag
        self._sent = _carrier(flat, transfer)
        ranks = dist.get_world_size(group)
        self._received = self._sent.new_empty(ranks - 1, len(flat) // ranks)
        self._expected: PendingWork = []

    @property
    def held(self) -> Sequence[Tensor]:
        return [self._received, *_extra_buffer(self._sent, self._flat)]

    def expect(self) -> None:
        self._expected = expect_parts(self._received, self._group, self._tag)

    def course(self) -> ReductionSteps:
        _copy_if_rounded(self._sent, self._flat)
        yield [*self._expected, *send_parts(self._sent, self._group, self._tag)]
        own = own_slice(self._flat, self._group)
        for other in self._received:
            own += other


class _SwappedSum:
    """Each rank adds up its part and sends the result to all: see Note [rounded sums]."""

    transfers = 2

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        self._flat, self._group, self._tag = flat, group, tag
        self._sent = _carrier(flat, "bf16")
        self._scatter = _SwappedScatter(flat, group, tag, "bf16")

    @property
    def held(self) -> Sequence[Tensor]:
        return [self._sent, *self._scatter.held]

    def expect(self) -> None:
        self._scatter.expect()

    def course(self) -> ReductionSteps:
        yield from self._scatter.course()
        own_slice(self._sent, self._group).copy_(own_slice(self._flat, self._group))
        yield spread_own(self._sent, self._group, self._tag)
        self._flat.copy_(self._sent)


def _carrier(flat: Tensor, transfer: Transfer) -> Tensor:
    """The tensor that is sent: the values themselves, or a buffer for them in bfloat16."""
    return torch.empty_like(flat, dtype=torch.bfloat16) if transfer == "bf16" else flat


def _extra_buffer(sent: Tensor, flat: Tensor) -> Sequence[Tensor]:
    return [] if sent is flat else [sent]


def _copy_if_rounded(there: Tensor, numbers: Tensor) -> None:
    if there.dtype != numbers.dtype:
        there.copy_(numbers)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


# Where transfers that follow each other wait: beside a rank's arithmetic, never inside it.
#
# Note [waits beside the arithmetic]: a bucket's second transfer needs the result of its first. On a GPU nothing blocks,
# but the stream on which such a wait is called does nothing until the transfer is over. Called on the stream of the
# backward pass it would stop the arithmetic that is to hide the transfer. So transfers are begun and waited for on a
# stream of their own, which follows the arithmetic by events, and the arithmetic follows it once, at the end of the
# step. A processor has no streams: there a wait blocks, and the reducer first asks whether it would.
#
# Note [arrivals on two streams]: FSDP2 adds a split weight's gradient on the stream of its reduce-scatter, autograd
# that of a whole one, such as an expert's, on the stream that computes. Both may lie in one bucket, and neither stream
# follows the other while backward goes on. So every arrival is noted, not the last one alone.


class TransferStream(Protocol):
    """The order of a rank's transfers beside its arithmetic."""

    def after_compute(self) -> AbstractContextManager[None]:
        """A block whose transfers and waits come after the arithmetic so far, and after all earlier such blocks."""
        ...

    def arrived(self) -> None:
        """Something to be transferred is there, by the current stream's arithmetic: blocks from now on come after it,
        whichever stream they are called on."""
        ...

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        """Whether to wait for these transfers in such a block, now, would keep the arithmetic waiting."""
        ...

    def join(self) -> None:
        """The arithmetic that follows comes after all blocks."""
        ...


def transfer_stream(device: torch.device) -> TransferStream:
    """The stream for transfers of tensors on this device."""
    return SideStream(device) if has_streams(device) else NoStream()


class NoStream:
    """Tensors of a processor, or of a device without streams: blocks run where they are called, one after the other
    with the arithmetic."""

    def after_compute(self) -> AbstractContextManager[None]:
        """Nothing to order."""
        return nullcontext()

    def arrived(self) -> None:
        """Nothing to order."""

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        """True if waiting would block."""
        return not all(work.is_completed() for work in works)

    def join(self) -> None:
        """Nothing to order."""


class SideStream:
    """A stream of an accelerator beside the one that computes. Its priority is high, as what it runs is short and
    others wait."""

    def __init__(self, device: torch.device) -> None:
        self._torch = module_of(device)
        self._stream = self._torch.Stream(device, priority=-1)
        self._arrivals: torch.Stream | None = None
        self._used = False

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the block's operations here, after what the current stream has been given so far."""
        self.arrived()
        self._stream.wait_stream(self._torch.current_stream(self._stream.device))
        self._used = True
        with self._torch.stream(self._stream):
            yield

    def arrived(self) -> None:
        """What arrives on another stream than the last did has this one wait for the last one's: Note [arrivals on two
        streams]."""
        current = self._torch.current_stream(self._stream.device)
        if self._arrivals is not None and self._arrivals != current:
            self._stream.wait_stream(self._arrivals)
        self._arrivals = current

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        """Only this stream waits."""
        return False

    def join(self) -> None:
        """The current stream waits for this one, without blocking the host. It waits for no stream that did nothing
        since: within the capture of a CUDA graph that would be an error."""
        if self._used:
            self._torch.current_stream(self._stream.device).wait_stream(self._stream)
            self._used = False
