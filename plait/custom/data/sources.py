"""The user's data as one of two sources: examples by position, or a stream that every worker reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

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
from plait.custom.data.ahead import BeforeExample, Processes, unseeded
from plait.custom.seeds import seeded
from plait.custom.structure import is_array
from plait.errors import PlaitError

Collate = Callable[[list[Any]], Any]
ReadPositions = Callable[[Sequence[int], BeforeExample], Any]
"""The collated batch of some positions; calls the second before it reads each."""


Draw = Callable[[int], Sequence[Any]]
"""A sampler's output in a pass, given a seed: positions, or lists of them if it makes whole batches."""
RestOfPass = Literal["drop", "keep"]
"""Whether the examples of a pass that fill no batch are left out or trained on."""

CollatedOver = Literal["share", "batch"]
"""Which examples `collate` receives: this worker's share, or the whole batch, from which the worker then keeps its
share. The second gives the numbers of one process where examples are padded to the longest, or mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplePositions:
    """Examples by position: each worker reads its own alone. `draw` is a sampler of the person's own, which gives
    positions in place of `order`, or whole batches of them."""

    size: int
    """Length of a pass in examples, or in batches if a sampler makes them."""
    read: ReadPositions
    order: Literal["shuffled", "given"] = "shuffled"
    batch: int | None = None
    rest: RestOfPass = "drop"
    draw: Draw | None = None
    draws: Literal["positions", "batches"] = "positions"
    processes: Processes | None = None
    """The processes that make batches, if a DataLoader has some."""
    thread: Literal["may thread", "in turn"] = "may thread"
    """Whether the sampler may draw while the program computes: not from generators that a model uses, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An iterable: of examples, collected into batches, or of whole batches where `collate` is None. Every worker reads
    it all and keeps its part."""

    data: Iterable[Any]
    collate: Collate | None
    cut: BatchCut | None
    collated_over: CollatedOver = "share"
    batch: int | None = None
    rest: RestOfPass = "drop"
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
            yield len(examples), self._collater(examples, collate)

    def _cutter(self, batch: Any) -> Callable[[int, int], Any]:
        return lambda first, end: batch_part(batch, first, end, self.cut)

    def _collater(self, examples: list[Any], collate: Collate) -> Callable[[int, int], Any]:
        def part(first: int, end: int) -> Any:
            if first < end and self.collated_over == "share":
                return collate(examples[first:end])
            return batch_part(collate(examples), first, end, self.cut)

        return part


def source_of(
    data: Any,
    *,
    batch: int | None,
    collate: Collate | None,
    cut: BatchCut | None,
    collated_over: CollatedOver = "share",
) -> ExamplePositions | Stream:
    """The source behind a person's data; `batch` says that an iterable's items are examples. Raises PlaitError."""
    if isinstance(data, DataLoader):
        return _of_loader(data, collate, cut)
    if _is_columns(data):
        return _of_columns(data)
    if isinstance(data, Mapping | IterableDataset):
        return _stream(data, batch, collate, cut, collated_over)
    length, reads = getattr(type(data), "__len__", None), getattr(type(data), "__getitem__", None)
    if length is not None and reads is not None:
        return ExamplePositions(size=len(data), read=_reader(data, collate or default_collate))
    return _stream(data, batch, collate, cut, collated_over)


def _stream(
    data: Any, batch: int | None, collate: Collate | None, cut: BatchCut | None, collated_over: CollatedOver
) -> Stream:
    if isinstance(data, Mapping) or getattr(type(data), "__iter__", None) is None:
        raise PlaitError(
            f"a {type(data).__name__} is no data to read batches from; give a Dataset, a list of examples, tensors "
            f"of one "
            "length, or an iterable"
        )
    collects = (collate or default_collate) if batch is not None else None
    return Stream(data=data, collate=collects, cut=cut, collated_over=collated_over)


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
        return all(is_array(column) for column in data)
    if type(data) is dict and data:
        return all(is_array(column) for column in data.values())
    return is_array(data)


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


def processes_of(loader: DataLoader[Any]) -> Processes | None:
    """The processes that a DataLoader makes its batches in; None where it has none, or where they cannot be forked."""
    if not loader.num_workers or _not_forked(loader):
        return None
    return Processes(
        data=loader.dataset,
        number=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        timeout_s=loader.timeout,
        begin=loader.worker_init_fn,
    )


def unused_processes_text(data: Any) -> str:
    """A message about the processes of a DataLoader that are not used; empty if there are none."""
    if not isinstance(data, DataLoader) or not data.num_workers or not _not_forked(data):
        return ""
    return (
        "the DataLoader's processes are not used, as they are not forked on this machine or by its "
        "multiprocessing_context: a thread reads ahead"
    )


def _not_forked(loader: DataLoader[Any]) -> bool:
    context: Any = loader.multiprocessing_context
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    return sys.platform != "linux" or method not in (None, "fork")


def _of_loader(loader: DataLoader[Any], collate: Collate | None, cut: BatchCut | None) -> ExamplePositions | Stream:
    """A DataLoader's data set, order and batches, so that each worker reads its own examples alone."""
    batches: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or batches is None:
        return Stream(data=loader, collate=None, cut=cut)
    found: Any = loader.dataset
    read = _reader(found, collate or loader.collate_fn)
    if type(batches) is not BatchSampler:
        draw, thread = _drawn_from(batches), _may_thread(batches)
        return ExamplePositions(
            size=_length(batches), read=read, rest="keep", draw=draw, draws="batches", thread=thread,
            processes=processes_of(loader),
        )  # fmt: skip
    sampler: Any = batches.sampler
    rest: RestOfPass = "drop" if batches.drop_last else "keep"
    size = _length(sampler)
    whole = type(sampler) is RandomSampler and not sampler.replacement and size == len(found)
    if whole or type(sampler) is SequentialSampler:
        order: Literal["shuffled", "given"] = "shuffled" if whole else "given"
        return ExamplePositions(
            size=size, read=read, order=order, batch=batches.batch_size, rest=rest, processes=processes_of(loader)
        )
    return ExamplePositions(
        size=size, read=read, batch=batches.batch_size, rest=rest, draw=_drawn_from(sampler),
        thread=_may_thread(sampler), processes=processes_of(loader),
    )  # fmt: skip


def _length(sampler: Any) -> int:
    """Of a sampler, in what it gives. Raises PlaitError for one that shares data out itself, or that has no length."""
    name = type(sampler).__name__
    if name == "DistributedSampler":
        raise PlaitError("leave the DistributedSampler out: run.batches gives each worker its share of every batch")
    try:
        return len(sampler)
    except TypeError:
        raise PlaitError(
            f"the DataLoader's {name} has no length, so passes cannot be counted; give it a __len__, or give "
            "run.batches an iterable of whole batches"
        ) from None


def _drawn_from(sampler: Any) -> Draw:
    """A sampler's output as a function of a seed, through its `generator` if it is one of torch's."""

    def draw(seed: int) -> Sequence[Any]:
        if _may_thread(sampler) == "in turn":
            with seeded(seed):
                return list(sampler)
        kept, sampler.generator = sampler.generator, torch.Generator().manual_seed(seed)
        try:
            return list(sampler)
        finally:
            sampler.generator = kept

    return draw


def _may_thread(sampler: Any) -> Literal["may thread", "in turn"]:
    """A class of the person's own may draw from the generators that models use, too."""
    of_torch = type(sampler).__module__.startswith("torch.") and hasattr(sampler, "generator")
    return "may thread" if of_torch else "in turn"
