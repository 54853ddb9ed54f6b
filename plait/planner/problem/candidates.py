"""Layouts to be priced, many at once: a table with one column per knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.layout import AXES, Layout, Recompute, Schedule

Counts = NDArray[np.int64]
Reals = NDArray[np.float64]

ShardedState = Literal["nothing", "optimizer", "gradients", "parameters", "master-weights"]
"""The states that ranks along `shard` split: ZeRO's stages 0 to 3, and what plait has beside them."""

LayerSplit = Literal["balanced", "published"] | tuple[int, ...]
"""How layers are divided among pipeline stages: "balanced" as plait runs them, "published" as published programs
divide them, or the layers of each stage as a person names them."""

SHARDED_STATES: tuple[ShardedState, ...] = ("nothing", "optimizer", "gradients", "parameters", "master-weights")
RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
"""The three named knobs; a candidate holds a name's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A table of layouts to be priced: equally long arrays, one entry per layout.

    The degrees multiply to the devices: pipeline × replicate × shard × context × tensor. `expert` divides the experts
    among ranks of these axes but the first and takes no devices of its own. `virtual` is the number of stages on a
    pipeline rank. `sequence_parallel` is 1 where the tensor axis also divides the stream between its products.
    `layer_split` is one for all of them.
    """

    pipeline: Counts
    virtual: Counts
    replicate: Counts
    shard: Counts
    shard_what: Counts
    context: Counts
    tensor: Counts
    sequence_parallel: Counts
    expert: Counts
    micro_sequences: Counts
    recompute: Counts
    schedule: Counts
    layer_split: LayerSplit = "published"

    def __len__(self) -> int:
        return len(self.pipeline)

    @property
    def devices(self) -> Counts:
        """Devices that each layout takes."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data_parallel_degree(self) -> Counts:
        """Groups of ranks that see different sequences."""
        return self.replicate * self.shard

    @property
    def weight_copies(self) -> Counts:
        """Ranks that hold the same weights, or parts of them, and see other tokens."""
        return self.data_parallel_degree * self.context

    @property
    def is_fully_sharded(self) -> NDArray[np.bool_]:
        """Whether each rank holds a part of the parameters."""
        return (self.shard > 1) & (self.shard_what == SHARDED_STATES.index("parameters"))

    @property
    def gathers_weights(self) -> NDArray[np.bool_]:
        """Whether each rank holds rows of the weights and gathers the others', as plait runs the layout; other programs
        that split gradients hold all weights."""
        return (self.shard > 1) & (self.shard_what >= SHARDED_STATES.index("gradients"))

    @property
    def sums_once(self) -> NDArray[np.bool_]:
        """Whether ranks that hold rows of the weights sum their gradients once a step."""
        return (self.shard > 1) & (self.shard_what == SHARDED_STATES.index("master-weights"))

    def select(self, index: Counts | NDArray[np.bool_]) -> Candidates:
        """The candidates at the given places or where the mask holds."""
        return Candidates(
            **{name: getattr(self, name)[index] for name in CANDIDATE_COLUMNS}, layer_split=self.layer_split
        )

    def with_row(self, others: Candidates, index: int) -> Candidates:
        """These candidates and, behind them, one of others that divide layers in the same way."""
        assert self.layer_split == others.layer_split
        columns = {name: np.append(getattr(self, name), getattr(others, name)[[index]]) for name in CANDIDATE_COLUMNS}
        return Candidates(**columns, layer_split=self.layer_split)

    def is_equal_to(self, others: Candidates, index: int) -> NDArray[np.bool_]:
        """Mask of these candidates that equal one of others."""
        columns = [getattr(self, name) == getattr(others, name)[index] for name in CANDIDATE_COLUMNS]
        return np.logical_and.reduce(columns)

    def degrees(self, index: int) -> Layout:
        """The degrees of one candidate, all else as by default."""
        return replace(Layout(), **{axis: int(getattr(self, axis)[index]) for axis in AXES})

    def row(self, index: int) -> dict[str, int | str]:
        """One candidate with its named knobs in words."""
        values: dict[str, int | str] = {name: int(getattr(self, name)[index]) for name in CANDIDATE_COLUMNS}
        named = {"shard_what": SHARDED_STATES, "recompute": RECOMPUTE_MODES, "schedule": SCHEDULES}
        return values | {name: names[int(values[name])] for name, names in named.items()}

    @staticmethod
    def from_rows(rows: Sequence[Mapping[str, int | str]], layer_split: LayerSplit = "published") -> Candidates:
        """Candidates from rows of knobs; what a row leaves out is 1, or "nothing", "none", "1f1b"."""
        columns = {name: np.array([_column_value(row, name) for row in rows]) for name in CANDIDATE_COLUMNS}
        return Candidates(**columns, layer_split=layer_split)


CANDIDATE_COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Candidates) if field.name != "layer_split")
"""The knobs in which candidates differ."""


@dataclass(frozen=True, slots=True, eq=False)
class CandidatesKey:
    """Candidates as a cache key: equal where all their numbers are equal."""

    candidates: Candidates

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CandidatesKey) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        return self.candidates.layer_split, *(getattr(self.candidates, name).tobytes() for name in CANDIDATE_COLUMNS)


COLUMN_DEFAULTS: Mapping[str, int | str] = {
    **dict.fromkeys(CANDIDATE_COLUMNS, 1),
    "shard_what": "nothing",
    "recompute": "none",
    "schedule": "1f1b",
    "sequence_parallel": 0,
}
"""Values of the columns that a row leaves out."""


def group_equal_columns(keys: np.ndarray) -> list[Counts]:
    """Indices of the columns, equal columns together."""
    order = np.lexsort(keys[::-1])  # np.unique takes two to six times as long
    ordered = keys[:, order]
    begins = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
    return np.split(order, begins) if len(order) else []


def _column_value(row: Mapping[str, int | str], name: str) -> int:
    value = row.get(name, COLUMN_DEFAULTS[name])
    if isinstance(value, int):
        return value
    names: Mapping[str, tuple[str, ...]] = {
        "shard_what": SHARDED_STATES,
        "recompute": RECOMPUTE_MODES,
        "schedule": SCHEDULES,
    }
    return names[name].index(value)
