"""Prices of many layouts at once: memory, and time by the closed form or, near the best, by simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from plait.planner.heterogeneous.assignment import CandidateGroup, WorkAssigner
from plait.planner.heterogeneous.device_speeds import device_speeds_of
from plait.planner.heterogeneous.unequal_pipeline import simulated_unequal_s
from plait.planner.heterogeneous.unequal_step_time import bottleneck
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.pipeline_step_time import simulated_step_s
from plait.planner.step_time.step_time import StepTime, estimate_step_time

SIMULATED_WITHIN = 0.15
"""Pipelines within this of the best are timed by their actual list of actions."""
CANDIDATES_AT_ONCE = 4096
"""Candidates priced at once: as many as stay in a processor's cache."""


def step_seconds(
    inputs: CostInputs, assigner: WorkAssigner | None = None, n_microbatches: Counts | None = None
) -> Reals:
    """Seconds of a step of every candidate: by the closed form, and near the best by simulation.

    `n_microbatches` are micro-batches per step as CandidateGroup has them.
    """
    candidates, assigner = inputs.candidates, assigner or _assigner_of(inputs)
    groups = assigner.grouped(candidates)
    if n_microbatches is not None:
        numbered = [replace(group, n_microbatches=n_microbatches[group.indices]) for group in groups]
        groups = [some for group in numbered for some in _split_by_pricing(group)]
    step_s = np.empty(len(candidates))
    for group in groups:
        step_s[group.indices] = closed_form_step_time(inputs, group).step_s
    closed = candidates.pipeline > 1
    # Simulated times are longer, so that others come near the best.
    while (again := closed & (step_s <= step_s.min() * (1 + SIMULATED_WITHIN))).any():
        for group in groups:
            if again[group.indices].any():
                few = group.select(again[group.indices])
                step_s[few.indices] = _simulated(inputs, few)
        closed &= ~again
    return step_s


def _assigner_of(inputs: CostInputs) -> WorkAssigner:
    devices = device_speeds_of(inputs.workload, inputs.cluster, inputs.profile)
    return WorkAssigner(workload=inputs.workload, devices=devices, profile=inputs.profile)


def closed_form_step_time(inputs: CostInputs, group: CandidateGroup) -> StepTime:
    """The items of time of a group's layouts (in place of those of `inputs`), pipelines by the closed form."""
    own = inputs.with_candidates(group.candidates)
    times = step_time_of(own)
    if group.assignment is None or (group.assignment.is_even and not _needs_more_micro_batches(group).any()):
        return times
    return bottleneck(own, group.assignment, times, group.n_microbatches).times


def _split_by_pricing(group: CandidateGroup) -> list[CandidateGroup]:
    """Split a group by how its layouts are priced: rank by rank, or all ranks as equal."""
    often = _needs_more_micro_batches(group)
    return [group] if often.all() or not often.any() else [group.select(often), group.select(~often)]


def _needs_more_micro_batches(group: CandidateGroup) -> NDArray[np.bool_]:
    """Mask of candidates with sharded parameters that need more micro-batches because some devices are small."""
    c = group.candidates
    if group.n_microbatches is None or group.assignment is None:
        return np.zeros(len(c), dtype=bool)
    usual = -(-max(group.assignment.sequences_per_replica) // c.micro_sequences)
    return (group.n_microbatches > usual) & c.gathers_weights


def _simulated(inputs: CostInputs, group: CandidateGroup) -> Reals:
    own = inputs.with_candidates(group.candidates)
    if group.assignment is not None and (not group.assignment.is_even or _needs_more_micro_batches(group).any()):
        return simulated_unequal_s(own, group.assignment, step_time_of(own), group.n_microbatches)
    step_s = np.empty(len(group.candidates))
    for rows, few in filled_batches(own):
        step_s[rows] = simulated_step_s(few, estimate_step_time(few))
    return step_s


def step_time_of(inputs: CostInputs) -> StepTime:
    """The items of time of layouts that split the batch into equal numbers of micro-batches."""
    items = {field.name: np.empty(len(inputs.candidates)) for field in fields(StepTime)}
    for rows, few in filled_batches(inputs):
        times = estimate_step_time(few)
        for name, values in items.items():
            values[rows] = getattr(times, name)
    return StepTime(**items)


def bytes_of(workload: Workload, candidates: Candidates, profile: SoftwareProfile) -> Reals:
    """Bytes per device that each candidate needs."""
    reserved = np.empty(len(candidates))
    for rows, whole in batches_of_candidates(workload, candidates):
        reserved[rows] = estimate_memory(whole, candidates.select(rows), profile).reserved
    return reserved


def filled_batches(inputs: CostInputs, among: Counts | None = None) -> Iterator[tuple[Counts, CostInputs]]:
    """Indices of candidates a few thousand at a time, and the cost inputs of these, with the batch that
    `batches_of_candidates` gives them."""
    for rows, whole in batches_of_candidates(inputs.workload, inputs.candidates, among):
        yield rows, replace(inputs, workload=whole, candidates=inputs.candidates.select(rows))


def batches_of_candidates(
    workload: Workload, candidates: Candidates, among: Counts | None = None
) -> Iterator[tuple[Counts, Workload]]:
    """Indices of candidates a few thousand at a time, and the workload with the batch of their fullest replica for all.

    Where a batch does not divide, some replicas have a sequence less, and wait for the others.
    """
    rows = np.arange(len(candidates)) if among is None else among
    each = candidates.data_parallel_degree[rows] * candidates.micro_sequences[rows]
    filled = -(-workload.batch_sequences // each) * each
    for batch in np.unique(filled):
        same, whole = rows[filled == batch], replace(workload, batch_sequences=int(batch))
        for first in range(0, len(same), CANDIDATES_AT_ONCE):
            yield same[first : first + CANDIDATES_AT_ONCE], whole
