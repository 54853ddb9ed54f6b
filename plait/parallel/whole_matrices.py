"""Brings the pieces of each matrix to the rank that computes with the whole of it, and the results back.

The distribution of a matrix over ranks does not matter: rows that FSDP2 split, a range of a bucket (ZeRO-1), the
columns of a `tensor` rank, an expert on some ranks, copies of all of it. Each is a piece, and
partition/matrix_owners.py assigns owners. All ranks with a layer exchange once before the arithmetic and once after it.

It refuses to know what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from plait.layout import Layout
from plait.parallel.exchange import gather_json
from plait.parallel.mesh import GroupCommunicator, accelerator_of_group, make_groups
from plait.parallel.sharded_model import OptimizerUnit
from plait.parallel.watched import WATCH
from plait.partition.boxes import Box
from plait.partition.matrix_owners import BATCH_NUMBERS, CopiesCompute, MatrixTask, Piece, PlacedPiece, assign_owners

Compute = Callable[[Tensor], Tensor]
"""Maps matrices [batch, rows, columns], with no more rows than columns, to results of the same shape."""

MATRIX_TAG = 2**21
"""Tag of pieces on their way to owners; the next one is that of results. Above the tags of gradient sums
(reduction.py)."""


class MatrixExchange:
    """Computes with whole matrices of which this rank has pieces; alone in a process it has them whole.

    `pieces` are the 2-dim parts of the given units, in order. Every rank of the `group`, which contains all that may
    have pieces of the same matrices, must make one, and call `results` in each step; or `wholes`, if something else
    computes with the matrices, and then `parts`. `owned` are the tasks of this rank.
    """

    def __init__(
        self,
        units: Sequence[OptimizerUnit],
        group: dist.ProcessGroup | None = None,
        copies: CopiesCompute = "one for all",
    ) -> None:
        own = [Piece(name=part.name, box=part.box) for unit in units for part in unit.parts]
        self._group, self._rank = group, dist.get_rank(group) if group else 0
        everybodys = _gathered(own, group) if group else [own]
        self.tasks = assign_owners(everybodys, copies)
        self.owned = [task for task in self.tasks if task.owner == self._rank]
        self._to_owners = _Traffic.of_pieces(self.tasks, self._rank, len(everybodys))
        self._results = _Traffic.of_results(self.tasks, self._rank, len(everybodys))

    def results(self, pieces: Sequence[Tensor], compute: Compute, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The number of each of this rank's pieces, and the same rectangle of its matrix's result. Pieces and results
        are sent in this dtype, which is also that of the computation. Every rank of the group must exhaust it;
        blocks."""
        device = pieces[0].device if pieces else _device_of(self._group)
        arrived = self._arrived(pieces, dtype, device)
        leaving, places = _room(self._results.sent, dtype, device)
        for batch in _batches(self.owned):
            yield from self._computed(batch, compute(self._stacked(batch, pieces, arrived, dtype, device)), places)
        del arrived
        yield from self._from_owners(leaving)

    def wholes(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The whole matrix of each task that this rank owns. Every rank of the group must call it; blocks."""
        device = pieces[0].device if pieces else _device_of(self._group)
        arrived, found = self._arrived(pieces, dtype, device), list[Tensor]()
        for task in self.owned:
            found.append(torch.empty(task.shape, dtype=dtype, device=device))
            _fill(found[-1], task, self._rank, pieces, arrived)
        return found

    def parts(self, wholes: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The number of each of this rank's pieces and the same rectangle of its matrix, as computed by the owners;
        this rank passes in those that it owns. Every rank of the group must exhaust it; blocks."""
        device = wholes[0].device if wholes else _device_of(self._group)
        leaving, places = _room(self._results.sent, dtype, device)
        for task, whole in zip(self.owned, wholes, strict=True):
            yield from self._own_parts(task, whole, places)
        yield from self._from_owners(leaving)

    def _from_owners(self, leaving: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Send the parts that others need, and receive this rank's, each with the number of its piece."""
        for (_, number), part in self._exchanged(self._results, leaving, MATRIX_TAG + 1).items():
            yield number, part

    def _arrived(self, pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> _Pieces:
        """The pieces of others that this rank's matrices lack."""
        leaving, places = _room(self._to_owners.sent, dtype, device)
        for (_, number), place in places.items():
            place.copy_(pieces[number])
        return self._exchanged(self._to_owners, leaving, MATRIX_TAG)

    def _computed(self, batch: Sequence[MatrixTask], whole: Tensor, places: _Pieces) -> Iterator[tuple[int, Tensor]]:
        """This rank's own parts of a batch of results; those for others are copied to their places."""
        for task, result in zip(batch, whole, strict=True):
            yield from self._own_parts(task, result.T if _is_tall(task.shape) else result, places)

    def _own_parts(self, task: MatrixTask, whole: Tensor, places: _Pieces) -> Iterator[tuple[int, Tensor]]:
        for piece in task.receivers:
            part = _rectangle(whole, piece.box)
            if piece.rank == self._rank:
                yield piece.number, part
            else:
                places[piece.rank, piece.number].copy_(part)

    def _stacked(
        self,
        batch: Sequence[MatrixTask],
        pieces: Sequence[Tensor],
        arrived: _Pieces,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """The whole matrices of some tasks, the smaller side first."""
        small, large = sorted(batch[0].shape)
        stack = torch.empty(len(batch), small, large, dtype=dtype, device=device)
        for matrix, task in zip(stack, batch, strict=True):
            _fill(matrix.T if _is_tall(task.shape) else matrix, task, self._rank, pieces, arrived)
        return stack

    def _exchanged(self, traffic: _Traffic, leaving: Tensor, tag: int) -> _Pieces:
        """Send the pieces that others need, and return those that arrived, by rank and piece number."""
        if self._group is None or not traffic.is_any:
            return {}
        arriving, places = _room(traffic.received, leaving.dtype, leaving.device)
        _all_to_all(arriving, leaving, traffic, self._group, tag)
        return places


_Pieces = dict[tuple[int, int], Tensor]
"""Rectangles by the rank and number of their piece."""


def stage_exchange(
    units: Sequence[OptimizerUnit], layout: Layout, copies: CopiesCompute = "one for all"
) -> MatrixExchange:
    """The exchange between the ranks of this one's place in the pipeline, which hold the same layers. Every rank of the
    job must call it."""
    stage = layout.world_size // layout.pipeline
    sets = [tuple(range(first, first + stage)) for first in range(0, layout.world_size, stage)]
    groups = make_groups(sets)
    return MatrixExchange(units, next(iter(groups.values()), None), copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """The pieces that this rank sends to each rank of the group and receives from it, in the order of tasks; of results
    a piece is whose result it is."""

    sent: tuple[tuple[PlacedPiece, ...], ...]
    received: tuple[tuple[PlacedPiece, ...], ...]
    is_any: bool
    """Whether anything is sent between any two ranks, which all must know."""

    @classmethod
    def of_pieces(cls, tasks: Sequence[MatrixTask], rank: int, ranks: int) -> _Traffic:
        moves = [(one.rank, task.owner, one) for task in tasks for one in task.sources]
        return cls._of(moves, rank, ranks)

    @classmethod
    def of_results(cls, tasks: Sequence[MatrixTask], rank: int, ranks: int) -> _Traffic:
        moves = [(task.owner, one.rank, one) for task in tasks for one in task.receivers]
        return cls._of(moves, rank, ranks)

    @classmethod
    def _of(cls, moves: Sequence[tuple[int, int, PlacedPiece]], rank: int, ranks: int) -> _Traffic:
        sent: list[list[PlacedPiece]] = [[] for _ in range(ranks)]
        received: list[list[PlacedPiece]] = [[] for _ in range(ranks)]
        for source, target, piece in moves:
            if source == rank != target:
                sent[target].append(piece)
            if target == rank != source:
                received[source].append(piece)
        return cls(
            sent=tuple(map(tuple, sent)),
            received=tuple(map(tuple, received)),
            is_any=any(source != target for source, target, _ in moves),
        )

    @property
    def sent_numbers(self) -> list[int]:
        return [sum(one.box.numbers for one in some) for some in self.sent]

    @property
    def received_numbers(self) -> list[int]:
        return [sum(one.box.numbers for one in some) for some in self.received]


def _room(pieces: Sequence[Sequence[PlacedPiece]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, _Pieces]:
    """Memory for consecutive pieces, and the place of each in it."""
    every = [one for some in pieces for one in some]
    room = torch.empty(sum(one.box.numbers for one in every), dtype=dtype, device=device)
    parts = room.split([one.box.numbers for one in every])
    places = zip(every, parts, strict=True) if every else ()
    return room, {(one.rank, one.number): part.view(one.box.extent) for one, part in places}


def _all_to_all(received: Tensor, sent: Tensor, traffic: _Traffic, group: dist.ProcessGroup, tag: int) -> None:
    """Sends each rank's numbers to each other rank. Point-to-point on CPUs: see Note [room first] in collectives.py. As
    bytes, since gloo does not support every dtype."""
    size = sent.element_size()
    to, source = ([count * size for count in some] for some in (traffic.sent_numbers, traffic.received_numbers))
    leaving, arriving = sent.view(torch.uint8), received.view(torch.uint8)
    if sent.device.type != "cpu":
        with WATCH.exchange("whole matrices", sent):
            dist.all_to_all_single(arriving, leaving, source, to, group=group)
        return
    rooms, parcels = enumerate(arriving.split(source)), enumerate(leaving.split(to))
    with WATCH.exchange("whole matrices", sent):
        works = [dist.irecv(room, group=group, group_src=rank, tag=tag) for rank, room in rooms if len(room)]
        works += [dist.isend(parcel, group=group, group_dst=rank, tag=tag) for rank, parcel in parcels if len(parcel)]
        for work in works:
            assert work is not None
            work.wait()


def _gathered(own: Sequence[Piece], group: dist.ProcessGroup) -> list[list[Piece]]:
    """Every rank's pieces, in rank order."""
    rows = [[one.name, one.box.shape, one.box.offset, one.box.extent] for one in own]
    return [
        [
            Piece(name=name, box=Box(shape=tuple(shape), offset=tuple(offset), extent=tuple(extent)))
            for name, shape, offset, extent in some
        ]
        for some in gather_json(rows, GroupCommunicator(group))
    ]


def _batches(tasks: Sequence[MatrixTask]) -> Iterator[list[MatrixTask]]:
    """Tasks whose matrices have the same sides, as many together as BATCH_NUMBERS hold."""
    alike: dict[tuple[int, ...], list[MatrixTask]] = {}
    for task in tasks:
        alike.setdefault(tuple(sorted(task.shape)), []).append(task)
    for (small, large), some in alike.items():
        many = max(1, BATCH_NUMBERS // (small * large))
        yield from (some[first : first + many] for first in range(0, len(some), many))


def _fill(matrix: Tensor, task: MatrixTask, rank: int, pieces: Sequence[Tensor], arrived: _Pieces) -> None:
    """Assemble a matrix from this rank's pieces and those that arrived."""
    for one in task.sources:
        piece = pieces[one.number] if one.rank == rank else arrived[one.rank, one.number]
        _rectangle(matrix, one.box).copy_(piece)


def _is_tall(shape: tuple[int, ...]) -> bool:
    return shape[0] > shape[1]


def _rectangle(matrix: Tensor, box: Box) -> Tensor:
    (row, column), (rows, columns) = box.offset, box.extent
    return matrix[row : row + rows, column : column + columns]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the ranks of a group compute, for one that has no piece."""
    return (accelerator_of_group(group) if group is not None else None) or torch.device("cpu")
