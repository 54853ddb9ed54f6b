"""How long arithmetic takes: matrix products by their shape, attention, and the passes that only move memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.cluster.catalog import Device
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import layer_weights
from plait.planner.problem.workload import PricedPrecision, Workload
from plait.planner.step_time.kernel_efficiency import KernelEfficiency, kernel_efficiency_of

USUAL_ACHIEVABLE_SHARE = 0.75
"""Share of the peak that large products reach where the catalogue has no measurement."""
UNTHROTTLED_FLOPS_PER_WATT = 0.8e12
THROTTLE_EXPONENT = 0.24
"""Up to this rate per watt of board power a device keeps its clock; beyond, it falls with this power of the excess.
The A100 (0.78) keeps it, the H100 (1.41 in bf16, 2.83 in fp8) does not. Fitted on the even half of all rows of H100,
B200 and GB200 at once (llm-foundry, dgxc, NVIDIA's summary, torchtitan, SimuMax); the knee, 0.8, is assumed."""
A100_FLOPS = 312e12
STREAM_SHARE = 0.80
"""Share of the memory's rate that element-wise kernels reach (planner's survey: 0.75 to 0.85 on A100 and H100)."""
TILE_SIZES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.90), (128, 64, 0.72), (64, 64, 0.50))
"""Blocks of the result that one unit computes at a time, and their speed against the largest (the libraries' tiles)."""
RAMP_TILES = 115
"""Steps of the inner dim that a tile's beginning and end are worth."""
FASTER_DEVICE_PENALTY: Mapping[PricedPrecision, PricedPrecision] = {
    "fp4": "fp8",
    "fp8": "bf16",
    "bf16": "fp16",
    "fp16": "float32",
}
"""What a device that lacks a precision computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """One device under one stack, as rates."""

    linear_flops: float
    """Rate of the largest linear layers' products."""
    plain_flops: float
    """Rate of the largest products in 16 bits: heads and unfused attention."""
    score_flops: float
    """What the shares of attention kernels refer to."""
    stream_bytes_per_s: float
    units: int
    """Tiles of a result that are computed at once, where products are dealt out in such."""
    kernels: KernelEfficiency


def device_rates(device: Device, precision: PricedPrecision, stack: SoftwareProfile, speed: float = 1.0) -> DeviceRates:
    """The rates of a device in the workload's precision."""
    peak = peak_flops(device, "bf16" if precision in ("fp8", "fp4") else precision)
    reached = (device.achievable or USUAL_ACHIEVABLE_SHARE) * stack.product_share * speed
    plain = linear = peak * reached * sustained_flops(peak, device.watts)
    if precision in ("fp8", "fp4"):
        narrow = peak_flops(device, precision)
        linear = max(linear, narrow * reached * stack.fp8_share * sustained_flops(narrow, device.watts))
    # Attention kernels lag behind the devices: one written for another generation gets less out of it.
    lag = min(1.0, (A100_FLOPS / peak) ** stack.flash_lag)
    # A processor's kernels go by the rate of its large products, which is its peak where that was measured.
    large = USUAL_ACHIEVABLE_SHARE if device.kind == "cpu" and device.achievable is None else 1.0
    return DeviceRates(
        linear_flops=linear,
        plain_flops=plain,
        score_flops=peak * large * speed * lag * sustained_flops(peak, device.watts),
        stream_bytes_per_s=device.memory_bytes_per_s * STREAM_SHARE,
        units=device.units or 0,
        kernels=kernel_efficiency_of(device),
    )


def sustained_flops(peak: float, watts: float | None) -> float:
    """Share of its short-run rate that a device holds in a long run: the more arithmetic a watt must feed, the slower
    the clock that its power limit leaves."""
    return min(1.0, (UNTHROTTLED_FLOPS_PER_WATT * watts / peak) ** THROTTLE_EXPONENT) if watts else 1.0


def peak_flops(device: Device, precision: PricedPrecision) -> float:
    """The device's dense peak in a precision, or in the next coarser one that it has."""
    tried: PricedPrecision | None = precision
    while tried and tried not in device.peak_flops:
        tried = FASTER_DEVICE_PENALTY.get(tried)
    return device.peak_flops[tried] if tried else max(device.peak_flops.values())


def product_s(chip: DeviceRates, rows: Any, inner: Any, columns: Any, *, flops: float, batch: Any = 1.0) -> Reals:
    """Seconds of `batch` products of rows × inner by inner × columns, 16-bit operands, on one device.

    The device's units take one tile of the result each: a last wave that is not full costs as much as a full one, and
    every tile pays a beginning and an end. The best of the libraries' tiles counts; no product outruns its memory.
    """
    rows, inner, columns, batch = (np.asarray(x, dtype=np.float64) for x in (rows, inner, columns, batch))
    moved = 2.0 * batch * (rows * inner + inner * columns + rows * columns) / chip.stream_bytes_per_s
    if not chip.kernels.tiles:
        block = chip.kernels.block
        padded = 2.0 * batch * np.ceil(rows / block) * block * inner * np.ceil(columns / block) * block
        return np.maximum(padded / flops, moved)
    shape = (-1,) + (1,) * np.broadcast(rows, inner, columns, batch).ndim
    high, wide, speed = (np.array(column).reshape(shape) for column in zip(*TILE_SIZES, strict=True))
    tiles = batch * np.ceil(rows / high) * np.ceil(columns / wide)
    # Long inner dims are cut over idle units, which makes the last wave nearly full.
    cuts = np.where(
        (tiles < chip.units) & (inner > 2048), np.minimum(np.floor(chip.units / np.maximum(tiles, 1)), 4), 1
    )
    tile_s = 2.0 * high * wide * (inner / np.maximum(cuts, 1) + RAMP_TILES) / (flops / chip.units * speed)
    return np.maximum((np.ceil(tiles / chip.units) * tile_s).min(axis=0), moved)


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


def sharing_ranks(candidates: Candidates, stack: SoftwareProfile) -> Counts:
    """Ranks that share the shards of one weight where it is sharded."""
    return candidates.shard * (candidates.context if stack.shards_over == "shard and context" else 1)


def layer_time(workload: Workload, chip: DeviceRates, stack: SoftwareProfile, candidates: Candidates) -> LayerTime:
    """An average layer's arithmetic: sparse and plain layers weighted by their number."""
    forward, backward = _products(workload, chip, stack, candidates)
    scores, scores_backward = _scores(workload, chip, stack, candidates)
    stream = _stream(workload, chip, stack, candidates)
    weights = np.add(*layer_weights(workload, candidates))
    return LayerTime(
        products=forward,
        products_backward=backward,
        scores=scores,
        scores_backward=scores_backward,
        stream=stream,
        stream_backward=1.5 * stream + weights * GRADIENT_ACCUMULATION_BYTES / chip.stream_bytes_per_s,
    )


def head_time(
    workload: Workload, chip: DeviceRates, stack: SoftwareProfile, candidates: Candidates
) -> tuple[Reals, Reals]:
    """The head and the loss: seconds of the forward and the backward pass of one micro-batch."""
    tokens, columns = local_tokens(workload, candidates), workload.vocabulary / candidates.tensor
    there = product_s(chip, tokens, workload.width, columns, flops=chip.plain_flops)
    back = product_s(chip, tokens, columns, workload.width, flops=chip.plain_flops)
    back = back + product_s(chip, workload.width, tokens, columns, flops=chip.plain_flops)
    each = stack.logit_bytes / chip.stream_bytes_per_s + chip.kernels.logit_flops / chip.plain_flops
    loss = tokens * columns * each
    tables = (1 if workload.has_tied_head else 2) * workload.width * columns
    return there + loss / 2, back + loss / 2 + tables * GRADIENT_ACCUMULATION_BYTES / chip.stream_bytes_per_s


def _products(
    workload: Workload, chip: DeviceRates, stack: SoftwareProfile, candidates: Candidates
) -> tuple[Reals, Reals]:
    w, tokens, tensor = workload, local_tokens(workload, candidates), candidates.tensor
    heads = w.heads * w.head_width / tensor
    # Keys and values are copied where there are fewer of them than ranks.
    keys = np.maximum(w.kv_heads / tensor, 1.0) * w.head_width
    if w.projection_weights:
        shapes = [(1.0, tokens, w.width, w.projection_weights / w.width / tensor, 1.0)]
    else:
        shapes = [(1.0, tokens, w.width, heads + 2 * keys, 1.0), (1.0, tokens, heads, w.width, 1.0)]
    sparse = w.sparse_layers / w.layers
    if sparse < 1:
        shapes += _feedforward(w, tokens, w.ffn / tensor, 1.0, 1 - sparse)
    if sparse > 0:
        held = w.experts / candidates.expert
        across = np.where(candidates.expert > 1, 1, tensor)  # experts over ranks are not cut by tensor as well
        share = np.where(candidates.expert > 1, tensor, 1)
        rows = np.maximum(tokens / share * w.experts_per_token / held, 1.0)
        outer, inner = w.routed_width, w.expert_ffn / across
        shapes += _feedforward(w, rows, inner, held, sparse / stack.expert_share, outer)
        if w.shared_ffn:
            shapes += _feedforward(w, tokens, w.shared_ffn / tensor, 1.0, sparse)
    # One call prices all: forward, gradient of the input, gradient of the weight.
    weight, rows, inner, columns, batch = (
        np.array([np.broadcast_to(x, len(candidates)) for x in column]) for column in zip(*shapes, strict=True)
    )
    every = product_s(
        chip,
        np.stack([rows, rows, inner]),
        np.stack([inner, columns, rows]),
        np.stack([columns, inner, columns]),
        flops=chip.linear_flops,
        batch=np.stack([batch] * 3),
    )
    spent = (every * weight).sum(axis=1)
    return spent[0], spent[1] + spent[2]


def _feedforward(
    w: Workload, rows: Any, inner: Any, batch: Any, weight: float, outer: int = 0
) -> list[tuple[Any, ...]]:
    outer = outer or w.width
    return [(weight, rows, outer, (w.gate_factor - 1) * inner, batch), (weight, rows, inner, outer, batch)]


def _scores(
    workload: Workload, chip: DeviceRates, stack: SoftwareProfile, candidates: Candidates
) -> tuple[Reals, Reals]:
    w, tokens = workload, local_tokens(workload, candidates)
    heads = w.heads / candidates.tensor
    if workload.attention == "flash":
        flops = 2.0 * tokens * w.mean_keys * heads * w.head_width  # causal: half of 4 per key
        # Narrow heads and short sequences leave the kernel less to reuse.
        habits = chip.kernels
        narrow = min(1.0, (w.head_width / 128) ** habits.head_power)
        shape = narrow * w.mean_keys / (w.mean_keys + habits.few_keys)
        there = flops / (chip.score_flops * stack.flash_share * shape)
        return there, habits.attention_backward * there
    batch = candidates.micro_sequences * heads
    there = product_s(chip, w.sequence, w.head_width, w.sequence, flops=chip.plain_flops, batch=batch)
    there = there + product_s(chip, w.sequence, w.sequence, w.head_width, flops=chip.plain_flops, batch=batch)
    ragged = 1.0 if w.head_width % 8 == 0 else PARTIAL_TILE_SHARE
    moved = batch * float(w.sequence) ** 2 * stack.score_bytes / chip.stream_bytes_per_s
    return there * ragged + moved, 2 * there * ragged + 1.3 * moved


GRADIENT_ACCUMULATION_BYTES = 5.0
"""Traffic per weight and micro-batch of adding gradients to those before: 2 where they are only written in 16 bits, 6
where the sum is read and written. Chosen among 2, 5, 8 by the ranking of all layouts of vTrain's and BLOOM's jobs."""
PARTIAL_TILE_SHARE = 12.0
"""How much slower 16-bit products are whose rows do not begin on 16 bytes: the tensor units' loads need that (cuBLAS
guide on alignment)."""


def _stream(workload: Workload, chip: DeviceRates, stack: SoftwareProfile, candidates: Candidates) -> Reals:
    w, tokens = workload, local_tokens(workload, candidates)
    whole = tokens * w.width * stack.stream_bytes / np.where(candidates.sequence_parallel > 0, candidates.tensor, 1)
    sparse = w.sparse_layers / w.layers
    ffn = w.ffn * (1 - sparse) + (w.experts_per_token * w.expert_ffn + w.shared_ffn) * sparse
    inner = tokens * ffn * stack.inner_bytes * (w.gate_factor - 1) / candidates.tensor
    routed = sparse * tokens * w.experts_per_token * w.width * stack.routed_bytes / candidates.tensor
    scanned = tokens * 2 * w.width * SCANNED_BYTES * w.scanning_layers / w.layers / candidates.tensor
    return (whole + inner + routed + scanned) * (w.element_bytes / 2) / chip.stream_bytes_per_s


SCANNED_BYTES = 90.0
"""A state-space layer's scan, as the traffic that would take as long, per token and unit of its inner width (twice the
model's): kernels that are far from both limits. Set by hand between 70 and 190 on all Nemotron 3 rows, both halves."""
