"""Sums gradients over a group of ranks in fixed buckets, while backward still runs.

Note [fixed buckets]: a sum of floats depends on its order, and gloo's order on a value's offset in the buffer. torch's
DDP rebuilds its buckets after the first step, so a restarted run of three ranks adds in another order and is no longer
the same bit for bit. Here a parameter's bucket and offset follow from names and sizes alone, from the first step on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 8 * 2**20


class Reducer:
    """Gives every parameter the sum of its gradients over a group, SUM and never mean.

    A step calls `open`, runs its micro-batches, calls `arm` before the last one's backward, then `close`; in between
    `.grad` collects this rank's own sum. After `close` each `.grad` is a view into `buckets`. Every rank of the group
    must do the same in the same order.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.group = group
        # Backward reaches the last layers first, so the first bucket to be full holds the last parameters.
        self.parameters = list(parameters)[::-1]
        members = _fill(self.parameters, bucket_bytes)
        self.buckets = [_flat([self.parameters[i] for i in bucket]) for bucket in members]
        self._bucket_of = [number for number, bucket in enumerate(members) for _ in bucket]
        self._views = [
            view
            for flat, bucket in zip(self.buckets, members, strict=True)
            for view in _views(flat, [self.parameters[i] for i in bucket])
        ]
        self._sizes = [len(bucket) for bucket in members]
        self._missing: list[set[int]] = []
        self._works: list[dist.Work] = []
        self._armed = False
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    def open(self) -> None:
        """Begin a step: no gradient yet."""
        for parameter in self.parameters:
            parameter.grad = None
        first = 0
        self._missing = []
        for size in self._sizes:
            self._missing.append(set(range(first, first + size)))
            first += size
        self._works = []

    def arm(self) -> None:
        """The next backward is the step's last: sum each bucket as soon as it is full."""
        self._armed = True

    def close(self) -> None:
        """Wait until every gradient is the global sum. A parameter that got none on this rank counts as zero."""
        self._armed = False
        for missing in self._missing[len(self._works) :]:
            for index in sorted(missing):
                self._views[index].zero_()
                self.parameters[index].grad = self._views[index]
            missing.clear()
        self._send_full_buckets()
        for work in self._works:
            work.wait()

    def _arrived(self, index: int) -> None:
        if not self._armed:
            return
        parameter, view = self.parameters[index], self._views[index]
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        parameter.grad = view
        self._missing[self._bucket_of[index]].discard(index)
        self._send_full_buckets()

    def _send_full_buckets(self) -> None:
        """Start the sums that can start, always in bucket order: ranks must agree on it."""
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            work = dist.all_reduce(self.buckets[len(self._works)], group=self.group, async_op=True)
            assert work is not None
            self._works.append(work)


def _fill(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[int]]:
    """Indices of the parameters in each bucket: in order, one dtype each, a bucket ends once it has the size."""
    buckets: list[list[int]] = []
    size, dtype = 0, None
    for index, parameter in enumerate(parameters):
        if not buckets or size >= bucket_bytes or parameter.dtype != dtype:
            buckets.append([])
            size, dtype = 0, parameter.dtype
        buckets[-1].append(index)
        size += parameter.numel() * parameter.element_size()
    return buckets


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    first = parameters[0]
    return torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
