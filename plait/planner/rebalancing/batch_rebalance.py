"""When to change the shares of the batch while a run goes on: from measured steps to new shares, or to none.

A data-parallel rank (`Layout.data_parallel_rank`) computes for a time that grows with its sequences (where ranks gather
parameters from each other: with those that it computes, `ShardGroups`), so its speed is sequences per second, and the
rank that is done last makes the step. Shares change only for what lasts: the steps looked at are two windows, one after
the other, and the same new shares must shorten the steps of both by LEAST_GAIN_OF_UNEQUAL_SHARES. Over both together
that gain must be CONFIDENCE times its own standard error, or a little more among many ranks. Medians leave single odd
steps out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median

from plait.layout import Layout
from plait.planner.heterogeneous.batch_shares import LEAST_GAIN_OF_UNEQUAL_SHARES, ShardGroups
from plait.planner.plan import Plan

CONFIDENCE = 3.0
LEAST_STEPS_OBSERVED = 20
"""Smallest number of steps for a decision."""

_NORMAL_FROM_DEVIATION = 1.4826
_NORMAL_MEDIAN = 1.2533
"""Standard deviation of a normal distribution over its median absolute deviation; standard error of a median over that
of a mean."""
_EQUAL_SPEED_RATIO = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """Times of one step; `compute_s` has one entry per data-parallel rank (its slowest device) or pipeline stage."""

    compute_s: tuple[float, ...]
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """New shares of the batch, with what speaks for them."""

    shares: tuple[int, ...]
    speeds: tuple[float, ...]
    """Sequences per second of each data-parallel rank."""
    gain: float
    """Share of a step's time that the change is expected to save."""
    reason: str


def rebalance(
    old: Sequence[int], steps: Sequence[StepObservation], names: Sequence[str], shard_groups: ShardGroups | None = None
) -> ShareChange | None:
    """The shares to continue with after steps that were all taken with the `old` ones; None where they should stay.

    `names` are those of the data-parallel ranks, for the reason; `shard_groups` the ranks that communicate before the
    step's end, None if there are none.
    """
    if len(old) < 2 or len(steps) < LEAST_STEPS_OBSERVED:
        return None
    shard_groups = shard_groups or ShardGroups(size=1, limits=(1,) * len(old))
    before = shard_groups.computed(old)
    speeds = _speeds(before, steps)
    new = shard_groups.best_shares(sum(old), speeds)
    after = shard_groups.computed(new)
    gain, error = _gain(before, after, steps)
    middle = len(steps) // 2
    lasting = min(_gain(before, after, window)[0] for window in (steps[:middle], steps[middle:]))
    if min(gain, lasting) <= LEAST_GAIN_OF_UNEQUAL_SHARES or gain <= is_confident(len(old)) * error:
        return None
    return ShareChange(shares=new, speeds=speeds, gain=gain, reason=change_reason(old, new, speeds, names))


def change_reason(
    old: Sequence[int], new: Sequence[int], speeds: Sequence[float], names: Sequence[str], what: str = "sequences"
) -> str:
    """A sentence on the replica whose share changes most, compared with the one that differs most from it in speed."""
    about = max(range(len(old)), key=lambda part: abs(log(new[part] / old[part])))
    others = [part for part in range(len(old)) if part != about]
    fastest, slowest = max(others, key=lambda part: speeds[part]), min(others, key=lambda part: speeds[part])
    if new[about] < old[about] and speeds[fastest] / speeds[about] >= _EQUAL_SPEED_RATIO:
        compared = f"{speeds[fastest] / speeds[about]:.1f} times slower than {names[fastest]}"
    elif new[about] > old[about] and speeds[about] / speeds[slowest] >= _EQUAL_SPEED_RATIO:
        compared = f"{speeds[about] / speeds[slowest]:.1f} times faster than {names[slowest]}"
    elif speeds[fastest] / speeds[about] >= _EQUAL_SPEED_RATIO:
        compared = f"now at {speeds[about] / speeds[fastest]:.0%} of the speed of {names[fastest]}"
    else:
        compared = f"now as fast as {names[fastest]}"
    verb, whose = ("are", "their") if names[about].startswith("ranks ") else ("is", "its")
    goes = f"{whose} share goes from {old[about]} to {new[about]} of {sum(old)} {what}"
    return f"{names[about]} {verb} {compared}: {goes}"


def replica_names(plan: Plan) -> tuple[str, ...]:
    """Name of each data-parallel replica for people: its host, if the host runs only this replica, else its ranks."""
    return host_names_of_ranks(plan, ranks_of_replicas(plan.placement.layout))


def host_names_of_ranks(plan: Plan, ranks: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Name of each group of ranks for people: its host, if the host runs only this group, else its ranks."""
    hosts = [host.name for host in plan.machines.hosts for _ in range(host.workers)]
    homes = [{hosts[rank] for rank in some} if hosts else set[str]() for some in ranks]
    return tuple(
        f"host {next(iter(home))}" if len(home) == 1 and homes.count(home) == 1 else _ranks_in_words(some, home)
        for some, home in zip(ranks, homes, strict=True)
    )


def ranks_of_replicas(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """For each data-parallel replica the ranks that work on it."""
    found: list[list[int]] = [[] for _ in range(layout.data_parallel_degree)]
    for rank in range(layout.world_size):
        found[layout.data_parallel_rank(rank)].append(rank)
    return tuple(tuple(ranks) for ranks in found)


def shard_groups_of(plan: Plan) -> ShardGroups:
    """The data-parallel ranks that communicate in every micro-batch, and their micro-batch limits."""
    parts = plan.placement.layout.data_parallel_degree
    return ShardGroups(
        size=len(plan.placement.layout.replicas_in_lockstep(0)),
        limits=plan.placement.micro_limits or (plan.placement.micro_sequences,) * parts,
    )


def why_rebalancing_cannot_help(plan: Plan) -> str | None:
    """Why no shares can balance a plan that asks for it, in one sentence; None where they can."""
    if plan.cadence.balance_every_steps == 0 or plan.placement.layout.data_parallel_degree > 1 or plan.world_size == 1:
        return None
    if plan.placement.layout.pipeline > 1 and plan.placement.layout.virtual_stages == 1:
        return None  # layers move from stage to stage (stage_repartition.py)
    text = f"all ranks work on the same sequences ({plan.placement.layout}), so shares cannot make up for a slow one"
    if plan.placement.layout.pipeline > 1:
        return (
            f"{text}: stages would have to be cut again, which plait train --replan does for the machines as they are"
        )
    return f"{text}: a layout with replicate or shard could"


def is_confident(parts: int) -> float:
    """Smallest gain in standard errors; it grows with the number of replicas: one of many is often slow by chance."""
    return sqrt(CONFIDENCE**2 + 2 * log(parts / 2))


def _speeds(old: Sequence[int], steps: Sequence[StepObservation]) -> tuple[float, ...]:
    """Sequences per second of each replica."""
    seconds = [median(column) for column in _columns(steps)]
    return tuple(count / max(s, 1e-9) for count, s in zip(old, seconds, strict=True))


def _gain(old: Sequence[int], new: Sequence[int], steps: Sequence[StepObservation]) -> tuple[float, float]:
    """Share of a step's time that computing `new` in place of `old` sequences would have saved in these steps, and its
    standard error."""
    columns = _columns(steps)
    now = [median(column) for column in columns]
    then = [s * after / before for s, before, after in zip(now, old, new, strict=True)]
    last, last_then = now.index(max(now)), then.index(max(then))
    step_s = median(step.step_s for step in steps)
    other = last_then if last_then != last else max(range(len(old)), key=lambda part: new[part] / old[part])
    # Step by step: what slows all parts down alike takes nothing from the evidence.
    pairs = zip(columns[last], columns[other], strict=True)
    saved_s = [before - after * new[other] / old[other] for before, after in pairs]
    return (now[last] - then[last_then]) / step_s, standard_error(saved_s) / step_s


def _columns(steps: Sequence[StepObservation]) -> list[tuple[float, ...]]:
    """The steps' seconds, part by part."""
    return list(zip(*(step.compute_s for step in steps), strict=True))


def standard_error(values: Sequence[float]) -> float:
    """The standard error of these values' median."""
    middle = median(values)
    spread = _NORMAL_FROM_DEVIATION * median(abs(value - middle) for value in values)
    return _NORMAL_MEDIAN * spread / sqrt(len(values))


def _ranks_in_words(ranks: Sequence[int], home: set[str]) -> str:
    text = (
        f"rank {ranks[0]}"
        if len(ranks) == 1
        else f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
    )
    return f"{text} on {next(iter(home))}" if len(home) == 1 else text
