"""Sums gradients over groups of ranks in fixed buckets while backward still runs; scatters them where they are
sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.model.gpt import GPT
from plait.parallel.comm.reduction import BucketTransfer, Transfer
from plait.parallel.comm.transfer_stream import TransferStream, transfer_stream
from plait.parallel.gradients.buckets import BUCKET_BYTES, RankSet, SharedWeight, fill_buckets
from plait.parallel.gradients.summed_bucket import GradientRoom, SummedBucket
from plait.parallel.sharded_model import OptimizerUnit

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
        for weight in chain.from_iterable(bucket.weights for bucket in self._buckets):
            weight.parameter.register_post_accumulate_grad_hook(lambda _, weight=weight: self.arrived(weight))

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
