"""Assigns each matrix that is in pieces, or copies, on several ranks to a rank that computes with the whole of it.

Pure: every rank knows all ranks' pieces, and finds the same owners without communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.partition.boxes import Box

CopiesCompute = Literal["one for all", "each for itself"]
"""For copies of a matrix on several ranks: one rank computes and sends its result to all, or each set of ranks with a
complete copy computes for itself."""

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Newton-Schulz by which Muon orthogonalizes a matrix (Jordan et al. 2024)."""


BATCH_NUMBERS = 2**24
"""Most numbers of matrices in one computation, unless one matrix has more: intermediate results are as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a matrix on one rank."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPiece:
    """A piece, the rank that holds it, and its number among that rank's pieces."""

    rank: int
    number: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTask:
    """One matrix to compute with: `sources` together are the whole of it, and each of `receivers` gets its result."""

    name: str
    shape: tuple[int, ...]
    owner: int
    sources: tuple[PlacedPiece, ...]
    receivers: tuple[PlacedPiece, ...]


def orthogonalization_flops(rows: int, columns: int) -> float:
    """FLOPs of orthogonalizing a matrix: three products a step, of the smaller side by the larger one and by itself."""
    small, large = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4.0 * small * small * large + 2.0 * small**3)


def assign_owners(pieces_of_ranks: Sequence[Sequence[Piece]], copies: CopiesCompute) -> list[MatrixTask]:
    """An owner for each matrix, or for each copy of it, among the ranks that have a piece; costs are balanced between
    owners.

    The most expensive matrix goes first, each to the rank that has most of it and less than the mean work, else to the
    one with the least work. A piece that several ranks have comes from the owner itself, or from the rank nearest to
    it.
    """
    found: dict[str, list[PlacedPiece]] = {}
    for rank, pieces in enumerate(pieces_of_ranks):
        for number, piece in enumerate(pieces):
            found.setdefault(piece.name, []).append(PlacedPiece(rank=rank, number=number, box=piece.box))
    sets = [(name, some) for name, placed in found.items() for some in _sets_of(placed, copies)]
    sets.sort(key=lambda one: (-orthogonalization_flops(*one[1][0].box.shape), one[0], one[1][0].rank))
    flops = [0.0] * len(pieces_of_ranks)
    mean = sum(orthogonalization_flops(*some[0].box.shape) for _, some in sets) / len(flops)
    tasks = []
    for name, placed in sets:
        shape = placed[0].box.shape
        cost = orthogonalization_flops(*shape)
        held = Counter[int]()
        for piece in placed:
            held[piece.rank] += piece.box.numbers
        owner = min(held, key=lambda rank: (flops[rank] + cost > mean, -held[rank], flops[rank], rank))
        if flops[owner] + cost > mean:
            owner = min(held, key=lambda rank: (flops[rank], -held[rank], rank))
        flops[owner] += cost
        sources = _nearest(placed, owner)
        assert sum(one.box.numbers for one in sources) == shape[0] * shape[1], f"{name} lies in pieces that do not fit"
        tasks.append(MatrixTask(name=name, shape=shape, owner=owner, sources=sources, receivers=tuple(placed)))
    return tasks


def _sets_of(placed: Sequence[PlacedPiece], copies: CopiesCompute) -> list[list[PlacedPiece]]:
    """The pieces of a matrix by group of ranks that compute together: all, or those of one copy, with the pieces that
    some ranks have twice."""
    if copies == "one for all":
        return [list(placed)]
    holders = _by_box(placed)
    sets: list[list[PlacedPiece]] = [[] for _ in range(min(map(len, holders.values())))]
    for some in holders.values():
        for number, piece in enumerate(some):
            sets[number * len(sets) // len(some)].append(piece)
    return sets


def _nearest(placed: Sequence[PlacedPiece], owner: int) -> tuple[PlacedPiece, ...]:
    """One source for each rectangle."""
    return tuple(min(some, key=lambda one: (abs(one.rank - owner), one.rank)) for some in _by_box(placed).values())


def _by_box(placed: Sequence[PlacedPiece]) -> Mapping[tuple[int, ...], list[PlacedPiece]]:
    boxes: dict[tuple[int, ...], list[PlacedPiece]] = {}
    for piece in placed:
        boxes.setdefault((*piece.box.offset, *piece.box.extent), []).append(piece)
    return boxes
