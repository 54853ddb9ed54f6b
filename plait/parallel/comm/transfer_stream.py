"""Where transfers that follow each other wait: beside a rank's arithmetic, never inside it.

Note [waits beside the arithmetic]: a bucket's second transfer needs the result of its first. On a GPU nobody blocks,
but the stream on which such a wait is called does nothing until the transfer is over. Called on the stream of the
backward pass it would stop the arithmetic that is to hide the transfer. So transfers are begun and waited for on a
stream of their own, which follows the arithmetic by events, and the arithmetic follows it once, at the end of the step.
A processor has no streams: there a wait blocks, and the reducer first asks whether it would.
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

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        """A wait blocks until the transfers are over."""
        return not all(work.is_completed() for work in works)

    def join(self) -> None:
        """Nothing to order."""


class SideStream:
    """A CUDA stream beside the one that computes. Its priority is high, as what it runs is short and others wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the block's operations here, after what the current stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        """Only this stream waits."""
        return False

    def join(self) -> None:
        """The current stream waits for this one, without blocking the host."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
