"""Sums gradients over groups of ranks in fixed buckets, while backward still runs; splits them where that is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from plait.model.gpt import GPT
from plait.parallel.buckets import BUCKET_BYTES, Ranks, Shared, fill_buckets, flat_for, unit_of_range, views_of
from plait.parallel.collectives import all_gather, reduce_scatter, spread_own, swap_parts
from plait.parallel.woven import Unit

Groups = Mapping[Ranks, dist.ProcessGroup]


class Reducer:
    """Gives every weight the sum of its gradients over all ranks that hold it, SUM and never mean.

    A step calls `open`, runs its micro-batches, calls `arm` before a chunk's last backward, then `close`; in between
    `.grad` collects this rank's own sum. With a `split` group each of its ranks ends up with an equal part of every
    bucket and updates that alone (the units of `split_units`); `publish` then gathers the weights, and the forward of
    each layer waits for its own. Every rank must do the same in the same order.
    """

    def __init__(
        self,
        weights: Sequence[Shared],
        groups: Groups,
        split: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        # Backward reaches the last layers first, so the first bucket to be full holds the last weights.
        self._weights = list(weights)[::-1]
        members = fill_buckets(self._weights, dist.get_world_size(split) if split else 1, bucket_bytes)
        self._buckets = [
            _Bucket([self._weights[i] for i in some], groups, split, tag) for tag, some in enumerate(members)
        ]
        self._place = {index: (b, k) for b, some in enumerate(members) for k, index in enumerate(some)}
        self._armed: set[int] = set()
        self._started = self._advanced = 0
        for index in self._place:
            parameter = self._weights[index].parameter
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    @property
    def buckets(self) -> list[Tensor]:
        """The flat gradients, for whoever counts memory."""
        return [bucket.flat for bucket in self._buckets]

    def split_units(self) -> list[Unit]:
        """What the optimizer updates on this rank where the buckets are split."""
        return [bucket.unit(number) for number, bucket in enumerate(self._buckets)]

    def wait_in_forward(self, chunks: Sequence[GPT]) -> None:
        """Let each part of the model wait for its own weights before it runs."""
        bucket_of = {id(weight.parameter): self._place[i][0] for i, weight in enumerate(self._weights)}
        for chunk in chunks:
            for module, needed in _waiting(chunk):
                numbers = sorted({bucket_of[id(p)] for one in needed for p in one.parameters()})
                module.register_forward_pre_hook(lambda *_, numbers=numbers: self._wait(numbers))

    def open(self) -> None:
        """Begin a step: no gradient yet."""
        for weight in self._weights:
            weight.parameter.grad = None
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.weights)))
        self._started = self._advanced = 0

    def arm(self, chunk: int) -> None:
        """The next backward through this chunk is its last of the step: sum each bucket as soon as it is full."""
        self._armed.add(chunk)

    def close(self) -> None:
        """Wait until every gradient is the global sum. A weight that got none on this rank counts as zero."""
        self._armed.clear()
        for bucket in self._buckets[self._started :]:
            for k in sorted(bucket.missing):
                bucket.take(k)
        self._start_full_buckets()
        for bucket in self._buckets[self._advanced :]:
            bucket.advance()
        for bucket in self._buckets:
            bucket.finish()

    def publish(self) -> None:
        """Gather split weights, the model's first ones first."""
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
        self._buckets[bucket].take(k)
        self._start_full_buckets()

    def _start_full_buckets(self) -> None:
        """Start the sums that can start, first and second ones always in bucket order: ranks must agree on it."""
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._buckets[self._started].start()
            self._started += 1
        while self._advanced < self._started and self._buckets[self._advanced].scattered():
            self._buckets[self._advanced].advance()
            self._advanced += 1


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
    """Gradients that travel together: one sum over `group`, after a scatter over `split` where there is one."""

    def __init__(self, weights: list[Shared], groups: Groups, split: dist.ProcessGroup | None, tag: int) -> None:
        parts = dist.get_world_size(split) if split else 1
        self.weights = weights
        self.flat = flat_for(weights, parts)
        self.missing: set[int] = set()
        self._tag = tag
        self._views = views_of(self.flat, weights)
        self._group, self._split = groups.get(weights[0].ranks), split
        self._scattering: list[dist.Work] = []
        self._summing: dist.Work | None = None
        self._gathering: list[dist.Work] = []
        length = len(self.flat) // parts
        self._first = length * dist.get_rank(split) if split else 0
        self._own = self.flat[self._first : self._first + length]
        # On CPUs parts travel from rank to rank: see swap_parts.
        self._received = self.flat.new_empty(parts - 1, length) if split and self.flat.device.type == "cpu" else None
        if split:
            self._values = flat_for(weights, parts)
            for view, weight in zip(views_of(self._values, weights), weights, strict=True):
                view.copy_(weight.parameter.detach())
                weight.parameter.data = view
            self._parameter = nn.Parameter(self._values[self._first : self._first + length])

    def unit(self, number: int) -> Unit:
        """This rank's part of the weights; the ranks that keep the same part take turns in answering for it."""
        ranks = self.weights[0].ranks
        owned = ranks[number % len(ranks)] == dist.get_rank()
        unit = unit_of_range(self.weights, self._parameter.data, self._first, owned=owned)
        self._parameter = unit.parameter
        return unit

    def take(self, k: int) -> None:
        """Put what this rank has of a weight's gradient into the bucket."""
        parameter, view = self.weights[k].parameter, self._views[k]
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        parameter.grad = view
        self.missing.discard(k)

    def start(self) -> None:
        """Begin the first sum."""
        if self._split and self._received is not None:
            self._scattering = swap_parts(self.flat, self._received, self._split, self._tag)
        elif self._split:
            self._scattering = [reduce_scatter(self._own, self.flat, group=self._split, async_op=True)]
        else:
            self._summing = dist.all_reduce(self.flat, group=self._group, async_op=True)

    def scattered(self) -> bool:
        """Whether a second sum may begin without waiting: on a GPU always, it is its streams that wait."""
        return self.flat.is_cuda or all(work.is_completed() for work in self._scattering)

    def advance(self) -> None:
        """End the scatter; begin the second sum where there is one: over those who keep the same part."""
        if not self._scattering:
            return
        _wait(self._scattering)
        if self._received is not None:
            for other in self._received:
                self._own += other
        if self._group:
            self._summing = dist.all_reduce(self._own, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums; the own part's is then the gradient of its unit."""
        if self._summing is not None:
            self._summing.wait()
            self._summing = None
        if self._split:
            self._parameter.grad = self._own
            for weight in self.weights:
                weight.parameter.grad = None

    def gather(self) -> None:
        """Begin to collect the updated weights from all that keep a part of them."""
        if self._split and self._received is not None:
            self._gathering = spread_own(self._values, self._split, self._tag)
        elif self._split:
            self._gathering = [all_gather(self._values, self._parameter.data, group=self._split, async_op=True)]

    def settle(self) -> None:
        """Wait for the weights."""
        _wait(self._gathering)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
    works.clear()
