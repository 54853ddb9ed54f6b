"""Sums gradients over groups of ranks in fixed buckets while backward still runs; scatters them where they are
sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch.distributed as dist
from torch import Tensor, nn

from plait.model.gpt import GPT
from plait.parallel.comm.collectives import all_gather, expect_others, send_own
from plait.parallel.comm.reduction import (
    GATHER_TAG,
    BucketTransfer,
    PendingWork,
    ReductionSteps,
    Transfer,
    algorithms_for,
    own_slice,
    wait_for_all,
)
from plait.parallel.gradients.buckets import (
    BUCKET_BYTES,
    RankSet,
    SharedWeight,
    fill_buckets,
    flat_buffer_for,
    unit_of_range,
    views_of,
)
from plait.parallel.sharded_model import OptimizerUnit

ProcessGroups = Mapping[RankSet, dist.ProcessGroup]

# Note [one number]: what ranks must agree on about a bucket (the tags of its messages, and who of them answers for it)
# comes from its place among the buckets of its own group. Its place among all of a rank's differs between stages of a
# pipeline: two that share a weight have unlike buckets beside it.


class GradientReducer:
    """Gives every weight the sum of its gradients over all ranks that hold it, SUM and never mean.

    A step calls `open`, runs its micro-batches, calls `arm` before a chunk's last backward, then `close`; in between
    `.grad`, a view of its bucket, collects this rank's own sum. With a `split` group each of its ranks ends up with an
    equal part of every bucket and updates that alone (the units of `split_units`); `publish` then gathers the weights,
    and the forward of each layer waits for its own. Every rank must do the same in the same order.
    """

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        groups: ProcessGroups,
        split: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        transfer: Transfer = "float32",
    ) -> None:
        # Backward reaches the last layers first, so the first bucket to be full holds the last weights.
        self._weights = list(weights)[::-1]
        members = fill_buckets(self._weights, dist.get_world_size(split) if split else 1, bucket_bytes)
        self._buckets: list[_Bucket] = []
        for number, some in enumerate(members):
            group = groups.get(self._weights[some[0]].ranks)
            # See Note [one number].
            tag = sum(one.group is group for one in self._buckets)
            carried = BucketTransfer(group=group, tag=tag, split=split, number=number, transfer=transfer)
            self._buckets.append(_Bucket([self._weights[i] for i in some], carried))
        self._place = {index: (b, k) for b, some in enumerate(members) for k, index in enumerate(some)}
        self._armed: set[int] = set()
        for index in self._place:
            parameter = self._weights[index].parameter
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    @property
    def buckets(self) -> list[Tensor]:
        """The flat gradients and the buffers of their transfers, to count memory."""
        return [tensor for bucket in self._buckets for tensor in bucket.held]

    def split_units(self) -> list[OptimizerUnit]:
        """The units that the optimizer updates on this rank where the buckets are split."""
        return [bucket.unit() for bucket in self._buckets]

    def wait_in_forward(self, chunks: Sequence[GPT]) -> None:
        """Let each part of the model wait for its own weights before it runs."""
        bucket_of = {id(weight.parameter): self._place[i][0] for i, weight in enumerate(self._weights)}
        for chunk in chunks:
            for module, needed in _waiting(chunk):
                numbers = sorted({bucket_of[id(p)] for one in needed for p in one.parameters()})
                module.register_forward_pre_hook(lambda *_, numbers=numbers: self._wait(numbers))

    def open(self) -> None:
        """Begin a step: no gradient yet, and room for each where its bucket is."""
        for weight in self._weights:
            weight.parameter.grad = None
        for bucket in self._buckets:
            bucket.open()

    def arm(self, chunk: int) -> None:
        """The next backward through this chunk is its last of the step: sum each bucket as soon as it is full."""
        self._armed.add(chunk)

    def close(self) -> None:
        """Wait until every gradient is the global sum. A weight that got none on this rank counts as zero."""
        self._armed.clear()
        for bucket in self._buckets:
            for k in sorted(bucket.missing):
                bucket.arrive(k)
        # By turns, so that no bucket's second transfer waits for the end of another one's.
        for count in range(1, 1 + max((bucket.transfers for bucket in self._buckets), default=0)):
            for bucket in self._buckets:
                bucket.go_on_to(count)
        for bucket in self._buckets:
            bucket.finish()

    def publish(self) -> None:
        """Gather split weights, the model's first ones first."""
        for bucket in reversed(self._buckets):
            bucket.expect_weights()
        for bucket in reversed(self._buckets):
            bucket.gather()

    def settle(self) -> None:
        """Wait until every weight is here."""
        self._wait(range(len(self._buckets)))

    def _wait(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._buckets[number].settle()

    def _arrived(self, index: int) -> None:
        if self._weights[index].chunk not in self._armed:
            return
        bucket, k = self._place[index]
        self._buckets[bucket].arrive(k)
        self._begin_what_can()

    def _begin_what_can(self) -> None:
        """Begin transfers without waiting, those of a kind always in bucket order: ranks must agree on it."""
        least = max((bucket.transfers for bucket in self._buckets), default=0)
        for bucket in self._buckets:
            while bucket.begun < min(least, bucket.transfers) and bucket.ready():
                bucket.advance()
            if bucket.begun < bucket.transfers:
                least = min(least, bucket.begun)
            if not least:
                return


def _waiting(chunk: GPT) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Each module of a chunk that waits for weights before it runs, and those whose weights it waits for."""
    found: list[tuple[nn.Module, list[nn.Module]]] = [(layer, [layer]) for layer in chunk.layers.values()]
    if chunk.embed is not None and chunk.part.embeds:
        found.append((chunk.embed, [chunk.embed]))
    if chunk.norm is not None:
        # The loss uses the head after the final norm, without a forward of the head's own.
        head = chunk.embed if chunk.head is None else chunk.head
        found.append((chunk.norm, [chunk.norm, *([head] if head is not None else [])]))
    return found


class _Bucket:
    """Gradients that travel together, and where they are split the weights that come back."""

    def __init__(self, weights: list[SharedWeight], carried: BucketTransfer) -> None:
        self.weights, self.group = weights, carried.group
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
        """Begin a step: every gradient is zero and missing."""
        for way in self._ways:
            way.expect()
        # Autograd adds to a `.grad` that is there, so that no gradient exists a second time beside the buckets.
        self.flat.zero_()
        for weight, view in zip(self.weights, self._views, strict=True):
            weight.parameter.grad = view
        self.missing = set(range(len(self.weights)))
        self.begun, self._course = 0, chain.from_iterable(way.course() for way in self._ways)

    def arrive(self, k: int) -> None:
        """This rank's gradient of weight `k` is complete; it is zero where backward never reached it."""
        assert self.weights[k].parameter.grad is self._views[k], "a gradient was put outside of its bucket"
        self.missing.discard(k)

    def ready(self) -> bool:
        """Whether the next transfer may begin without waiting: on a GPU it is its streams that wait."""
        if not self.begun:
            return not self.missing
        return self.flat.is_cuda or all(work.is_completed() for work in self._works)

    def advance(self) -> None:
        """End a transfer, and begin the next one."""
        wait_for_all(self._works)
        self._works = next(self._course)
        self.begun += 1

    def go_on_to(self, count: int) -> None:
        """Block until `count` transfers have begun."""
        while self.begun < min(count, self.transfers):
            self.advance()

    def finish(self) -> None:
        """Wait for the sums; the own part's is then the gradient of its unit."""
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
