"""How many bytes each device needs, item by item, for many layouts at once: the fullest rank of each pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait.planner.calibration.constants import constant
from plait.planner.memory.activations import (
    LAYER_INPUT_BYTES,
    UNFUSED_SCORES,
    block_bytes,
    kept_and_repeated,
    split_activations,
)
from plait.planner.memory.rank_loads import LOADS, grouped_loads
from plait.planner.memory.tensor_sizes import keeps_whole_gradients
from plait.planner.memory.traced_peak import (
    MEMORY_ITEMS,
    can_trace,
    imported_bytes,
    resident_bytes,
    tensor_bytes,
    traced_peak,
    traced_ranks,
)
from plait.planner.memory.update_buffers import update_bytes
from plait.planner.problem.candidates import RECOMPUTE_MODES, SHARDED_STATES, Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile, keeps_weights_gathered, splits_weights
from plait.planner.problem.stage_partition import expert_shard_ranks, layer_parameters, micro_batches_per_step
from plait.planner.problem.trained_weights import (
    adapter_parameters,
    dequantized_parameters,
    trained_layer_parameters,
)
from plait.planner.problem.workload import Workload
from plait.planner.step_time.roofline import local_tokens, shard_group_size

CAPPED_LOGIT_BYTES = 8
"""Bytes for each capped score of a vocabulary entry: the score and its slope in float32 (trainer/score_passes.py)."""
ALLOCATOR_RESERVE = constant("allocator_reserve")
READING_BYTES = 6
"""Bytes per number of a quantized matrix beside the matrix that is made of it: codes as indices, and what they stand
for in float32 (model/quantization.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes per device at the highest point of a step, arrays over candidates; `allocated` is the items' sum.

    `allocated` is what a framework's allocator reports at most, `reserved` what the device's own tool shows.
    """

    parameters: Reals
    gradients: Reals
    optimizer: Reals
    gathered: Reals
    activations: Reals
    logits: Reals
    fixed: Reals
    allocated: Reals
    reserved: Reals
    rank: Counts
    """The rank of the pipeline whose devices these are, counted from 0."""


def estimate_memory(
    workload: Workload, candidates: Candidates, profile: SoftwareProfile, rank: int | Literal["fullest"] = "fullest"
) -> MemoryEstimate:
    """Memory of each candidate: of one rank of its pipeline, or of the fullest."""
    if _is_traced(workload, profile):
        found = traced_peak(workload, candidates, keeps_ends=profile.keeps_tied_table_once, rank=rank)
        reserved = resident_bytes(workload, candidates, found, profile.outside_bytes)
        items = {name: found[name] for name in MEMORY_ITEMS}
        return MemoryEstimate(
            **items, allocated=tensor_bytes(found), reserved=reserved, rank=found["rank"].astype(np.int64)
        )
    rates = _bytes_per_load(workload, candidates, profile)
    whole = _summed_over_items(rates)
    amounts, fullest = np.zeros_like(whole), np.zeros(len(candidates), dtype=np.int64)
    for rows, loads in grouped_loads(workload, candidates):
        weighed = loads if rank == "fullest" else loads.of_rank(rank)
        chosen = (weighed.amounts @ whole[:, rows]).argmax(axis=0)
        amounts[:, rows], fullest[rows] = weighed.amounts[chosen].T, weighed.rank[chosen]
    items = {item: np.zeros(len(candidates)) for item in MEMORY_ITEMS}
    for (item, load), rate in rates.items():
        items[item] += rate * amounts[LOADS.index(load)]
    items |= _fuller_end(items, workload, candidates, profile)
    # Activations and logits are gone when weights are updated.
    items["activations"] = np.maximum(items["activations"], update_bytes(workload, candidates) - items["logits"])
    allocated = np.add.reduce(list(items.values()))
    return MemoryEstimate(
        **items, allocated=allocated, reserved=_reserved(allocated, workload, candidates, profile), rank=fullest
    )


def bytes_per_rank(workload: Workload, candidates: Candidates, profile: SoftwareProfile) -> Reals:
    """Bytes of a device on each rank of pipelines of one degree: shape [ranks, candidates]."""
    if _is_traced(workload, profile):
        whole = (
            resident_bytes(workload, candidates, found, profile.outside_bytes)
            for found in traced_ranks(workload, candidates, keeps_ends=profile.keeps_tied_table_once)
        )
        return np.stack(list(whole))
    if (candidates.pipeline == 1).all():
        return estimate_memory(workload, candidates, profile).reserved[None]
    needed = np.zeros((int(candidates.pipeline[0]), len(candidates)))
    whole = _summed_over_items(_bytes_per_load(workload, candidates, profile))
    for rows, loads in grouped_loads(workload, candidates):
        first = np.searchsorted(loads.rank, np.arange(len(needed)))
        needed[:, rows] = np.maximum.reduceat(loads.amounts @ whole[:, rows], first, axis=0)
    return _reserved(needed, workload, candidates, profile)


def _is_traced(workload: Workload, profile: SoftwareProfile) -> bool:
    return profile.memory_model == "followed" and can_trace(workload)


def _reserved(allocated: Reals, w: Workload, c: Candidates, profile: SoftwareProfile) -> Reals:
    imported = imported_bytes(w, c) if profile.memory_model == "followed" else 0.0  # else they are the host's memory
    return ALLOCATOR_RESERVE * allocated + profile.outside_bytes + imported


def _fuller_end(items: Mapping[str, Reals], w: Workload, c: Candidates, profile: SoftwareProfile) -> dict[str, Reals]:
    """The fuller end of the backward pass where a step has one and no gradients wait between steps: at its beginning
    there are none, at its end neither activations nor logits."""
    own = (c.weight_copies == 1) | splits_weights(c, profile) & (c.weight_copies == c.shard)
    once = own & (c.pipeline == 1) & (micro_batches_per_step(w, c) <= 1) & profile.frees_gradients
    early = items["activations"] + items["logits"] >= items["gradients"]
    gone = {"gradients": once & early, "activations": once & ~early, "logits": once & ~early}
    return {item: np.where(away, 0.0, items[item]) for item, away in gone.items()}


def _summed_over_items(rates: Mapping[tuple[str, str], Reals]) -> Reals:
    """Bytes that one of each load takes: shape [loads, candidates]."""
    whole = np.zeros((len(LOADS), len(rates["fixed", "once"])))
    for (_, load), rate in rates.items():
        whole[LOADS.index(load)] += rate
    return whole


def _bytes_per_load(w: Workload, c: Candidates, profile: SoftwareProfile) -> Mapping[tuple[str, str], Reals]:
    """Bytes per unit of each load, by item and load."""
    common, experts = layer_parameters(w, c)
    (trained, trained_experts), adapters = trained_layer_parameters(w, c), adapter_parameters(w, c)
    held = common + experts + adapters
    inputs, learning_inputs = (w.input_table_parameters * part / c.tensor for part in (1, 0 if w.is_frozen else 1))
    table, tokens, ranks = w.embedding_parameters / c.tensor, local_tokens(w, c), shard_group_size(c, profile)
    learns = w.embedding_learns * table
    head_alone = (w.head_learns - w.embedding_learns) * table  # what a head has beside that
    rule, number = c.shard_what, w.element_bytes
    split = {what: np.where(rule >= SHARDED_STATES.index(what), ranks, 1) for what in ("optimizer", "gradients")}
    split["parameters"] = np.where(splits_weights(c, profile), ranks, 1)
    split["gradients"] = np.where(keeps_whole_gradients(w, c), 1, split["gradients"])
    # Experts' copies are fewer than the rest's: what is sharded of them is split over fewer ranks.
    own = {what: expert_shard_ranks(w, c, some) for what, some in split.items()}
    fully, stays = splits_weights(c, profile), keeps_weights_gathered(c, profile)
    # Where parameters have 16 bits the optimizer keeps them once more in 32; in float32 they are the same.
    each = max(profile.weight_bytes, number)
    twice = each < 4
    held_bytes = np.where(fully & twice, 0.0, each)
    weight = held_bytes / split["parameters"]
    frozen = number / split["parameters"]  # matrices alone; an embedding, and a tied head, stay in float32
    of_layers = w.matrix_bytes if w.is_frozen else held_bytes
    gradient = profile.other.gradients_held_bytes or profile.gradient_bytes
    state, state_of_layers = (
        (profile.state_bytes_with(moments) - (0 if twice else each)) * (1 - profile.other.offloaded)
        for moments in (w.moments, w.layer_moments)
    )
    gathered = w.matrix_bytes * (common + experts) + number * adapters
    whole_gradients = profile.gradient_bytes / 2 * (trained + trained_experts)
    ahead = profile.layers_ahead * (np.where(stays, 0.0, gathered) + whole_gradients)
    _, largest = dequantized_parameters(w, c)
    kept, again = kept_and_repeated(w, c, profile)
    rounded_head = fully & w.rounds_gathered_head & (stays | (profile.lasting_weights == "once a step"))
    return {
        ("parameters", "layers"): weight * adapters
        + of_layers * (common / split["parameters"] + experts / own["parameters"]),
        ("parameters", "head"): 0.0 * table if w.head_learns or w.tied else (frozen - weight) * table,
        ("parameters", "tables"): weight * table,
        ("parameters", "once"): weight * inputs,
        ("gradients", "once"): gradient * learning_inputs / split["gradients"],
        ("optimizer", "once"): state * learning_inputs / split["optimizer"],
        ("gradients", "layers"): gradient * (trained / split["gradients"] + trained_experts / own["gradients"]),
        ("gradients", "tables"): gradient * learns / split["gradients"],
        ("gradients", "head"): gradient * head_alone / split["gradients"],
        ("optimizer", "layers"): state_of_layers * (trained / split["optimizer"] + trained_experts / own["optimizer"]),
        ("optimizer", "tables"): state * learns / split["optimizer"],
        ("optimizer", "head"): state * head_alone / split["optimizer"],
        ("gathered", "once"): np.where(fully, ahead + (profile.gathered_table_bytes or number / 2) * inputs, 0.0),
        ("gathered", "layers"): np.where(stays, gathered, 0.0),
        ("gathered", "tables"): np.where(fully, (profile.gathered_table_bytes or number / 2) * table, 0.0),
        ("gathered", "head"): np.where(rounded_head, (number - profile.gathered_table_bytes) * table, 0.0),
        ("activations", "kept"): kept + _rounded_weights(w, c, profile) * (adapters if w.is_frozen else held),
        ("activations", "split"): split_activations(w, c),
        ("activations", "once"): LAYER_INPUT_BYTES * tokens * w.layer_inputs / c.tensor
        + again
        + (number + READING_BYTES) * largest
        + block_bytes(w, c, UNFUSED_SCORES),
        ("logits", "head"): np.minimum(tokens * w.vocabulary / c.tensor, profile.logits_at_once)
        * (profile.logit_copies_bytes + CAPPED_LOGIT_BYTES * w.capped_logits)
        + (_head_copies(w, profile) - number * (rounded_head & w.head_learns)) * table,
        ("fixed", "once"): profile.fixed_bytes + np.where(rule > 0, profile.other.bucket_bytes, 0.0),
    }


def _rounded_weights(w: Workload, c: Candidates, profile: SoftwareProfile) -> Reals:
    """Bytes per weight of the 16-bit copies that each micro-batch keeps for its backward pass. Gathered weights are
    such copies themselves, and a layer that is computed again rounds its weights again."""
    again = c.recompute != RECOMPUTE_MODES.index("none")
    keeps = profile.rounded_weights == "of all layers" and w.element_bytes < profile.weight_bytes
    return np.where(splits_weights(c, profile) | again, 0.0, w.element_bytes * keeps)


def _head_copies(w: Workload, profile: SoftwareProfile) -> float:
    """Bytes per weight of the head that the loss holds: the gradient in float32, and in 16 bits the rounded weight and
    the rounded product that is added to the gradient; of a frozen head, if it is tied, the rounded weight
    alone."""
    if profile.head_gradient == "among the others":
        return 0.0
    if not w.head_learns:
        return float(w.element_bytes) if w.element_bytes < 4 and w.tied else 0.0
    return 4.0 + (2.0 * w.element_bytes if w.element_bytes < 4 else 0.0)
