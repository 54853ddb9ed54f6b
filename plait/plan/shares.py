"""Unequal shares of a batch for unequal devices: who takes how many sequences, and what a step takes then."""

from __future__ import annotations

from collections.abc import Sequence

from plait.plan.compute import chip
from plait.plan.kinds import Row
from plait.plan.search import Search


def shares(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """How `count` sequences are best dealt to groups of these speeds: the last one is done as early as can be."""
    given = [int(count * speed / sum(speeds)) for speed in speeds]
    for _ in range(count - sum(given)):
        next_one = min(range(len(speeds)), key=lambda group: (given[group] + 1) / speeds[group])
        given[next_one] += 1
    return tuple(given)


def shared_s(found: Search, index: int) -> float | None:
    """Seconds of a step if each island takes sequences in proportion to its speed; None where that cannot be.

    It can where every copy of the model lies within one island.
    """
    row, islands = found.candidates.row(index), found.cluster.islands
    copy = _devices_of_copy(row)
    if len(islands) < 2 or any(island.devices % copy for island in islands):
        return None
    precision = found.workload.precision
    speeds = [chip(island.device, precision, found.stack, island.speed).linear_flops for island in islands]
    groups = [(island.devices // copy, speed) for island, speed in zip(islands, speeds, strict=True)]
    each = [speed for count, speed in groups for _ in range(count)]
    given = shares(found.workload.batch_sequences, each)
    items = found.timing(index)
    own = items.products + items.scores + items.stream + items.head + items.recompute + items.host
    equal = found.workload.batch_sequences / len(each)
    slowest = max(part / equal * min(speeds) / speed for part, speed in zip(given, each, strict=True))
    return float(items.step_s[0] - own[0] * (1 - slowest))


def _devices_of_copy(row: Row) -> int:
    cut = int(row["pipeline"]) * int(row["context"]) * int(row["tensor"])
    return cut * (int(row["shard"]) if row["shard_what"] == "parameters" else 1)
