"""The two ends of a pipeline whose head is the embedding: the last rank keeps the weight, the first looks rows up.

Note [one keeps it]: the head needs the whole table and makes a gradient for all of it. The embedding needs the rows of
a step's tokens, and only their gradients are not zero. So the rank with the head alone adds up, updates and saves the
weight. Rows go to the other one before the first micro-batch that looks them up, and their gradients come back after
the last one that did: far less than a table each way, most of it while others compute and the cable has nothing else to
carry. Both know from the step's tokens which rows those are. Each row's gradient is the sum of the same two numbers as
if the tables had been added up whole: bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.gradient_buckets import SharedWeight
from plait.parallel.pipeline_links import WaitFor
from plait.parallel.watched import WATCH

PendingRows = dict[int, tuple[dist.Work, Tensor]]
"""Maps a micro-batch to the transfer of its rows and their buffer."""

TIED_WEIGHT = "embed.tokens.weight"
WHOLE, GRADIENTS, ROWS = 2**20, 2**21, 2**22
"""Tags of the messages: the table; and from here on, one for each micro-batch, rows' gradients and rows."""


def rows_first_used(tokens: Iterable[Tensor], first: int, rows: int) -> list[Tensor]:
    """For each micro-batch, the rows that its tokens are the first to use; entry `first` is row 0 of the table."""
    seen = torch.zeros(rows, dtype=torch.bool)
    found = []
    for each in tokens:
        here = torch.zeros(rows, dtype=torch.bool)
        places = each.flatten() - first
        here[places[(places >= 0) & (places < rows)]] = True
        found.append((here & ~seen).nonzero().flatten())
        seen |= here
    return found


class TiedStep(Protocol):
    """One step's traffic between the two ends; the first stage takes micro-batches in their order, there and back."""

    def before_forward(self, micro: int) -> None:
        """Called before the first stage looks up a micro-batch's tokens."""
        ...

    def after_backward(self, micro: int) -> None:
        """Called when the first stage has the gradients of a micro-batch's rows."""
        ...

    def finish(self) -> None:
        """Block until all has arrived."""
        ...


class TiedEmbeddingEnd:
    """A rank's end of the tied weight; `embeds` at the first stage. Both ranks of the group must make one and call the
    same methods."""

    def __init__(self, weight: SharedWeight, group: dist.ProcessGroup, *, embeds: bool) -> None:
        self.parameter, self._embeds = weight.parameter, embeds
        self._first, self._rows = weight.box.offset[0], weight.box.extent[0]
        self._group, self._peer = group, 1 - dist.get_rank(group)

    def settle(self) -> None:
        """Block until both ends have the whole table."""
        travels = self._receive if self._embeds else self.send
        travels(self.parameter.data, WHOLE).wait()

    def visit(self, tokens: Sequence[Tensor], wait: WaitFor, *, learns: bool) -> TiedStep:
        """Begin a step with the tokens of each micro-batch: forward alone, or, where it `learns`, there and back."""
        come = rows_first_used(tokens, self._first, self._rows)
        back = rows_first_used(reversed(tokens), self._first, self._rows)[::-1] if learns else []
        return (_EmbeddingStep if self._embeds else _HeadStep)(self, come, back, wait)

    def expect(self, places: Sequence[Tensor], tag: int) -> PendingRows:
        """Post receives for each micro-batch's rows from the other end."""
        width = self.parameter.shape[1]
        rooms = {micro: self.parameter.new_empty(len(rows), width) for micro, rows in enumerate(places) if len(rows)}
        return {micro: (self._receive(room, tag + micro), room) for micro, room in rooms.items()}

    def send(self, values: Tensor, tag: int) -> dist.Work:
        """Begin to send to the other end what must not change until it has arrived."""
        work = dist.isend(values, group=self._group, group_dst=self._peer, tag=tag)
        assert work is not None
        return work

    def _receive(self, room: Tensor, tag: int) -> dist.Work:
        work = dist.irecv(room, group=self._group, group_src=self._peer, tag=tag)
        assert work is not None
        return work


class _EmbeddingStep:
    """A step at the first stage, which receives rows and sends their gradients."""

    def __init__(self, ends: TiedEmbeddingEnd, come: Sequence[Tensor], back: Sequence[Tensor], wait: WaitFor) -> None:
        self._ends, self._come, self._back, self._wait = ends, come, back, wait
        self._coming = ends.expect(come, ROWS)
        self._going: PendingRows = {}

    def before_forward(self, micro: int) -> None:
        if micro in self._coming:
            work, values = self._coming.pop(micro)
            with WATCH.wait("tied embedding"):
                self._wait(work)
            # Nobody's backward needs the table's numbers, so that autograd need not know.
            self._ends.parameter.data[self._come[micro]] = values

    def after_backward(self, micro: int) -> None:
        rows, gradient = self._back[micro], self._ends.parameter.grad
        if len(rows):
            assert gradient is not None
            values = gradient[rows]
            self._going[micro] = self._ends.send(values, GRADIENTS + micro), values

    def finish(self) -> None:
        assert not self._coming, "rows that were not looked up"
        with WATCH.wait("tied embedding"):
            for work, _ in self._going.values():
                self._wait(work)
        self._ends.parameter.grad = None


class _HeadStep:
    """A step at the last stage, which sends rows and receives their gradients."""

    def __init__(self, ends: TiedEmbeddingEnd, come: Sequence[Tensor], back: Sequence[Tensor], wait: WaitFor) -> None:
        self._ends, self._back, self._wait = ends, back, wait
        self._coming = ends.expect(back, GRADIENTS)
        table = ends.parameter.detach()
        rows = {micro: table[places] for micro, places in enumerate(come) if len(places)}
        self._going = {micro: (ends.send(values, ROWS + micro), values) for micro, values in rows.items()}

    def before_forward(self, micro: int) -> None:
        """Does nothing: only the first stage looks tokens up."""

    def after_backward(self, micro: int) -> None:
        """Does nothing: only the first stage sends gradients of rows."""

    def finish(self) -> None:
        parameter = self._ends.parameter
        if self._coming and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        for micro, (work, values) in self._coming.items():
            assert parameter.grad is not None
            with WATCH.wait("tied embedding"):
                self._wait(work)
            parameter.grad[self._back[micro]] += values
        with WATCH.wait("tied embedding"):
            for work, _ in self._going.values():
                self._wait(work)
