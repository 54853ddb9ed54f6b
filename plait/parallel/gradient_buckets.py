"""Which gradients travel together: flat buckets, decided from names and sizes alone.

Note [fixed buckets]: a sum of floats depends on its order, and gloo's order on a value's offset in the buffer. torch's
DDP rebuilds its buckets after the first step, so a restarted run of three ranks adds in another order and is no longer
the same bit for bit. Here a weight's bucket and offset follow from names and sizes alone, from the first step on.

Note [smaller towards the end]: the last bucket is full only when the backward pass has ended, so that nothing hides its
sum, nor under the next forward pass the gather of its weights, which come first there. Buckets shrink towards it: each
takes half of what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.checkpoint.transfer import share_out
from plait.parallel.sharded_model import OptimizerUnit, OptimizerUnitPart, plain_unit
from plait.partition.boxes import Box, boxes_of_range

BUCKET_BYTES = 8 * 2**20
LAST_BYTES = 2**20
"""Size below which the last buckets do not shrink: Note [smaller towards the end]."""

RankSet = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A weight of this rank's model and the ranks that hold it, itself included: those that sum its gradient, if it
    learns.

    Where the optimizer's state is split, `ranks` are those that keep the same part of it. `split` are the ranks over
    which it is split, this one alone where it is not; None: those over which all else is.
    """

    name: str
    parameter: nn.Parameter
    box: Box
    chunk: int
    ranks: RankSet
    decays: bool
    split: RankSet | None = None
    updated: Literal["by number", "as a whole"] = "by number"
    """Whether its update is a function of each number by itself, or of all the matrix."""

    @property
    def trained(self) -> bool:
        return self.parameter.requires_grad


def fill_buckets(weights: Sequence[SharedWeight], split: int, bucket_bytes: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of the weights in each bucket, given in the order in which backward reaches them. `split` is the number
    of ranks over which weights are split that do not say it themselves.

    A bucket holds one dtype and one group of ranks, and where it is split one kind of weight decay and of update. It
    ends once it has the size, or half of what is left of its kind, see Note [smaller towards the end]. The buckets come
    in the order in which backward fills them.
    """
    kinds: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        parts = split if weight.split is None else len(weight.split)
        if parts == 1 and len(weight.ranks) == 1:
            continue  # nobody to add to: a bucket would only cost passes through memory
        kind = (
            weight.parameter.dtype,
            weight.ranks,
            weight.split,
            (weight.decays, weight.updated) if parts > 1 else None,
        )
        kinds.setdefault(kind, []).append(index)
    sizes = [weight.parameter.nbytes for weight in weights]
    full = [bucket for indices in kinds.values() for bucket in _filled(indices, sizes, bucket_bytes)]
    return sorted(full, key=lambda bucket: bucket[-1])


def _filled(indices: Sequence[int], sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[int]]:
    """The buckets of one kind."""
    left, bucket, held = sum(sizes[index] for index in indices), [], 0
    for index in indices:
        bucket.append(index)
        held += sizes[index]
        if held >= min(bucket_bytes, max(left // 2, LAST_BYTES)):
            yield bucket
            left, bucket, held = left - held, [], 0
    if bucket:
        yield bucket


def flat_buffer_for(weights: Sequence[SharedWeight], split: int) -> Tensor:
    """Zeros for all numbers of these weights, padded so that `split` equal parts hold them."""
    first = weights[0].parameter
    numbers = sum(weight.parameter.numel() for weight in weights)
    return torch.zeros(-(-numbers // split) * split, dtype=first.dtype, device=first.device)


def views_of(flat: Tensor, weights: Sequence[SharedWeight]) -> list[Tensor]:
    """Consecutive views of `flat`, one per weight and of its shape, each in row-major order."""
    sizes = [weight.parameter.numel() for weight in weights]
    parts = flat.split([*sizes, len(flat) - sum(sizes)])
    return [part.view(weight.parameter.shape) for part, weight in zip(parts[:-1], weights, strict=True)]


def gradient_views(flat: Tensor, weights: Sequence[SharedWeight]) -> list[Tensor]:
    """Consecutive views of `flat`, one per weight, with its shape and its order in memory (channels last, transposed):
    a fused optimizer reads a weight and its gradient in the order of memory, regardless of their strides."""
    return [
        view.as_strided(view.shape, dense_strides(weight.parameter), view.storage_offset())
        for view, weight in zip(views_of(flat, weights), weights, strict=True)
    ]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dims have the same order in memory; autograd gives them to a
    gradient."""
    return torch.empty_like(tensor, device="meta").stride()


def unit_of_range(weights: Sequence[SharedWeight], own: Tensor, first: int, *, owned: bool) -> OptimizerUnit:
    """The optimizer unit of a range of a bucket that begins at `first` and is held in `own`: rows of some weights,
    the first and last of them perhaps in part."""
    parts: list[OptimizerUnitPart] = []
    begin = 0
    for weight in weights:
        end = begin + weight.box.numbers
        low, high = max(first, begin), min(first + len(own), end)
        for box, at in boxes_of_range(weight.box, low - begin, high - begin):
            parts.append(OptimizerUnitPart(name=weight.name, box=box, first=begin + at - first))
        begin = end
    return OptimizerUnit(parameter=nn.Parameter(own), decays=weights[0].decays, owned=owned, parts=tuple(parts))


def whole_units(weights: Sequence[SharedWeight]) -> list[OptimizerUnit]:
    """One unit a weight; each is owned by one of the ranks that hold it, about equally many bytes by each."""
    rank = dist.get_rank()
    owned: set[str] = set()
    together: dict[RankSet, dict[str, int]] = {}
    for weight in weights:
        together.setdefault(weight.ranks, {})[weight.name] = weight.parameter.nbytes
    for ranks, sizes in together.items():
        owned |= set(share_out(sizes, len(ranks))[ranks.index(rank)])
    return [plain_unit(w.name, w.parameter, w.box, decays=w.decays, owned=w.name in owned) for w in weights]
