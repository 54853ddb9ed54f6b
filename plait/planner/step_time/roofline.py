"""How long arithmetic takes: matrix products by their shape, attention, and the passes that only move memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.planner.calibration.constants import constant, constant_rows
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.expert_loads import busiest_rank_load
from plait.planner.problem.other_programs import STATE_SPACE_SCAN_BYTES
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import ranks_of_an_expert
from plait.planner.problem.trained_weights import (
    dequantized_parameters,
    dropped_numbers,
    local_target_sizes,
    trained_layer_parameters,
)
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_rates import DeviceRates

TILE_SIZES = constant_rows("tile_sizes")
"""Rows and columns of the tiles that one unit computes at a time, and their relative speed."""
TILE_RAMP_STEPS = constant("tile_ramp_steps")


def product_s(rates: DeviceRates, rows: Any, inner: Any, columns: Any, *, flops: float, batch: Any = 1.0) -> Reals:
    """Seconds of `batch` products of rows × inner by inner × columns on one device.

    The device's units take one tile of the result each: a last wave that is not full costs as much as a full one, and
    every tile pays a beginning and an end. The best of the libraries' tiles counts; no product outruns its memory.
    """
    rows, inner, columns, batch = (np.asarray(x, dtype=np.float64) for x in (rows, inner, columns, batch))
    numbers = batch * (rows * inner + inner * columns + rows * columns)
    moved = rates.operand_bytes * numbers / rates.stream_bytes_per_s
    if not rates.kernels.tiles:
        block = rates.kernels.block
        padded = 2.0 * batch * np.ceil(rows / block) * block * inner * np.ceil(columns / block) * block
        return np.maximum(padded / flops, moved)
    shape = (-1,) + (1,) * np.broadcast(rows, inner, columns, batch).ndim
    high, wide, speed = (np.array(column).reshape(shape) for column in zip(*TILE_SIZES, strict=True))
    tiles = batch * np.ceil(rows / high) * np.ceil(columns / wide)
    # Long inner dims are cut over idle units, which makes the last wave nearly full.
    cuts = np.where(
        (tiles < rates.compute_units) & (inner > 2048),
        np.minimum(np.floor(rates.compute_units / np.maximum(tiles, 1)), 4),
        1,
    )
    tile_s = 2.0 * high * wide * (inner / np.maximum(cuts, 1) + TILE_RAMP_STEPS) / (flops / rates.compute_units * speed)
    return np.maximum((np.ceil(tiles / rates.compute_units) * tile_s).min(axis=0), moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one layer and one micro-batch on one device; arrays over candidates."""

    products: Reals
    products_backward: Reals
    scores: Reals
    scores_backward: Reals
    stream: Reals
    stream_backward: Reals

    @property
    def forward(self) -> Reals:
        return self.products + self.scores + self.stream

    @property
    def backward(self) -> Reals:
        return self.products_backward + self.scores_backward + self.stream_backward


def local_tokens(workload: Workload, candidates: Candidates) -> Reals:
    """Tokens of a micro-batch on one rank."""
    return candidates.micro_sequences * workload.sequence / candidates.context


def shard_group_size(candidates: Candidates, profile: SoftwareProfile) -> Counts:
    """Ranks that share the shards of one weight where it is sharded."""
    return candidates.shard * (candidates.context if profile.shards_over == "shard and context" else 1)


def layer_time(workload: Workload, rates: DeviceRates, profile: SoftwareProfile, candidates: Candidates) -> LayerTime:
    """An average layer's arithmetic: sparse and plain layers weighted by their number."""
    forward, backward = _product_times(workload, rates, profile, candidates)
    scores, scores_backward = _attention_times(workload, rates, profile, candidates)
    stream = _memory_pass_time(workload, rates, profile, candidates)
    weights = np.add(*trained_layer_parameters(workload, candidates))
    quantized, _ = dequantized_parameters(workload, candidates)
    reading = quantized * READ_MATRIX_BYTES / rates.stream_bytes_per_s
    return LayerTime(
        products=forward + reading,
        products_backward=backward + reading,
        scores=scores,
        scores_backward=scores_backward,
        stream=stream,
        stream_backward=1.5 * stream + weights * GRADIENT_ACCUMULATION_BYTES / rates.stream_bytes_per_s,
    )


def head_time(
    workload: Workload, rates: DeviceRates, profile: SoftwareProfile, candidates: Candidates
) -> tuple[Reals, Reals]:
    """The head and the loss: seconds of the forward and the backward pass of one micro-batch."""
    tokens, columns = local_tokens(workload, candidates), workload.vocabulary / candidates.tensor
    there = product_s(rates, tokens, workload.width, columns, flops=rates.high_precision_flops)
    back = product_s(rates, tokens, columns, workload.width, flops=rates.high_precision_flops)
    if workload.head_learns:
        back = back + product_s(rates, workload.width, tokens, columns, flops=rates.high_precision_flops)
    each = profile.logit_bytes / rates.stream_bytes_per_s + rates.kernels.logit_flops / rates.high_precision_flops
    loss = tokens * columns * each
    back = back + (workload.logit_passes - 1) * (there + loss / 2)
    learning = workload.embedding_learns + (workload.head_learns and not workload.tied)
    tables = learning * workload.width * columns
    return there + loss / 2, back + loss / 2 + tables * GRADIENT_ACCUMULATION_BYTES / rates.stream_bytes_per_s


def _product_times(
    workload: Workload, rates: DeviceRates, profile: SoftwareProfile, candidates: Candidates
) -> tuple[Reals, Reals]:
    w, tokens, tensor = workload, local_tokens(workload, candidates), candidates.tensor
    heads = w.heads * w.head_width / tensor
    # Keys and values are copied where there are fewer of them than ranks.
    keys = np.maximum(w.kv_heads / tensor, 1.0) * w.head_width
    if w.projection_weights:
        shapes = [(1.0, tokens, w.width, w.projection_weights / w.width / tensor, 1.0)]
    else:
        shapes = [(1.0, tokens, w.width, heads + 2 * keys, 1.0), (1.0, tokens, heads, w.width, 1.0)]
    sparse = w.moe_layers / w.layers
    if sparse < 1:
        shapes += _feedforward_products(w, tokens, w.ffn / tensor, 1.0, 1 - sparse)
    if sparse > 0:
        held = w.experts / candidates.expert
        across = ranks_of_an_expert(w, candidates)
        share = tensor / across
        # A group waits for the rank that most tokens come to.
        rows = np.maximum(busiest_rank_load(w, candidates) * tokens / share * w.experts_per_token / held, 1.0)
        outer, inner = w.routed_width, w.expert_ffn / across
        shapes += _feedforward_products(w, rows, inner, held, sparse / profile.expert_share, outer)
        if w.shared_ffn:
            shapes += _feedforward_products(w, tokens, w.shared_ffn / tensor, 1.0, sparse)
    # One call prices all: forward, gradient of the input, gradient of the weight.
    weight, rows, inner, columns, batch = (
        np.array([np.broadcast_to(x, len(candidates)) for x in column]) for column in zip(*shapes, strict=True)
    )
    every = product_s(
        rates,
        np.stack([rows, rows, inner]),
        np.stack([inner, columns, rows]),
        np.stack([columns, inner, columns]),
        flops=rates.linear_flops,
        batch=np.stack([batch] * 3),
    )
    spent = (every * weight).sum(axis=1)
    if not w.is_frozen:
        return spent[0], spent[1] + spent[2]
    there, back = _adapter_products(w, rates, candidates)
    return spent[0] + there, spent[1] + back


def _adapter_products(w: Workload, rates: DeviceRates, candidates: Candidates) -> tuple[Reals, Reals]:
    """Seconds of the products of one layer's adapters: forward, and for both gradients. Their results are added to
    those of the layers beside them, which are read and written once more."""
    tokens, rank = local_tokens(w, candidates), float(w.adapter_rank)
    there = back = np.zeros(len(candidates))
    for inputs, outputs in local_target_sizes(w, candidates):
        for wide in (inputs, outputs):
            once = _thin_product_s(rates, tokens, wide, rank)
            there, back = there + once, back + 2 * once
        there = there + ADDED_NUMBERS * w.element_bytes * tokens * outputs / rates.stream_bytes_per_s
        back = back + ADDED_NUMBERS * w.element_bytes * tokens * inputs / rates.stream_bytes_per_s
    # Each number is read and written, and its mask is written or read.
    dropping = (2 * w.element_bytes + 1) * tokens * dropped_numbers(w, candidates)[0] / rates.stream_bytes_per_s
    return there + dropping, back + dropping


def _thin_product_s(rates: DeviceRates, rows: Reals, wide: Reals, rank: float) -> Reals:
    """Seconds of a product whose inner dim, or whose result, is only as wide as an adapter's rank: libraries have
    kernels for such, and its operands pass through memory once. All three passes move as much."""
    moved = rates.operand_bytes * (rows * wide + wide * rank + rows * rank) / rates.stream_bytes_per_s
    return np.maximum(2.0 * rows * wide * rank / rates.linear_flops, moved)


READ_MATRIX_BYTES = 22
"""Bytes that are moved to read a number of a quantized matrix by torch's own kernels: codes to indices, indices to
numbers, those times their scale, and that in 16 bits (model/quantization.py); counted, not timed."""
ADDED_NUMBERS = 3
"""Numbers that are moved to add one to another: two are read, one is written."""


def _feedforward_products(
    w: Workload, rows: Any, inner: Any, batch: Any, weight: float, outer: int = 0
) -> list[tuple[Any, ...]]:
    outer = outer or w.width
    return [(weight, rows, outer, (w.feedforward_matrices - 1) * inner, batch), (weight, rows, inner, outer, batch)]


def _attention_times(
    workload: Workload, rates: DeviceRates, profile: SoftwareProfile, candidates: Candidates
) -> tuple[Reals, Reals]:
    w, tokens = workload, local_tokens(workload, candidates)
    heads = w.heads / candidates.tensor
    if workload.attention == "flash":
        flops = 2.0 * tokens * w.mean_keys_per_query * heads * w.kernel_width  # causal: half of 4 per key
        # Narrow heads and short sequences leave the kernel less to reuse.
        habits = rates.kernels
        narrow = min(1.0, (w.kernel_width / 128) ** habits.head_power)
        shape = narrow * w.mean_keys_per_query / (w.mean_keys_per_query + habits.few_keys)
        there = flops / (rates.attention_flops * profile.flash_share * shape)
        return there, habits.attention_backward * there
    batch = candidates.micro_sequences * heads
    there = product_s(rates, w.sequence, w.kernel_width, w.sequence, flops=rates.high_precision_flops, batch=batch)
    there = there + product_s(
        rates, w.sequence, w.sequence, w.kernel_width, flops=rates.high_precision_flops, batch=batch
    )
    # The tensor units' loads need 16 bytes; plain float32 products do not run there.
    aligned = w.kernel_width * w.element_bytes % 16 == 0 or w.precision == "float32"
    ragged = 1.0 if aligned else UNALIGNED_SLOWDOWN
    moved = batch * float(w.sequence) ** 2 * profile.score_bytes * (w.element_bytes / 2) / rates.stream_bytes_per_s
    forward = there * ragged + moved
    again = forward if w.attention == "blocked" else 0.0
    return forward, 2 * there * ragged + profile.other.scores_backward * moved + again


GRADIENT_ACCUMULATION_BYTES = constant("gradient_accumulation_bytes")
"""Traffic per weight and micro-batch of adding gradients to those before: 2 where they are only written in 16 bits, 6
where the sum is read and written. Chosen among 2, 5, 8 by the ranking of all layouts of vTrain's and BLOOM's jobs."""
UNALIGNED_SLOWDOWN = constant("unaligned_slowdown")
"""How much slower 16-bit products are whose rows do not begin on 16 bytes: the tensor units' loads need that (cuBLAS
guide on alignment)."""


def _memory_pass_time(
    workload: Workload, rates: DeviceRates, profile: SoftwareProfile, candidates: Candidates
) -> Reals:
    w, tokens = workload, local_tokens(workload, candidates)
    whole = tokens * w.width * profile.stream_bytes / np.where(candidates.sequence_parallel > 0, candidates.tensor, 1)
    sparse = w.moe_layers / w.layers
    experts = w.experts_per_token * busiest_rank_load(w, candidates)
    ffn = w.ffn * (1 - sparse) + (experts * w.expert_ffn + w.shared_ffn) * sparse
    inner = tokens * ffn * profile.inner_bytes * (w.feedforward_matrices - 1) / candidates.tensor
    routed = sparse * tokens * experts * w.width * profile.routed_bytes / candidates.tensor
    scanned = (
        tokens * 2 * w.width * STATE_SPACE_SCAN_BYTES * w.other_layers.scanning_layers / w.layers / candidates.tensor
    )
    return (whole + inner + routed + scanned) * (w.element_bytes / 2) / rates.stream_bytes_per_s
