"""One bucket of gradients: its sum over ranks, transfer by transfer, and where it is split the weights that return."""

from __future__ import annotations

from itertools import chain
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn

from plait.parallel.comm.collectives import all_gather, expect_others, send_own
from plait.parallel.comm.reduction import (
    GATHER_TAG,
    BucketTransfer,
    PendingWork,
    ReductionSteps,
    algorithms_for,
    own_slice,
    wait_for_all,
)
from plait.parallel.comm.transfer_stream import TransferStream
from plait.parallel.gradients.buckets import SharedWeight, flat_buffer_for, unit_of_range, views_of
from plait.parallel.sharded_model import OptimizerUnit

# Note [passes over gradients]: per byte of gradients, where backward adds to the zeros of a bucket: 1 to write zeros, 3
# to add. Where it makes a tensor, which is then moved to the bucket: 2, for autograd keeps what it has just computed;
# only the gradient under way is there twice. Several backward passes of a step add to the bucket either way.

GradientRoom = Literal["added", "moved"]
"""How gradients come to a bucket: Note [passes over gradients]."""


class SummedBucket:
    """Gradients that travel together, and where they are split the weights that come back."""

    def __init__(
        self, weights: list[SharedWeight], carried: BucketTransfer, stream: TransferStream, room: GradientRoom
    ) -> None:
        self.weights, self.group, self._stream, self._room = weights, carried.group, stream, room
        self.flat = flat_buffer_for(weights, carried.pieces)
        self.missing: set[int] = set()
        self.begun = 0
        self._views = views_of(self.flat, weights)
        self._split, self._number, self._turn = carried.split, carried.number, carried.tag
        self._own = own_slice(self.flat, carried.split) if carried.split else self.flat
        self._ways = algorithms_for(self.flat, self._own, carried)
        self.transfers = sum(way.transfers for way in self._ways)
        self._course: ReductionSteps = iter(())
        self._works: PendingWork = []
        self._gathering: PendingWork = []
        if carried.split:
            self._values = flat_buffer_for(weights, carried.pieces)
            for view, weight in zip(views_of(self._values, weights), weights, strict=True):
                view.copy_(weight.parameter.detach())
                weight.parameter.data = view
            self._parameter = nn.Parameter(own_slice(self._values, carried.split))

    @property
    def is_split(self) -> bool:
        """Whether this rank updates a part of it alone."""
        return self._split is not None

    @property
    def held(self) -> list[Tensor]:
        """The tensors that this bucket keeps in memory."""
        return [self.flat, *(tensor for way in self._ways for tensor in way.held)]

    def unit(self) -> OptimizerUnit:
        """This rank's part of the weights; the ranks that keep the same part take turns in answering for it."""
        ranks = self.weights[0].ranks
        owned = ranks[self._turn % len(ranks)] == dist.get_rank()
        first = len(self._own) * dist.get_rank(self._split)
        unit = unit_of_range(self.weights, self._parameter.data, first, owned=owned)
        self._parameter = unit.parameter
        return unit

    def open(self) -> None:
        """Begin a step: every gradient is missing; zero where backward is to add to it."""
        for way in self._ways:
            way.expect()
        if self._room == "added":  # no gradient exists a second time beside the buckets
            self.flat.zero_()
            for weight, view in zip(self.weights, self._views, strict=True):
                weight.parameter.grad = view
        self.missing = set(range(len(self.weights)))
        self.begun, self._course = 0, chain.from_iterable(way.course() for way in self._ways)

    def take(self, k: int) -> None:
        """A backward pass has added to the gradient of weight `k`, or has made it beside the bucket: then move it."""
        parameter, view = self.weights[k].parameter, self._views[k]
        if self._room == "moved" and parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad.detach())
            parameter.grad = view

    def arrive(self, k: int) -> None:
        """This rank's gradient of weight `k` is complete; it is zero where backward never reached it."""
        if self._room == "moved" and self.weights[k].parameter.grad is None:
            self.weights[k].parameter.grad = self._views[k].zero_()
        assert self.weights[k].parameter.grad is self._views[k], "a gradient was put outside of its bucket"
        self.missing.discard(k)
        self._stream.arrived()

    def ready(self) -> bool:
        """Whether the next transfer may begin without keeping the arithmetic waiting."""
        return not self._stream.holds_up(self._works) if self.begun else not self.missing

    def advance(self) -> None:
        """End a transfer, and begin the next one: Note [waits beside the arithmetic] in comm/transfer_stream.py."""
        with self._stream.after_compute():
            wait_for_all(self._works)
            self._works = next(self._course)
        self.begun += 1

    def go_on_to(self, count: int) -> None:
        """Block until `count` transfers have begun."""
        while self.begun < min(count, self.transfers):
            self.advance()

    def finish(self) -> None:
        """Wait for the sums; the own part's is then the gradient of its unit."""
        with self._stream.after_compute():
            wait_for_all(self._works)
            for _ in self._course:
                raise AssertionError("a transfer that was not counted")
        if self._split:
            self._parameter.grad = self._own
            for weight in self.weights:
                weight.parameter.grad = None

    def expect_weights(self) -> None:
        """Post the receives of other ranks' updated weights."""
        if self._split and self.flat.device.type == "cpu":
            self._gathering = expect_others(self._values, self._split, GATHER_TAG + self._number)

    def gather(self) -> None:
        """Begin to collect the updated weights from all that keep a part of them."""
        if self._split and self.flat.device.type == "cpu":
            self._gathering += send_own(self._values, self._split, GATHER_TAG + self._number)
        elif self._split:
            self._gathering = [all_gather(self._values, self._parameter.data, group=self._split, async_op=True)]

    def settle(self) -> None:
        """Wait for the weights."""
        wait_for_all(self._gathering)
