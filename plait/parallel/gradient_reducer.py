"""Sums gradients over groups of ranks in fixed buckets while backward still runs; scatters them where they are
sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.errors import PlaitError
from plait.model.gpt import GPT
from plait.model.names import EMBEDDING, HEAD, is_hidden_matrix
from plait.model.weights import describe_weight, is_quantized
from plait.parallel.collectives import all_gather, expect_others, send_own
from plait.parallel.gradient_buckets import (
    BUCKET_BYTES,
    RankSet,
    SharedWeight,
    fill_buckets,
    flat_buffer_for,
    gradient_views,
    unit_of_range,
    views_of,
)
from plait.parallel.reduction import (
    GATHER_TAG,
    BucketTransfer,
    PendingWork,
    ReductionSteps,
    Transfer,
    TransferStream,
    algorithms_for,
    own_slice,
    transfer_stream,
    wait_for_all,
)
from plait.parallel.sharded_model import OptimizerUnit, ShardedModel
from plait.parallel.watched import WATCH, PendingSpan
from plait.partition.boxes import is_shared_out, ranks_sharing, ranks_splitting, weight_boxes, whole_box
from plait.partition.execution import Execution

ProcessGroups = Mapping[RankSet, dist.ProcessGroup]

# Note [one number]: what ranks must agree on about a bucket (the tags of its messages, and who of them answers for it)
# comes from its place among the buckets of its own group. Its place among all of a rank's differs between stages of a
# pipeline: two that share a weight have unlike buckets beside it.


class GradientReducer:
    """Gives every weight that learns the sum of its gradients over all ranks that hold it, SUM and never mean.

    A step calls `open`, runs its micro-batches, calls `arm` before a chunk's last backward, then `close`; in between
    `.grad`, a view of its bucket, collects this rank's own sum. With a `split` group, or that of a weight's own
    `split`, each of its ranks ends up with an equal part of every bucket and updates that alone (the units of
    `split_units`); `publish` then gathers the weights, and the forward of each layer waits for its own. Every rank must
    do the same in the same order.

    With `room` "moved" a step begins without `.grad`, and what backward makes is moved: Note [passes over gradients].
    `stream` is where transfers wait for each other; the weights' device has one if none is given.
    """

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        groups: ProcessGroups,
        split: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        transfer: Transfer = "float32",
        stream: TransferStream | None = None,
        room: GradientRoom = "added",
    ) -> None:
        devices = [weight.parameter.device for weight in weights]
        self._stream = stream or transfer_stream(devices[0] if devices else torch.device("cpu"))
        # Backward reaches the last layers first, so the first bucket to be full holds the last weights.
        self._weights = list(weights)[::-1]
        members = fill_buckets(self._weights, dist.get_world_size(split) if split else 1, bucket_bytes)
        self._buckets: list[SummedBucket] = []
        for number, some in enumerate(members):
            first = self._weights[some[0]]
            group, over = groups.get(first.ranks), split if first.split is None else groups.get(first.split)
            # See Note [one number].
            tag = sum(one.group is group for one in self._buckets)
            carried = BucketTransfer(group=group, tag=tag, split=over, number=number, transfer=transfer)
            self._buckets.append(SummedBucket([self._weights[i] for i in some], carried, self._stream, room))
        self._place = {
            id(self._weights[index].parameter): (b, k) for b, some in enumerate(members) for k, index in enumerate(some)
        }
        self._armed: set[int] = set()
        self._handles = [
            weight.parameter.register_post_accumulate_grad_hook(lambda _, weight=weight: self.arrived(weight))
            for weight in chain.from_iterable(bucket.weights for bucket in self._buckets)
        ]

    def release(self) -> None:
        """Take no more gradients, and give each weight that lies in a bucket memory of its own."""
        for handle in self._handles:
            handle.remove()
        for bucket in self._buckets:
            bucket.release()

    @property
    def buckets(self) -> list[Tensor]:
        """The flat gradients and the buffers of their transfers, to count memory."""
        return [tensor for bucket in self._buckets for tensor in bucket.held]

    def split_units(self) -> list[OptimizerUnit]:
        """This rank's units of the buckets that are split."""
        return [bucket.unit() for bucket in self._buckets if bucket.is_split]

    def wait_in_forward(self, chunks: Sequence[GPT]) -> None:
        """Let each part of the model wait for its own weights before it runs."""
        bucket_of = {parameter: bucket for parameter, (bucket, _) in self._place.items()}
        for chunk in chunks:
            for module, needed in _waiting(chunk):
                learning = [id(p) for one in needed for p in one.parameters() if p.requires_grad]
                numbers = sorted({bucket_of[one] for one in learning if one in bucket_of})
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
        self._stream.join()

    def arrived(self, weight: SharedWeight) -> None:
        """A backward has added to this weight's gradient, on the current stream. Autograd says so by itself; whoever
        adds gradients in its place calls this."""
        if id(weight.parameter) not in self._place:
            return
        bucket, k = self._place[id(weight.parameter)]
        self._buckets[bucket].take(k)
        if weight.chunk not in self._armed:
            return
        self._buckets[bucket].arrive(k)
        self._begin_what_can()

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
    # Losses use the output matrix after a norm, without a forward of the matrix's own.
    found += [(one, [one, *chunk.tables()]) for one in (*chunk.auxiliary.values(), *chunk.ahead.values())]
    if chunk.norm is not None:
        found.append((chunk.norm, [chunk.norm, *chunk.tables()]))
    return found


# The weights of a rank's model, each with the ranks over which its gradient is summed.


def shared_weights(sharded: ShardedModel, execution: Execution) -> list[SharedWeight]:
    """The weights of this rank's model with their places and the ranks they are shared with, in the model's order.

    Where `shard` splits, those are the ranks that keep the same part.
    """
    layout, rank = execution.layout, dist.get_rank()
    here = layout.coordinates(rank)
    places = weight_boxes(execution.shape, layout, here)
    weights = []
    for number, chunk in enumerate(sharded.chunks):
        for name, parameter in chunk.named_parameters():
            box = places[name]
            ranks = ranks_sharing(execution.shape, layout, name, box, here["shard"])
            decays = describe_weight(name, execution.shape).decays
            split = ranks_splitting(layout, name, rank) if is_shared_out(name, layout) else None
            whole = execution.whole_updates == "hidden matrices" and is_hidden_matrix(name)
            if is_quantized(name, execution.shape):
                box = whole_box(parameter.shape)
            weights.append(
                SharedWeight(
                    name=name,
                    parameter=parameter,
                    box=box,
                    chunk=number,
                    ranks=ranks,
                    decays=decays,
                    split=split,
                    updated="as a whole" if whole else "by number",
                )
            )
    # Stages that share both tables have them in chunks of unlike order, and their buckets must be alike.
    return (
        sorted(weights, key=lambda one: TABLE_ORDER.get(one.name, 1)) if execution.shape.objectives.weights else weights
    )


TABLE_ORDER = {EMBEDDING: 0, HEAD: 2}
"""The embedding before all other weights, and the output matrix behind them."""


# One bucket of gradients: its sum over ranks, transfer by transfer, and where it is split the weights that return.


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
        self._split, self._number, self._turn = carried.split, carried.number, carried.tag
        self._own = own_slice(self.flat, carried.split) if carried.split else self.flat
        self._ways = algorithms_for(self.flat, self._own, carried)
        self.transfers = sum(way.transfers for way in self._ways)
        self._course: ReductionSteps = iter(())
        self._works: PendingWork = []
        self._gathering: PendingWork = []
        self._summing: PendingSpan | None = None
        self._returning: PendingSpan | None = None
        if carried.split:
            self._values = flat_buffer_for(weights, carried.pieces)
            for view, weight in zip(views_of(self._values, weights), weights, strict=True):
                view.copy_(weight.parameter.detach())
                weight.parameter.data = view
            self._parameter = nn.Parameter(own_slice(self._values, carried.split))
        self._views = gradient_views(self.flat, weights)
        self._begins = [one.data_ptr() for one in self._lasting()]

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
        if self._room == "moved":
            self._check_memory()
        for way in self._ways:
            way.expect()
        if self._room == "added":  # no gradient exists a second time beside the buckets
            self.flat.zero_()
            for weight, view in zip(self.weights, self._views, strict=True):
                weight.parameter.grad = view
        self.missing = set(range(len(self.weights)))
        self.begun, self._course = 0, chain.from_iterable(way.course() for way in self._ways)

    def _check_memory(self) -> None:
        """Raise PlaitError where a person has moved what must stay in this bucket: nothing would travel any more."""
        for weight, one, begin in zip(self.weights, self._lasting(), self._begins, strict=True):
            if one.data_ptr() != begin:
                raise PlaitError(
                    f"{weight.name} has got other memory since plait.spread, as by model.to(…) or .data = …, "
                    "where workers would not find it; change the model first, and call plait.spread then"
                )

    def _lasting(self) -> Sequence[Tensor]:
        """What must lie in this bucket from step to step, one for each weight: its part where weights come back, else
        its gradient, which `nn.Module.to` takes along."""
        return [weight.parameter for weight in self.weights] if self._split else self._views

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
        """End a transfer, and begin the next one: Note [waits beside the arithmetic] in reduction.py."""
        with self._stream.after_compute():
            self._wait_for_sums()
            self._works = next(self._course)
            self._summing = WATCH.begin("gradient sum", self.flat)
        self.begun += 1

    def go_on_to(self, count: int) -> None:
        """Block until `count` transfers have begun."""
        while self.begun < min(count, self.transfers):
            self.advance()

    def finish(self) -> None:
        """Wait for the sums; the own part's is then the gradient of its unit."""
        with self._stream.after_compute():
            self._wait_for_sums()
            for _ in self._course:
                raise AssertionError("a transfer that was not counted")
        if self._split:
            self._parameter.grad = self._own
            for weight in self.weights:
                weight.parameter.grad = None

    def _wait_for_sums(self) -> None:
        if self._works:
            with WATCH.wait("gradient sum", self._summing):
                wait_for_all(self._works)

    def expect_weights(self) -> None:
        """Post the receives of other ranks' updated weights."""
        if self._split and self.flat.device.type == "cpu":
            self._gathering = expect_others(self._values, self._split, GATHER_TAG + self._number)

    def gather(self) -> None:
        """Begin to collect the updated weights from all that keep a part of them."""
        if self._split and self.flat.device.type == "cpu":
            self._returning = WATCH.begin("weights", self._parameter)
            self._gathering += send_own(self._values, self._split, GATHER_TAG + self._number)
        elif self._split:
            self._returning = WATCH.begin("weights", self._parameter)
            self._gathering = [all_gather(self._values, self._parameter.data, group=self._split, async_op=True)]

    def settle(self) -> None:
        """Wait for the weights."""
        if self._gathering:
            with WATCH.wait("weights", self._returning):
                wait_for_all(self._gathering)

    def release(self) -> None:
        """Give each weight, and its gradient, memory of its own."""
        for weight in self.weights:
            weight.parameter.grad = None
            if self._split and _same_memory(weight.parameter, self._values):
                weight.parameter.data = weight.parameter.data.clone()


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
