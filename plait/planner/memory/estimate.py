"""How many bytes each device needs, item by item, for many layouts at once: the fullest rank of each pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.planner.calibration.constants import constant
from plait.planner.memory.traced_peak import MEMORY_ITEMS, PipelineEnd, can_trace, resident_bytes, traced_peak
from plait.planner.problem.candidates import RECOMPUTE_MODES, SHARDED_STATES, Candidates, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import (
    layer_parameters,
    micro_batches_in_flight,
    micro_batches_per_step,
    rank_layers,
)
from plait.planner.problem.workload import Workload
from plait.planner.step_time.roofline import local_tokens, shard_group_size

ALLOCATOR_RESERVE = constant("allocator_reserve")


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
    stage: Reals
    """Pipeline rank that these bytes are for: 0 the first, 1 the last."""


def estimate_memory(
    workload: Workload, candidates: Candidates, profile: SoftwareProfile, end: PipelineEnd = "fuller"
) -> MemoryEstimate:
    """Memory of every candidate: of its first or its last pipeline rank, or of the fuller of both."""
    if profile.memory_model == "followed" and can_trace(workload):
        return _followed(workload, candidates, profile, end)
    none = np.zeros(len(candidates), dtype=bool)
    fuller = none if end == "first" else ~none
    items = _rank(workload, candidates, profile, last=fuller)
    if end == "fuller":
        first = _rank(workload, candidates, profile, last=none)
        fuller = np.add.reduce(list(items.values())) > np.add.reduce(list(first.values()))
        items = {name: np.where(fuller, items[name], first[name]) for name in items}
    allocated = np.add.reduce(list(items.values()))
    return MemoryEstimate(
        **items,
        allocated=allocated,
        reserved=ALLOCATOR_RESERVE * allocated + profile.outside_bytes,
        stage=fuller.astype(np.float64),
    )


def _followed(workload: Workload, candidates: Candidates, profile: SoftwareProfile, end: PipelineEnd) -> MemoryEstimate:
    items = traced_peak(workload, candidates, keeps_ends=profile.keeps_tied_table_once, end=end)
    allocated = np.add.reduce([items[name] for name in MEMORY_ITEMS])
    return MemoryEstimate(
        **items,
        allocated=allocated,
        reserved=resident_bytes(workload, candidates, allocated, profile.outside_bytes),
    )


def _rank(w: Workload, c: Candidates, profile: SoftwareProfile, last: Reals) -> dict[str, Reals]:
    layers = np.where(last, rank_layers(w, c).last, rank_layers(w, c).first)
    common, experts = layer_parameters(w, c)
    alone = c.pipeline == 1
    tables = np.where(alone, 1 if w.tied else 2, 1) * w.embedding_parameters / c.tensor
    weights = layers * (common + experts) + tables
    ranks = shard_group_size(c, profile)
    rule = c.shard_what
    split = {
        what: np.where(rule >= SHARDED_STATES.index(what), ranks, 1)
        for what in ("optimizer", "gradients", "parameters")
    }
    # Experts' copies are fewer than the rest's: their share of the optimizer is split over fewer ranks.
    own_experts = np.maximum(
        split["optimizer"] / np.where(c.expert > 1, c.expert / np.minimum(c.tensor, c.expert), 1), 1
    )
    states = (layers * common + tables) / split["optimizer"] + layers * experts / own_experts
    fully = rule == SHARDED_STATES.index("parameters")
    layer = common + experts
    # In 16 bits the optimizer keeps the parameters once more in 32; in float32 they are the same.
    twice, number_bytes = w.element_bytes < 4, w.element_bytes
    micros = micro_batches_per_step(w, c)
    kept = np.where(
        last & ~alone,
        np.where(c.virtual > 1, micro_batches_in_flight(c, micros) - c.pipeline + 1, 1),
        micro_batches_in_flight(c, micros),
    )
    tokens, ahead = local_tokens(w, c), number_bytes + profile.gradient_bytes / 2
    return {
        "parameters": np.where(fully & twice, 0.0, weights * number_bytes / split["parameters"]),
        "gradients": weights * (profile.gradients_held_bytes or profile.gradient_bytes) / split["gradients"],
        "optimizer": states * (profile.state_bytes - (0 if twice else number_bytes)) * (1 - profile.offloaded),
        "gathered": np.where(fully, profile.layers_ahead * ahead * layer + number_bytes / 2 * tables, 0.0),
        "activations": _activations(w, c, profile, layers, np.maximum(kept, 1)),
        "logits": np.where(last | alone, tokens * w.vocabulary / c.tensor * profile.logit_copies_bytes, 0.0),
        "fixed": profile.fixed_bytes + np.where(rule > 0, profile.bucket_bytes, 0.0),
    }


def _activations(w: Workload, c: Candidates, profile: SoftwareProfile, layers: Reals, kept: Reals) -> Reals:
    tokens = local_tokens(w, c)
    stream = np.where(c.sequence_parallel > 0, c.tensor, 1)
    whole = layer_activations(w, c, profile)
    edge = w.element_bytes * tokens * w.width / stream * (1 - profile.offloaded)
    cores = scores_held(w, c)
    full = c.recompute == RECOMPUTE_MODES.index("full")
    selective = c.recompute == RECOMPUTE_MODES.index("selective")
    thinned = (whole - cores) * (profile.selective_kept * (1 - profile.offloaded) if w.attention == "flash" else 1.0)
    each = np.where(full, edge, np.where(selective, thinned, whole))
    return layers * each * kept + np.where(full, whole, 0.0) + np.where(selective, whole - each, 0.0)


def layer_activations(w: Workload, c: Candidates, profile: SoftwareProfile) -> Reals:
    """Bytes that one layer keeps of one micro-batch for its backward pass, nothing recomputed.

    Counted in 16 bits as by Korthikanti et al. 2022, whose 34 bytes per token and unit of width (plain feedforward of
    four widths) are 10 for inputs of norms and products, 8 for queries, keys, values and their result, 16 for the
    feedforward.
    """
    tokens = local_tokens(w, c)
    stream = np.where(c.sequence_parallel > 0, c.tensor, 1)
    keys = np.maximum(w.kv_heads / c.tensor, 1) * w.head_width
    heads = w.heads / c.tensor * w.head_width
    sparse = w.moe_layers / w.layers
    ffn = w.ffn * (1 - sparse) + (w.experts_per_token * w.expert_ffn + w.shared_ffn) * sparse
    # Products keep their inputs as they multiply them (8 bits in fp8, as TransformerEngine does), all else is 16 bits.
    less = 1.0 if w.precision in ("fp8", "fp4") else 0.0
    inner = ((6.0 if w.gated else 4.0) - less) * ffn / c.tensor
    routed = sparse * (4.0 - less) * w.experts_per_token * w.routed_width / c.tensor
    streamed = (profile.stream_held_bytes - 2 * less) * w.width / stream
    held = streamed + (4 - less) * heads + 4 * keys + inner + routed
    return tokens * held * (w.element_bytes / 2) + scores_held(w, c)


def scores_held(w: Workload, c: Candidates) -> Reals:
    """Bytes that attention keeps of one micro-batch: 5 per score where it is not fused, else one float a row."""
    tokens = local_tokens(w, c)
    heads = w.heads / c.tensor
    return tokens * heads * (5.0 * w.sequence if w.attention == "unfused" else 4.0)
