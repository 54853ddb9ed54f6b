"""How a job is split: the degree of each mesh axis, and which rank sits where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The mesh axes from the outermost to the innermost: neighbours along `tensor` have adjacent ranks."""

ABBREVIATIONS = {"pipeline": "PP", "replicate": "DP", "shard": "FSDP", "context": "CP", "tensor": "TP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes; their product is the number of ranks."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return prod(self.degrees.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a global rank sits on each axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degrees[axis])
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The global rank at the given coordinates: the inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degrees[axis] + coordinates[axis]
        return rank

    def __str__(self) -> str:
        named = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        return " × ".join(named) if named else "one device"


assert tuple(field.name for field in fields(Layout)) == AXES
