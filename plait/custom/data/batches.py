"""A program's batches: the same global ones for any number of workers, of which each worker gets its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch

from plait.custom.cutting import BatchCut, batch_part
from plait.custom.data.ahead import BatchMaker, BeforeExample, MakeBatch, unseeded
from plait.custom.data.shares import ShareChanges, ShareTable
from plait.custom.data.sources import Collate, CollatedOver, ExamplePositions, RestOfPass, Stream, source_of
from plait.custom.seeds import seed_from
from plait.errors import PlaitError

Order = Literal["auto", "shuffled", "given"]
"""Order of examples by position: shuffled in each pass by the seed, or as they lie. "auto" is a DataLoader's own, else
shuffled."""
LastBatch = Literal["auto", "drop", "keep"]
"""Whether the rest of a pass that fills no batch is left out or trained on: "auto" is a DataLoader's own, else left
out. Of fewer examples than workers some workers have none in that step."""

PassOrder = torch.Tensor | list[list[int]]
"""Positions in the order of one pass; one list per batch where a batch sampler makes the batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a program asked for: `batch` is global, None where the data come in batches of their own; `number` is that
    of the call of run.batches in the program, counted from 0."""

    batch: int | None
    epochs: int
    order: Order
    last: LastBatch
    collate: Collate | None
    collated_over: CollatedOver
    cut: BatchCut | None
    seed: int
    number: int


@dataclass(slots=True, kw_only=True)
class BatchPlace:
    """How far one call of run.batches has come: batches handed out, those of them that a step has used, and whether it
    has come to its end; and who had, or will have, which part of them."""

    given: int = 0
    used: int = 0
    ended: bool = False
    shares: ShareChanges = field(default_factory=list)

    def plain(self) -> list[Any]:
        """The values that a resume needs, as JSON."""
        return [self.used, self.ended, [[first, list(shares)] for first, shares in self.shares]]

    @classmethod
    def from_plain(cls, saved: list[Any], same_workers: Literal["same workers", "other workers"]) -> BatchPlace:
        """The place that was saved; shares of another number of workers are of no use."""
        used, ended, *shares = saved
        kept = [(int(first), tuple(map(float, one))) for first, one in (shares[0] if shares else [])]
        return cls(given=used, used=used, ended=ended, shares=kept if same_workers == "same workers" else [])


@dataclass(slots=True, kw_only=True)
class OwnBatches:
    """This worker's share of each batch, in turn. `place` is moved on; batches before `place.used` are not made."""

    request: BatchRequest
    source: ExamplePositions | Stream
    shares: ShareTable
    rank: int
    place: BatchPlace
    maker: BatchMaker = field(init=False)
    first: Callable[[], Any] | None = None
    """Makes the whole of the first batch that a stream gave; None before."""
    first_order: PassOrder | None = None
    """The output of the user's own sampler for the first pass; None before. Not drawn twice: it may be random."""

    def __post_init__(self) -> None:
        # A stream may draw random numbers when it is read again from its start: Note [random data] in ahead.py.
        may = self.source.thread if isinstance(self.source, ExamplePositions) else "in turn"
        if isinstance(self.source, Stream) and self.request.epochs == 1:
            may = "may thread"
        processes = self.source.processes if isinstance(self.source, ExamplePositions) else None
        self.maker = BatchMaker(
            seed_from("data", self.request.seed, self.request.number), may_thread=may, processes=processes
        )

    def __iter__(self) -> Iterator[Any]:
        if self.place.ended:
            return
        self.place.given = self.place.used
        # A batch counts as handed out before the program has it: it may save while it holds it.
        for batch in self.maker.in_turn(self._makers(self.place.used)):
            self.place.given += 1
            yield batch
        self.place.ended = True

    @property
    def examples(self) -> int:
        """Size of a whole batch; 0 if it is unknown before it is read."""
        return self.request.batch or self.source.batch or 0

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of a pass over the data; None for a stream."""
        if isinstance(self.source, Stream):
            return None
        return _batches_of_pass(self.source, self.request, self._workers)

    @property
    def last_is_full(self) -> bool:
        """Whether the batch that was handed out last has as many examples as most, as far as that is known."""
        if isinstance(self.source, Stream) or self.source.draws == "batches":
            return True
        full = self.source.size // _batch_of(self.request, self.source)
        return (self.place.given - 1) % _batches_of_pass(self.source, self.request, self._workers) < full

    @property
    def _workers(self) -> int:
        return len(self.shares.at(0))

    def _makers(self, skipped: int) -> Iterator[MakeBatch | None]:
        """Makes each batch; batches are numbered on from pass to pass."""
        if isinstance(self.source, ExamplePositions):
            yield from self._by_position(self.source, skipped)
        else:
            yield from self._by_stream(self.source, skipped)

    def _by_position(self, source: ExamplePositions, skipped: int) -> Iterator[MakeBatch | None]:
        passes = _batches_of_pass(source, self.request, self._workers)
        for epoch in range(skipped // passes, self.request.epochs):
            order = self._order(source, epoch)
            if source.draw is not None and self.first_order is None:
                self.first_order = order
            for batch in range(max(0, skipped - epoch * passes), passes):
                number, positions = epoch * passes + batch, self._positions(source, order, batch)
                first, end = self.shares.own_range(number, len(positions), self.rank)
                share = OwnShare(positions=positions, first=first, end=end, epoch=epoch)
                yield partial(read_share, source, self.request, share)

    def _order(self, source: ExamplePositions, epoch: int) -> PassOrder:
        seed = seed_from("order", self.request.seed, self.request.number, epoch)
        if source.draw is not None:
            drawn = source.draw(seed)
            if len(drawn) != source.size:
                raise PlaitError(
                    f"the sampler has a length of {source.size} and gave {len(drawn)} of them; correct its __len__"
                )
            return (
                [list(map(int, one)) for one in drawn]
                if source.draws == "batches"
                else torch.tensor([int(one) for one in drawn])
            )
        if (source.order if self.request.order == "auto" else self.request.order) == "given":
            return torch.arange(source.size)
        return torch.randperm(source.size, generator=torch.Generator().manual_seed(seed))

    def _positions(self, source: ExamplePositions, order: PassOrder, batch: int) -> list[int]:
        if isinstance(order, list):
            return order[batch]
        size = _batch_of(self.request, source)
        return order[batch * size : (batch + 1) * size].tolist()

    def _by_stream(self, source: Stream, skipped: int) -> Iterator[MakeBatch | None]:
        number = 0
        for epoch in range(self.request.epochs):
            begun = number
            for examples, part in source.batches(self.request.batch):
                if not self._counts(examples):
                    continue
                if number == 0:
                    self.first = partial(part, 0, examples)
                first, end = self.shares.own_range(number, examples, self.rank)
                yield partial(_take, part, first, end) if number >= skipped else None
                number += 1
            if number == begun:
                again = "an iterator is read only once; give a list or a Dataset, or leave epochs out"
                raise PlaitError(again if epoch else _too_few("the data", None, self.request.batch, self._workers))

    def _counts(self, examples: int) -> bool:
        full = self.request.batch is None or examples == self.request.batch
        return full or (examples > 0 and rest_of(self.request, self.source) == "keep")


def own_batches(data: Any, request: BatchRequest, shares: ShareTable, rank: int, place: BatchPlace) -> OwnBatches:
    """This worker's share of the batches of a person's data; raises PlaitError for data that cannot be read so."""
    if request.collated_over not in get_args(CollatedOver):
        raise PlaitError(f'collated_over = "{request.collated_over}" is unknown; choose "share" or "batch"')
    source = source_of(
        data, batch=request.batch, collate=request.collate, cut=request.cut, collated_over=request.collated_over
    )
    found = OwnBatches(request=request, source=source, shares=shares, rank=rank, place=place)
    _ = found.steps_per_epoch  # raises where there are too few examples
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnShare:
    """A worker's share of a batch: of the positions of its examples those from the first up to the end."""

    positions: list[int]
    first: int
    end: int
    epoch: int


def read_share(source: ExamplePositions, request: BatchRequest, share: OwnShare, before: BeforeExample) -> Any:
    """The collated share; without examples, a batch of the same kind that has none."""
    seeding = before if before is unseeded else lambda position: before(seed_from(share.epoch, position))
    own = share.positions[share.first : share.end]
    if own and request.collated_over == "share":
        return source.read(own, seeding)
    return batch_part(source.read(share.positions, seeding), share.first, share.end, request.cut)


def _take(part: Callable[[int, int], Any], first: int, end: int, before: BeforeExample) -> Any:
    return part(first, end)


def global_batch(batch: int | None, batch_per_worker: int | None, epochs: int, workers: int) -> int | None:
    """The size of a batch over all workers, from what a person asks for; None where they leave it to the data.

    Raises PlaitError for numbers that cannot be.
    """
    if batch is not None and batch_per_worker is not None:
        raise PlaitError("batch is that of all workers and batch_per_worker that of one; give one of the two")
    for name, number in (("batch", batch), ("batch_per_worker", batch_per_worker), ("epochs", epochs)):
        if number is not None and number < 1:
            raise PlaitError(f"{name} = {number}; give 1 or more")
    if batch is not None and batch < workers:
        raise PlaitError(
            f"a batch of {batch} for {workers} workers: each needs one example at least; take a larger batch or fewer "
            "workers"
        )
    return batch_per_worker * workers if batch_per_worker is not None else batch


def _batch_of(request: BatchRequest, source: ExamplePositions) -> int:
    batch = request.batch or source.batch
    if batch is None:
        raise PlaitError("data by position need a batch: run.batches(data, batch=256), over all workers")
    return batch


def rest_of(request: BatchRequest, source: ExamplePositions | Stream) -> RestOfPass:
    """The treatment of the rest of a pass that does not fill a batch."""
    return source.rest if request.last == "auto" else request.last


def _batches_of_pass(source: ExamplePositions, request: BatchRequest, workers: int) -> int:
    if source.draw is not None and request.order != "auto":
        raise PlaitError(
            "the DataLoader's sampler gives the order; leave order out, or give its dataset to run.batches"
        )
    if source.draws == "batches":
        if request.batch is not None:
            raise PlaitError("the DataLoader's batch_sampler makes the batches; leave batch out")
        return source.size
    batch = _batch_of(request, source)
    full, rest = divmod(source.size, batch)
    found = full + (rest > 0 and rest_of(request, source) == "keep")
    if not found or source.size < workers:
        raise PlaitError(_too_few("the data set", source.size, batch, workers))
    return found


def _too_few(what: str, examples: int | None, batch: int | None, workers: int) -> str:
    has = "fewer examples" if examples is None else f"{examples} example{'s' * (examples != 1)}"
    if examples is not None and examples < workers:
        return f"{what} has {has} for {workers} workers; start fewer workers, or give more data"
    than = "than a batch" if examples is None else f"and no batch of {batch}"
    return f'{what} has {has} {than}; take a smaller batch, or last="keep"'
