"""A batch cut into parts by examples: for workers, and for accumulation. Pure.

A batch is one of: a tensor or array (its first dim counts examples), a list of examples that are no tensors, or a
tuple, list, dict, named tuple or dataclass of batches of one size. Numbers, texts and 0-dim tensors in it belong to
every part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from plait.errors import PlaitError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """How a person's own kind of batch is cut: its size in examples, and the examples from `first` up to `end`."""

    size: Callable[[Any], int]
    part: Callable[[Any, int, int], Any]


def batch_size(batch: Any, cut: BatchCut | None = None) -> int:
    """Examples in a batch; raises PlaitError where that cannot be seen."""
    if cut is not None:
        return cut.size(batch)
    sizes = sorted(set(_sizes(batch)))
    if not sizes:
        raise PlaitError(f"a batch that is a {type(batch).__name__} has no size to be seen; {_ADVICE}")
    if len(sizes) > 1:
        shown = " and ".join(map(str, sizes[:3]))
        raise PlaitError(f"the parts of a batch have {shown} examples, so it cannot be cut; {_ADVICE}")
    return sizes[0]


def batch_part(batch: Any, first: int, end: int, cut: BatchCut | None = None) -> Any:
    """The examples from `first` up to `end`, as views where the batch is of tensors."""
    return cut.part(batch, first, end) if cut is not None else _part(batch, first, end)


def batch_parts(batch: Any, count: int, cut: BatchCut | None = None) -> list[Any]:
    """A batch in `count` nearly equal parts, the larger ones first; fewer where it has fewer examples."""
    if count == 1:
        return [batch]
    size = batch_size(batch, cut)
    count = max(1, min(count, size))
    edges = [size * k // count for k in range(count + 1)]
    return [batch_part(batch, first, end, cut) for first, end in pairwise(edges)]


def cut_sizes(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of `shares` that add up to `total`, each at least 1: largest remainders first.

    Raises PlaitError where there are more shares than examples.
    """
    if total < len(shares):
        raise PlaitError(
            f"a batch of {total} for {len(shares)} workers: each needs one example at least; take a larger batch or "
            "fewer workers"
        )
    exact = [share * total / sum(shares) for share in shares]
    sizes = [max(1, int(one)) for one in exact]
    while sum(sizes) != total:
        step = 1 if sum(sizes) < total else -1
        movable = [k for k in range(len(sizes)) if step > 0 or sizes[k] > 1]
        sizes[max(movable, key=lambda k: (step * (exact[k] - sizes[k]), -k))] += step
    return tuple(sizes)


_ADVICE = "say how: plait.spread(…, cut=plait.BatchCut(size=lambda batch: …, part=lambda batch, first, end: …))"


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, PackedSequence):
        raise PlaitError(f"a PackedSequence cannot be cut by examples; pack it in your loss, or {_ADVICE}")
    if _is_array(batch):
        if len(batch.shape):
            yield int(batch.shape[0])
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value)
    elif _is_list_of_examples(batch):
        yield len(batch)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _sizes(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _sizes(getattr(batch, field.name))
    elif batch is not None and not isinstance(batch, str | bytes | int | float | bool):
        raise PlaitError(f"a {type(batch).__name__} in a batch cannot be cut; {_ADVICE}")


def _part(batch: Any, first: int, end: int) -> Any:
    if _is_array(batch):
        return batch[first:end] if len(batch.shape) else batch
    if isinstance(batch, Mapping):
        parts = {key: _part(value, first, end) for key, value in batch.items()}
        return parts if type(batch) is dict else _same_kind(batch, parts)
    if _is_list_of_examples(batch):
        return batch[first:end]
    if isinstance(batch, tuple | list):
        parts = [_part(value, first, end) for value in batch]
        return type(batch)(*parts) if getattr(batch, "_fields", None) else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{field.name: _part(getattr(batch, field.name), first, end) for field in fields(batch)})
    return batch


def _same_kind(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    kind: Any = type(batch)
    return kind(parts)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (type(value).__module__ == "numpy" and type(value).__name__ == "ndarray")


def _is_list_of_examples(value: Any) -> bool:
    """A list whose members stand for one example each: tensors of several sizes, or no tensors and no lists."""
    if not isinstance(value, list) or not value:
        return False
    if all(_is_array(member) for member in value):
        return not len(value[0].shape) or len({int(member.shape[0]) for member in value}) > 1
    return not any(_is_array(member) or isinstance(member, list) for member in value)
