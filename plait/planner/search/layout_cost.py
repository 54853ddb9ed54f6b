"""Prices of many layouts at once: memory, and time by the closed form or, near the best, by simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from plait.cluster.cluster import Cluster
from plait.planner.heterogeneous.assignment import Dealer, Group
from plait.planner.heterogeneous.device_speeds import devices_of
from plait.planner.heterogeneous.unequal_step_time import paced, simulated_uneven_s
from plait.planner.memory.estimate import memory
from plait.planner.problem.candidates import SHARD_WHAT, Candidates, Counts, Reals
from plait.planner.problem.software_profile import Stack
from plait.planner.problem.workload import Workload
from plait.planner.step_time.pipeline_step_time import simulated_s
from plait.planner.step_time.step_time import Timing, timing

NEAR = 0.15
"""Pipelines within this of the best are timed by their actual list of actions."""
PORTION = 4096
"""Candidates priced at once: as many as stay in a processor's cache."""


def step_seconds(
    workload: Workload,
    cluster: Cluster,
    candidates: Candidates,
    stack: Stack,
    dealer: Dealer | None = None,
    numbers: Counts | None = None,
) -> Reals:
    """Seconds of a step: by the closed form, and near the best by simulation; `numbers` as a group has them."""
    dealer = dealer or Dealer(workload=workload, devices=devices_of(workload, cluster, stack), stack=stack)
    groups = dealer.groups(candidates)
    if numbers is not None:
        groups = [some for group in groups for some in _apart(replace(group, numbers=numbers[group.places]))]
    step_s = np.empty(len(candidates))
    for group in groups:
        step_s[group.places] = closed_form(workload, cluster, stack, group).step_s
    closed = candidates.pipeline > 1
    # Simulated times are longer, so that others come near the best.
    while (again := closed & (step_s <= step_s.min() * (1 + NEAR))).any():
        for group in groups:
            if again[group.places].any():
                few = group.select(again[group.places])
                step_s[few.places] = _simulated(workload, cluster, stack, few)
        closed &= ~again
    return step_s


def closed_form(workload: Workload, cluster: Cluster, stack: Stack, group: Group) -> Timing:
    """The items of time of a group's layouts on its devices, pipelines by the closed form."""
    times = price(workload, cluster, group.candidates, stack)
    if group.deal is None or (group.deal.even and not _often(group).any()):
        return times
    return paced(workload, cluster, group.candidates, stack, group.deal, times, group.numbers).times


def _apart(group: Group) -> list[Group]:
    """By how layouts of one deal are priced: device by device, or all alike."""
    often = _often(group)
    return [group] if often.all() or not often.any() else [group.select(often), group.select(~often)]


def _often(group: Group) -> NDArray[np.bool_]:
    """Where small devices make parts that split parameters meet more often than even micro-batches would."""
    c = group.candidates
    if group.numbers is None or group.deal is None:
        return np.zeros(len(c), dtype=bool)
    usual = -(-max(group.deal.shares) // c.micro_sequences)
    return (group.numbers > usual) & (c.shard_what == SHARD_WHAT.index("parameters"))


def _simulated(workload: Workload, cluster: Cluster, stack: Stack, group: Group) -> Reals:
    if group.deal is not None and (not group.deal.even or _often(group).any()):
        times = price(workload, cluster, group.candidates, stack)
        return simulated_uneven_s(workload, cluster, group.candidates, stack, group.deal, times, group.numbers)
    step_s = np.empty(len(group.candidates))
    for rows, whole in portions(workload, group.candidates):
        few = group.candidates.select(rows)
        step_s[rows] = simulated_s(whole, cluster, few, stack, timing(whole, cluster, few, stack))
    return step_s


def price(workload: Workload, cluster: Cluster, candidates: Candidates, stack: Stack) -> Timing:
    """The items of time of layouts that split the batch into equal numbers of micro-batches."""
    items = {field.name: np.empty(len(candidates)) for field in fields(Timing)}
    for rows, whole in portions(workload, candidates):
        times = timing(whole, cluster, candidates.select(rows), stack)
        for name, values in items.items():
            values[rows] = getattr(times, name)
    return Timing(**items)


def memory_of(workload: Workload, candidates: Candidates, stack: Stack) -> Reals:
    """Bytes per device that each candidate needs."""
    reserved = np.empty(len(candidates))
    for rows, whole in portions(workload, candidates):
        reserved[rows] = memory(whole, candidates.select(rows), stack).reserved
    return reserved


def portions(
    workload: Workload, candidates: Candidates, among: Counts | None = None
) -> Iterator[tuple[Counts, Workload]]:
    """Places of candidates a few thousand at a time, with the batch that their fullest group of devices would make.

    A batch that does not divide leaves some groups with a sequence less, and they wait for the others.
    """
    rows = np.arange(len(candidates)) if among is None else among
    each = candidates.batch_parts[rows] * candidates.micro_sequences[rows]
    filled = -(-workload.batch_sequences // each) * each
    for batch in np.unique(filled):
        same, whole = rows[filled == batch], replace(workload, batch_sequences=int(batch))
        for first in range(0, len(same), PORTION):
            yield same[first : first + PORTION], whole
