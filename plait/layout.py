"""How a job is split: the degree of each mesh axis, which rank sits where, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The mesh axes from the outermost to the innermost: neighbours along `tensor` have adjacent ranks."""

ABBREVIATIONS = {"pipeline": "PP", "replicate": "DP", "shard": "FSDP", "context": "CP", "tensor": "TP"}

SHARDED_TEXTS = {
    "optimizer": "optimizer state",
    "master-weights": "master weights and optimizer state",
    "gradients": "gradients and optimizer state",
}
"""What `shard` splits, in words, where it is not the parameters."""
LARGEST_CLUSTER = 1_000_000
"""Devices, at most: more than anybody has joined, and few enough for a search to end."""

ShardWhat = Literal["optimizer", "master-weights", "gradients", "parameters"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes, whose product is the number of ranks, and the options of each parallelism."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Ranks of `replicate`, `shard` and `context` that hold a mixture's experts together, each some of them; no axis of
    its own: groups of this many neighbours, `context` innermost."""
    shard_what: ShardWhat = "optimizer"
    """What `shard` splits: optimizer state (ZeRO-1), or the parameters as well, which are then gathered once a step
    ("gradients", ZeRO-2) or for each pass of each micro-batch ("parameters", FSDP); their gradients are summed for each
    micro-batch. With "master-weights" weights are gathered, and gradients summed, once a step."""
    schedule: Schedule = "1f1b"
    """The order in which a pipeline works through its micro-batches."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, in the model's order; stage s is on pipeline coordinate s % pipeline. Empty: one stage."""
    recompute: Recompute = "none"
    """What is computed again in the backward pass instead of being kept."""

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return prod(self.degrees.values())

    @property
    def data_parallel_degree(self) -> int:
        """How many ranks see different sequences: those along `replicate` and `shard`."""
        return self.replicate * self.shard

    def data_parallel_rank(self, rank: int) -> int:
        """The data-parallel rank of a rank: which share of the batch it works on."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    @property
    def gathers_weights(self) -> bool:
        """Whether each rank of `shard` keeps rows of every weight, and gathers the others' to compute."""
        return self.shard > 1 and self.shard_what != "optimizer"

    @property
    def ranks_with_other_tokens(self) -> int:
        """How many ranks see different tokens: those along `replicate`, `shard` and `context`; `expert` groups them."""
        return self.data_parallel_degree * self.context

    def place_among_tokens(self, rank: int) -> int:
        """Which of the ranks that see different tokens a rank is."""
        return self.data_parallel_rank(rank) * self.context + self.coordinates(rank)["context"]

    def expert_index(self, rank: int) -> int:
        """Which part of a mixture's experts a rank holds."""
        return self.place_among_tokens(rank) % self.expert

    @property
    def expert_replicas(self) -> int:
        """How many neighbouring data-parallel ranks the smallest set of whole expert groups takes."""
        return self.expert // gcd(self.expert, self.context)

    @property
    def expert_shards(self) -> int:
        """In how many parts `shard` splits a rank's experts, which fewer of its ranks hold: those of the axis that are
        as many as `expert_replicas` apart."""
        return max(1, self.shard // self.expert_replicas)

    def replicas_in_lockstep(self, part: int) -> range:
        """The data-parallel ranks that communicate with this one in each micro-batch: those that share its sharded
        parameters, or hold the other experts.

        All others communicate once a step, where gradients are summed, after however many micro-batches each has.
        """
        gathered = 1 if self.shard_what == "optimizer" else self.shard
        together = max(gathered, self.expert_replicas)  # of which one divides the other: INCOMPATIBLE
        first = part - part % together
        return range(first, first + together)

    @property
    def virtual_stages(self) -> int:
        """Stages on each pipeline rank."""
        return max(1, len(self.stage_layers) // self.pipeline)

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
        named += [f"expert {self.expert}"] if self.expert > 1 else []
        return " × ".join(named) if named else "one device"


def shard_abbreviation(shard_what: str) -> str:
    """The field's name for what `shard` does: FSDP splits parameters, ZeRO-1 the optimizer state alone."""
    return {"optimizer": "ZeRO-1", "master-weights": "ZeRO-1", "gradients": "ZeRO-2"}.get(shard_what, "FSDP")


def layout_summary(layout: Layout) -> str:
    """A layout as people read it, with the field's abbreviations and whatever is not as usual."""
    names = {**ABBREVIATIONS, "shard": shard_abbreviation(layout.shard_what)}
    named = [f"{axis} ({names[axis]}) {degree}" for axis, degree in layout.degrees.items() if degree > 1]
    parts = [" × ".join(named) if named else "one copy"]
    if layout.expert > 1:
        parts.append(f"experts (EP) in {layout.expert} parts")
    if layout.shard > 1:
        parts.append(f"splitting {SHARDED_TEXTS.get(layout.shard_what, layout.shard_what)}")
    if layout.pipeline > 1:
        parts.append(
            f"schedule {layout.schedule} with layers {' + '.join(str(count) for count in layout.stage_layers)}"
        )
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    return ", ".join(parts)


def equal_share(count: int, parts: int, index: int) -> tuple[int, int]:
    """Range (first, count) of the share with this index, of `count` things in `parts` shares of about equal size."""
    each, more = divmod(count, parts)
    return index * each + min(index, more), each + (1 if index < more else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A combination of options that no layout may have, and what to do instead."""

    applies: Callable[[Layout], bool]
    reason: str
    """A sentence, with fields of the layout in braces."""


INCOMPATIBLE: tuple[Conflict, ...] = (
    Conflict(
        applies=lambda layout: layout.schedule == "zero-bubble" and layout.gathers_weights,
        reason="a zero-bubble pipeline puts weight gradients off until the sharded parameters' own hooks have already "
        'run; choose layout.shard_what = "optimizer" or layout.schedule = "1f1b"',
    ),
    Conflict(
        applies=lambda layout: layout.pipeline > 1 and layout.shard > 1 and layout.shard_what == "gradients",
        reason="a pipeline gathers weights once a step whatever is split; choose "
        'layout.shard_what = "parameters", which does the same there',
    ),
    Conflict(
        applies=lambda layout: layout.ranks_with_other_tokens % layout.expert > 0,
        reason="layout.expert = {layout.expert} does not divide the {layout.ranks_with_other_tokens} workers of "
        "layout.replicate × layout.shard × layout.context, which see different tokens; choose one of {divisors}",
    ),
    Conflict(
        applies=lambda layout: (
            layout.shard > 1
            and (layout.shard * layout.context) % layout.expert > 0
            and layout.expert % (layout.shard * layout.context) > 0
        ),
        reason="with layout.expert = {layout.expert} the {layout.shard} workers of layout.shard would hold unlike "
        "numbers of the same experts, and could not split them; choose a divisor or a multiple of layout.shard × "
        "layout.context",
    ),
)
"""All combinations that no layout may have; enumeration and checks of layouts both read this list."""


def is_possible(layout: Layout) -> bool:
    """Whether this combination of options can run."""
    return not any(row.applies(layout) for row in INCOMPATIBLE)


def conflict_sentence(layout: Layout) -> str | None:
    """Why this combination of options cannot run and what to change, as a sentence; None for a valid layout."""
    reason = next((row.reason for row in INCOMPATIBLE if row.applies(layout)), None)
    if reason is None:
        return None
    number = layout.ranks_with_other_tokens
    divisors = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0) if "{divisors}" in reason else ""
    return reason.format(layout=layout, divisors=divisors)
