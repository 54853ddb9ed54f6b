"""What a person has settled of a layout before the planner looks for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The part of a layout that a person has named; whatever is not named here is for the search to choose."""

    degrees: Layout | None = None
    """The degrees of all axes, of which only the degrees count; None where the search is free to choose them."""
    knobs: Mapping[str, int | str] = field(default_factory=dict)
    """Named values of other columns of `Candidates`: virtual, schedule, recompute, shard_what, micro_sequences,
    expert."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage of the named pipeline, as validity.check_layout accepts them; they settle how many stages a
    rank holds, too."""
    shares: tuple[int, ...] = ()
    """Sequences per step of each data-parallel rank, as validity.check_shares accepts them."""
    micro_sequences_exactly: int = 0
    """Sequences of a micro-batch even if that is more than an equal share of the batch; 0 leaves it open."""

    def __bool__(self) -> bool:
        named = self.degrees or self.knobs or self.stage_layers or self.shares or self.micro_sequences_exactly
        return bool(named)

    @property
    def has_micro_sequences(self) -> bool:
        """Whether the size of a micro-batch is settled."""
        return bool(self.micro_sequences_exactly or self.knobs.get("micro_sequences"))

    @property
    def virtual_stages(self) -> int | None:
        """Stages on each rank of the pipeline, where that is settled."""
        if self.stage_layers:
            return len(self.stage_layers) // (self.degrees.pipeline if self.degrees else 1)
        named = self.knobs.get("virtual")
        return None if named is None else int(named)
