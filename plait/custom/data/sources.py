"""What a person gives as data, as one of two sources: examples by position, or a stream that every worker reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from plait.custom.cutting import BatchCut, batch_part, batch_size
from plait.custom.data.ahead import BeforeExample, unseeded
from plait.errors import PlaitError

Collate = Callable[[list[Any]], Any]
ReadPositions = Callable[[Sequence[int], BeforeExample], Any]
"""The collated batch of some positions; calls the second before it reads each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplePositions:
    """Examples by position: each worker reads its own alone."""

    size: int
    read: ReadPositions
    order: str = "shuffled"
    batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An iterable: of examples, collected into batches, or of whole batches where `collate` is None. Every worker reads
    it all and keeps its part."""

    data: Iterable[Any]
    collate: Collate | None
    cut: BatchCut | None
    order: str = "given"
    batch: int | None = None
    size: None = None

    def batches(self, size: int | None) -> Iterator[tuple[int, Callable[[int, int], Any]]]:
        """Each whole batch, in turn: its examples, and how to make the part from `first` up to `end` of it."""
        if self.collate is None:
            for batch in self.data:
                yield batch_size(batch, self.cut), self._cutter(batch)
            return
        items, collate = iter(self.data), self.collate
        assert size is not None
        while examples := list(islice(items, size)):
            yield len(examples), lambda first, end, held=examples: collate(held[first:end])

    def _cutter(self, batch: Any) -> Callable[[int, int], Any]:
        return lambda first, end: batch_part(batch, first, end, self.cut)


def source_of(
    data: Any, *, batch: int | None, collate: Collate | None, cut: BatchCut | None
) -> ExamplePositions | Stream:
    """The source behind a person's data; `batch` says that an iterable's items are examples. Raises PlaitError."""
    if isinstance(data, DataLoader):
        return _of_loader(data, collate, cut)
    if _is_columns(data):
        return _of_columns(data)
    if isinstance(data, Mapping | IterableDataset):
        return _stream(data, batch, collate, cut)
    length, reads = getattr(type(data), "__len__", None), getattr(type(data), "__getitem__", None)
    if length is not None and reads is not None:
        return ExamplePositions(size=len(data), read=_reader(data, collate or default_collate))
    return _stream(data, batch, collate, cut)


def _stream(data: Any, batch: int | None, collate: Collate | None, cut: BatchCut | None) -> Stream:
    if isinstance(data, Mapping) or getattr(type(data), "__iter__", None) is None:
        raise PlaitError(
            f"a {type(data).__name__} is no data to read batches from; give a Dataset, a list of examples, tensors "
            f"of one "
            "length, or an iterable"
        )
    return Stream(data=data, collate=(collate or default_collate) if batch is not None else None, cut=cut)


def _reader(data: Any, collate: Collate) -> ReadPositions:
    many: Any = getattr(data, "__getitems__", None)

    def read(positions: Sequence[int], before: BeforeExample) -> Any:
        if many is not None and before is unseeded:  # what is random is read one by one, after its own seed
            return collate(many(list(positions)))
        examples = []
        for position in positions:
            before(position)
            examples.append(data[position])
        return collate(examples)

    return read


def _is_columns(data: Any) -> bool:
    """A tensor or array, or a tuple or dict of them: columns, whose rows are the examples."""
    if isinstance(data, tuple) and data:
        return all(_is_rows(column) for column in data)
    if type(data) is dict and data:
        return all(_is_rows(column) for column in data.values())
    return _is_rows(data)


def _is_rows(data: Any) -> bool:
    return isinstance(data, Tensor) or (type(data).__module__ == "numpy" and type(data).__name__ == "ndarray")


def _of_columns(data: Any) -> ExamplePositions:
    size = batch_size(data)

    def rows(column: Any, positions: Tensor) -> Any:
        return column[positions] if isinstance(column, Tensor) else torch.from_numpy(column[positions.numpy()])

    def read(positions: Sequence[int], before: BeforeExample) -> Any:
        index = torch.as_tensor(positions)
        if isinstance(data, tuple):
            return tuple(rows(column, index) for column in data)
        if isinstance(data, dict):
            return {name: rows(column, index) for name, column in data.items()}
        return rows(data, index)

    return ExamplePositions(size=size, read=read)


def unused_processes_text(data: Any) -> str:
    """What of a DataLoader is not used, if anything, in words."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset) or not data.num_workers:
        return ""
    processes = "process is" if data.num_workers == 1 else f"{data.num_workers} processes are"
    return f"the DataLoader's {processes} not used: each worker reads its own examples, ahead of the steps"


def _of_loader(loader: DataLoader[Any], collate: Collate | None, cut: BatchCut | None) -> ExamplePositions | Stream:
    """A DataLoader's data set, order and batch, so that each worker reads its own examples alone."""
    if isinstance(loader.dataset, IterableDataset):
        return Stream(data=loader, collate=None, cut=cut)
    plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in (RandomSampler, SequentialSampler)
    if not plain:
        raise PlaitError(
            f"a DataLoader with a {type(loader.sampler).__name__} of its own decides which worker reads what; give its "
            "dataset to run.batches, or an iterable of whole batches"
        )
    order = "shuffled" if type(loader.sampler) is RandomSampler else "given"
    found: Any = loader.dataset
    read = _reader(found, collate or loader.collate_fn)
    return ExamplePositions(size=len(found), read=read, order=order, batch=loader.batch_size)
