"""Complexity points of a layout: a table of what makes it harder to understand, to debug and to tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.planner.problem.candidates import RECOMPUTE_MODES, SCHEDULES, SHARDED_STATES, Candidates, Counts
from plait.planner.step_time.network_model import Network

AppliesTo = NDArray[np.bool_]
LARGE_GROUP = 256
"""Devices beyond which parameters are better split within groups of copies (HSDP): a gathering waits for its slowest
member in every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComplexityRow:
    """One thing that a layout may have, and its points."""

    points: int
    what: str
    holds: Callable[[Candidates, int], AppliesTo]
    """Which candidates have it, given the devices of a node."""


def _schedule(name: str) -> Callable[[Candidates, int], AppliesTo]:
    return lambda c, _: (c.pipeline > 1) & (c.schedule == SCHEDULES.index(name))


def _recompute(name: str) -> Callable[[Candidates, int], AppliesTo]:
    return lambda c, _: c.recompute == RECOMPUTE_MODES.index(name)


COMPLEXITY_TABLE: tuple[ComplexityRow, ...] = (
    ComplexityRow(
        points=1,
        what="optimizer state split over copies (ZeRO-1)",
        holds=lambda c, _: c.shard_what == SHARDED_STATES.index("optimizer"),
    ),
    ComplexityRow(
        points=2,
        what="gradients or master weights split over copies (ZeRO-2, ZeRO-1)",
        holds=lambda c, _: c.gathers_weights & ~c.is_fully_sharded,
    ),
    ComplexityRow(
        points=2,
        what="parameters split over copies (FSDP)",
        holds=lambda c, _: c.shard_what == SHARDED_STATES.index("parameters"),
    ),
    ComplexityRow(
        points=1, what="split over some of the copies only", holds=lambda c, _: (c.shard_what > 0) & (c.replicate > 1)
    ),
    ComplexityRow(
        points=2,
        what=f"parameters gathered from more than {LARGE_GROUP} devices",
        holds=lambda c, _: (c.shard_what == SHARDED_STATES.index("parameters")) & (c.shard > LARGE_GROUP),
    ),
    ComplexityRow(points=1, what="a part of each layer computed again", holds=_recompute("selective")),
    ComplexityRow(points=2, what="whole layers computed again", holds=_recompute("full")),
    ComplexityRow(points=10, what="layers' matrices cut over devices (tensor)", holds=lambda c, _: c.tensor > 1),
    ComplexityRow(points=10, what="sequences cut over devices (context)", holds=lambda c, _: c.context > 1),
    ComplexityRow(points=10, what="experts divided among devices (expert)", holds=lambda c, _: c.expert > 1),
    ComplexityRow(points=12, what="layers divided among devices (pipeline)", holds=lambda c, _: c.pipeline > 1),
    ComplexityRow(points=3, what="several chunks of layers on a device in turn", holds=_schedule("interleaved")),
    ComplexityRow(
        points=4, what="weight gradients computed later to fill the pipeline's gaps", holds=_schedule("zero-bubble")
    ),
    ComplexityRow(
        points=5,
        what="matrices cut over more devices than a node has",
        holds=lambda c, per_node: c.tensor > per_node,
    ),
)
"""Sources of complexity, the simplest first. Each axis that cuts the model has more points than all rows for sharding
and recomputation together."""


def complexity_of(candidates: Candidates, network: Network) -> Counts:
    """Points of each candidate: 0 is one device, or plain copies."""
    points = sum(rung.points * rung.holds(candidates, network.devices_per_node) for rung in COMPLEXITY_TABLE)
    return np.asarray(points, dtype=np.int64)


def complexity_table() -> str:
    """The ladder for people, a line each."""
    return "\n".join(f"{rung.points:3}  {rung.what}" for rung in COMPLEXITY_TABLE) + "\n"
