"""Whether all workers' passes wait for the same messages in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from plait.errors import PlaitError
from plait.parallel.collectives import HEADER_TAG, MessageBegin

# Note [a header a message]: torch's FSDP2 gathers a unit's weights where its module is called, and sums their gradients
# where its backward pass ends. Workers that run other units, or the same ones in another order, would take each other's
# numbers for their own, or wait for a message that never comes. So each message has a header, which says what it is,
# and goes from each worker to the next one in a ring; what waits for the message compares the previous worker's header
# with its own first. Where any two workers are at different places, some neighbours are. `end` has a header, too: it
# meets workers that still wait for a message of a pass.

_END = 0
_OTHER_ADVICE = (
    'or leave the waiting out: no plait.convert_batch_norm for BatchNorm; for weights layout "shard optimizer", or '
    "units=… that hold all of those layers (units=[]: the whole model is one)"
)
_TAGS = 2**24
"""Tags of messages that have a header: from here on, as many as 24 bits tell apart."""


class MessageOrder:
    """What forward and backward passes wait for on this worker (sharded weights, statistics of BatchNorm, gathered
    rows), beside what the worker before it waits for. It does nothing until `follow` is called."""

    def __init__(self) -> None:
        self._ring: tuple[int, int] | None = None
        self._compared: Literal["at once", "at the end"] = "at once"
        self._names = ["the end of a pass"]
        self._open: deque[_Header] = deque()

    def follow(self, rank: int, workers: int, compared: Literal["at once", "at the end"]) -> None:
        """Begin to compare. Headers are compared before the message is waited for, or, where a GPU waits by itself,
        in `end` alone."""
        self._ring, self._compared = (rank, workers), compared

    def message(self, name: str) -> MessageBegin:
        """Starts a message of this name; all workers name the same ones in the same order."""
        self._names.append(name)
        number = len(self._names) - 1
        return lambda numbers: self._begin(number, numbers)

    def end(self) -> None:
        """Compare what has not been compared, and that this is the end of a pass for all workers. Every worker must
        call it; blocks. Raises PlaitError where another one waits for a message."""
        if self._ring is not None:
            self._begin(_END, 0)
            while self._open:
                header = self._open.popleft()
                header.compare()
                header.sent.wait()

    def _begin(self, number: int, numbers: int) -> tuple[int, Callable[[], None]]:
        if self._ring is None:
            return 0, _nothing
        rank, workers = self._ring
        header = _Header(self._names, number, numbers, rank, workers)
        self._open.append(header)
        while len(self._open) > 1 and self._open[0].is_over():
            self._open.popleft()
        tag = _TAGS + (number * 1_000_003 + numbers) % _TAGS
        return tag, header.compare if self._compared == "at once" else _nothing


class _Header:
    """A header on its way to the next worker, and the one that the previous worker sends at this place."""

    def __init__(self, names: list[str], number: int, numbers: int, rank: int, workers: int) -> None:
        self._names, self._own, self._rank, self._before = names, (number, numbers), rank, (rank - 1) % workers
        self._found, header = torch.zeros(2, dtype=torch.int64), torch.tensor([number, numbers])
        received = dist.irecv(self._found, src=self._before, tag=HEADER_TAG)
        sent = dist.isend(header, dst=(rank + 1) % workers, tag=HEADER_TAG)
        assert received is not None and sent is not None
        self._received, self.sent, self._header, self._compared = received, sent, header, False

    def compare(self) -> None:
        """Wait for the previous worker's header; raises PlaitError where it is another one."""
        if self._compared:
            return
        self._received.wait()
        self._compared = True
        number, numbers = self._found.tolist()
        if (number, numbers) != self._own:
            before, own = self._names[number], self._names[self._own[0]]
            if before == own:
                before, own = f"{before} ({numbers} numbers)", f"{own} ({self._own[1]} numbers)"
            raise PlaitError(
                f"workers run different layers: worker {self._before} has come to {before}, worker {self._rank} to "
                f"{own}, and all must come to the same ones in the same order; where examples choose layers, call each "
                f"layer in every pass (with no rows where none chose it), {_OTHER_ADVICE}"
            )

    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._compared and self.sent.is_completed()


def _nothing() -> None:
    """A GPU waits for the message by itself."""
