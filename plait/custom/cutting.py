"""A batch cut into parts by examples: for workers, and for accumulation. Pure.

A batch is one of: a tensor or array (its first dim counts examples), a list of examples that are no tensors, or a
tuple, list, dict, named tuple or dataclass of batches of one size. Numbers, texts and 0-dim tensors in it belong to
every part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from plait.custom.structure import is_array, leaves, with_leaves
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
    for leaf in leaves(batch, lambda value: _is_cut(value) or isinstance(value, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            raise PlaitError(f"a PackedSequence cannot be cut by examples; pack it in your loss, or {_ADVICE}")
        if isinstance(leaf, list):
            yield len(leaf)
        elif is_array(leaf):
            if len(leaf.shape):
                yield int(leaf.shape[0])
        elif leaf is not None and not isinstance(leaf, str | bytes | int | float | bool):
            raise PlaitError(f"a {type(leaf).__name__} in a batch cannot be cut; {_ADVICE}")


def _part(batch: Any, first: int, end: int) -> Any:
    def part(leaf: Any) -> Any:
        return leaf[first:end] if isinstance(leaf, list) or (is_array(leaf) and len(leaf.shape)) else leaf

    return with_leaves(batch, part, _is_cut)


def _is_cut(value: Any) -> bool:
    """Whether this is cut by its first dim, or as a list."""
    return is_array(value) or _is_list_of_examples(value)


def _is_list_of_examples(value: Any) -> bool:
    """A list whose members stand for one example each: tensors of several sizes, or no tensors and no lists."""
    if not isinstance(value, list) or not value:
        return False
    if all(is_array(member) for member in value):
        return not len(value[0].shape) or len({int(member.shape[0]) for member in value}) > 1
    return not any(is_array(member) or isinstance(member, list) for member in value)
