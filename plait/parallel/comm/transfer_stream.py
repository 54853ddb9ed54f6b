"""Where transfers that follow each other wait: beside a rank's arithmetic, never inside it.

Note [waits beside the arithmetic]: a bucket's second transfer needs the result of its first. On a GPU nobody blocks,
but the stream on which such a wait is called does nothing until the transfer is over. Called on the stream of the
backward pass it would stop the arithmetic that is to hide the transfer. So transfers are begun and waited for on a
stream of their own, which follows the arithmetic by events, and the arithmetic follows it once, at the end of the step.
A processor has no streams: there a wait blocks, and the reducer first asks whether it would.

Note [arrivals on two streams]: FSDP2 adds a split weight's gradient on the stream of its reduce-scatter, autograd that
of a whole one, such as an expert's, on the stream that computes. Both may lie in one bucket, and neither stream follows
the other while backward goes on. So every arrival is noted, not the last one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist


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
    return SideStream(device) if device.type == "cuda" else NoStream()


class NoStream:
    """Tensors of a processor: blocks run where they are called, one after the other with the arithmetic."""

    def after_compute(self) -> AbstractContextManager[None]:
        """Nothing to order."""
        return nullcontext()

    def arrived(self) -> None:
        """Nothing to order."""

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        """A wait blocks until the transfers are over."""
        return not all(work.is_completed() for work in works)

    def join(self) -> None:
        """Nothing to order."""


class SideStream:
    """A CUDA stream beside the one that computes. Its priority is high, as what it runs is short and others wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._arrivals: torch.cuda.Stream | None = None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the block's operations here, after what the current stream has been given so far."""
        self.arrived()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def arrived(self) -> None:
        """What arrives on another stream than the last did has this one wait for the last one's: Note [arrivals on two
        streams]."""
        current = torch.cuda.current_stream(self._stream.device)
        if self._arrivals is not None and self._arrivals != current:
            self._stream.wait_stream(self._arrivals)
        self._arrivals = current

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        """Only this stream waits."""
        return False

    def join(self) -> None:
        """The current stream waits for this one, without blocking the host."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
