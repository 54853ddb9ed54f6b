"""What layers keep of a micro-batch for its backward pass, by formulas (a step on processors is followed instead)."""

from __future__ import annotations

import numpy as np

from plait.planner.problem.candidates import RECOMPUTE_MODES, Candidates, Reals
from plait.planner.problem.expert_loads import busiest_rank_load
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.trained_weights import dropped_numbers
from plait.planner.problem.workload import Workload
from plait.planner.step_time.roofline import local_tokens


def kept_and_repeated(w: Workload, c: Candidates, profile: SoftwareProfile) -> tuple[Reals, Reals]:
    """Bytes that a layer keeps of a micro-batch, and what the one layer takes beside that is computed again."""
    tokens = local_tokens(w, c)
    stream = np.where(c.sequence_parallel > 0, c.tensor, 1)
    whole = layer_activations(w, c, profile)
    edge = w.element_bytes * tokens * w.width / stream * (1 - profile.other.offloaded)
    cores = scores_held(w, c, profile)
    full = c.recompute == RECOMPUTE_MODES.index("full")
    selective = c.recompute == RECOMPUTE_MODES.index("selective")
    kept = profile.selective_kept * (1 - profile.other.offloaded) if w.attention != "unfused" else 1.0
    thinned = (whole - cores) * kept
    each = np.where(full, edge, np.where(selective, thinned, whole))
    return each, np.where(full, whole, 0.0) + np.where(selective, whole - each, 0.0)


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
    attention = 4 * (heads + keys)
    if w.latent is not None:
        heads, attention = w.latent.values / c.tensor, 2 * (w.latent.kept(c.tensor) - w.width / stream)
    sparse = w.moe_layers / w.layers
    # Products keep their inputs as they multiply them (8 bits in fp8, as TransformerEngine does), all else is 16 bits.
    less = 1.0 if w.precision in ("fp8", "fp4") else 0.0
    load = busiest_rank_load(w, c)
    inner = ((6.0 if w.gated else 4.0) - less) * _ffn_per_token(w, load) / c.tensor
    routed = sparse * (4.0 - less) * load * w.experts_per_token * w.routed_width / c.tensor
    streamed = (profile.stream_held_bytes - 2 * less + 4.0 * w.post_norms) * w.width / stream
    narrow = 2.0 * w.adapter_rank * len(w.adapter_targets)
    if w.is_frozen:  # compiled layers norm again where products need it; adapters keep what they are given
        narrow = narrow + 4.0 * w.width / stream
    # Products keep what dropout left of their inputs, and the masks of a byte.
    narrow = narrow + 2.0 * (w.element_bytes + 1) / w.element_bytes * dropped_numbers(w, c)[0]
    held = streamed + attention - less * heads + inner + routed + narrow
    states = FLOAT32_BYTES * tokens * w.delta_numbers / c.tensor
    return tokens * held * (w.element_bytes / 2) + states + scores_held(w, c, profile)


def split_activations(w: Workload, c: Candidates) -> Reals:
    """Bytes that one layer keeps of one micro-batch between the halves of a split backward pass: the inputs of its
    products, and the gradients of their results."""
    stream = 4 * w.width / np.where(c.sequence_parallel > 0, c.tensor, 1)
    heads = 2 * w.head_width * (w.heads / c.tensor + np.maximum(w.kv_heads / c.tensor, 1))
    if w.latent is not None:
        heads = w.latent.turned(c.tensor) - w.width / c.tensor
    inner = w.feedforward_matrices * _ffn_per_token(w, busiest_rank_load(w, c)) / c.tensor
    return w.element_bytes * local_tokens(w, c) * (stream + heads + inner)


def _ffn_per_token(w: Workload, load: Reals) -> Reals:
    """Width of the feedforward that a token passes, on average over the layers, times how many tokens come to the
    experts of the busiest rank."""
    sparse = w.moe_layers / w.layers
    return w.ffn * (1 - sparse) + (load * w.experts_per_token * w.expert_ffn + w.shared_ffn) * sparse


def scores_held(w: Workload, c: Candidates, profile: SoftwareProfile) -> Reals:
    """Bytes that attention keeps of one micro-batch: where it is not fused, of each score the softmax before and after
    dropout and dropout's mask of a byte (5 in 16 bits, 9 in 32), or the softmax alone; else a float of each query."""
    if w.attention != "unfused":
        return kept_logsumexps(w, c)
    each = 2.0 * w.element_bytes + 1 if profile.other.drops_scores else float(w.element_bytes)
    return local_tokens(w, c) * w.heads / c.tensor * each * w.sequence


def kept_logsumexps(w: Workload, c: Candidates) -> Reals:
    """Bytes of the logsumexp of each query's scores, which fused attention keeps, and attention over context ranks;
    attention in blocks (model/masked_attention.py) computes the scores again and keeps none."""
    kept = np.where((w.attention == "blocked") & (c.context == 1), 0.0, 4.0)
    return kept * local_tokens(w, c) * w.heads / c.tensor


FLOAT32_BYTES = 4
LAYER_INPUT_BYTES = 16
"""Bytes for each number of the inputs that layers are given of their own: before a norm, behind it, and the gradients
of both, in float32 (model/gpt.py)."""
UNFUSED_SCORES, HOST_UNFUSED_SCORES = 2**24, 2**21
"""Scores of a block on GPUs and on processors (model/attention.py)."""
BLOCK_NUMBER_BYTES = 16
"""Bytes for each score of a block in the backward pass, in float32: the shares, the slopes, the gradients, and their
products with the shares."""


def block_bytes(w: Workload, c: Candidates, scores_at_once: int) -> Reals:
    """Bytes of the scores that are in memory at a time where attention is computed in blocks, of one query a row at
    least (model/masked_attention.py); else 0."""
    of_one_query = c.micro_sequences * w.heads / c.tensor * w.sequence
    scores = np.clip(scores_at_once, of_one_query, of_one_query * w.sequence / c.context)
    return BLOCK_NUMBER_BYTES * scores * (w.attention == "blocked")
