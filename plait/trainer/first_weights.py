"""A rank's weights before the first step: drawn from the seed, or those of a model that the run goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.errors import RunFailed
from plait.interop.base_fingerprint import base_fingerprint
from plait.interop.base_model import BaseModel, read_base_model
from plait.interop.read_weights import read_boxes, read_whole
from plait.model.adapter_shape import Quantization
from plait.model.gpt import kept_in
from plait.model.init import AdapterStart, first_value
from plait.model.linear import Linear
from plait.model.quantization import dequantized, quantize
from plait.model.shape import ModelShape
from plait.model.weights import is_quantized
from plait.parallel.sharded_model import HeldWeight, ShardedModel, quantized_layers
from plait.partition.boxes import Box, whole_box
from plait.planner.plan import Plan

WhichWeights = Literal["all", "frozen"]
WEIGHTS_AT_ONCE = 8
"""Weights that are drawn at a time; as many lie whole in the host's memory."""


def fill_first_weights(sharded: ShardedModel, plan: Plan, seed: int, *, which: WhichWeights = "all") -> None:
    """Fill this rank's weights as the plan says: all of them, or those alone that no checkpoint has. Raises PlaitError
    where the model's folder is not as it was planned with."""
    held = [one for one in sharded.weights if which == "all" or not one.trained]
    if not held and not quantized_layers(sharded):
        return
    shape = plan.job.shape
    quantized = [one for one in held if is_quantized(one.name, shape)]
    held = [one for one in held if not is_quantized(one.name, shape)]
    if not plan.job.base:  # an adapter of an untrained model serves only for proofs
        initialize_weights(held, shape, seed, "changed")
        _fill_quantized(quantized, sharded, shape, lambda name: first_value(name, shape, seed, "changed"))
        return
    base = read_base_model(Path(plan.job.base))
    check_base(base, plan)
    _fill_quantized(quantized, sharded, shape, partial(read_whole, base))
    read_boxes(base, ((one.name, one.box, one.tensor) for one in held if one.name in base.places))
    if which == "all":
        read_boxes(base, _kept_values_in(base, sharded))
    initialize_weights([one for one in held if one.name not in base.places], plan.job.shape, seed)


@torch.no_grad()
def _fill_quantized(
    weights: Iterable[HeldWeight], sharded: ShardedModel, shape: ModelShape, read: Callable[[str], Tensor]
) -> None:
    """Fill weights that are kept in blocks, one after the other, each from the whole matrix: no rank has more than one
    in float32 at a time. A rank without stages keeps plain matrices of the same numbers."""
    if shape.adapter is None:
        return
    layers, held = quantized_layers(sharded), {one.name: one for one in weights}
    # A rank with none of a matrix's blocks multiplies with those that it gathers, and so it needs their scales.
    for name in dict.fromkeys((*held, *layers)):
        _fill_from(read(name), layers.get(name), held.get(name), shape.adapter.quantization)


def _fill_from(matrix: Tensor, layer: Linear | None, held: HeldWeight | None, quantization: Quantization) -> None:
    """Fill a rank's part of one quantized weight. A function of its own, so that nothing of a matrix is left in memory
    while the next one is read."""
    if layer is None or layer.part is None or layer.scales is None:
        assert held is not None
        held.tensor.copy_(dequantized(matrix, quantization))
        return
    found = quantize(matrix, quantization)
    layer.scales.copy_(found.scales)
    if held is not None:
        held.tensor.copy_(layer.part.cut(found).narrow(0, held.box.offset[0], held.box.extent[0]))


def _kept_values_in(base: BaseModel, sharded: ShardedModel) -> Iterable[tuple[str, Box, Tensor]]:
    """The vectors of this rank that no gradient changes and that the model has values for; all others begin as
    `reset_kept_values` sets them."""
    for chunk in sharded.chunks:
        for name, values in kept_in(chunk).items():
            if name in base.places:
                yield name, whole_box(values.shape), values


def check_base(base: BaseModel, plan: Plan) -> None:
    """Raise RunFailed unless this is the model that the run was planned with."""
    shape = replace(plan.job.shape, adapter=None)
    if shape.vocabulary > base.shape.vocabulary:  # rows for new tokens: read_boxes
        shape = replace(shape, vocabulary=base.shape.vocabulary)
    is_same = not plan.job.base_fingerprint or base_fingerprint(base) == plan.job.base_fingerprint
    if base.shape_for(shape.sequence) != shape or not is_same:
        raise RunFailed(
            f"the model in {plan.job.base} is not the one that this run was planned with; bring that one back"
        )


def initialize_weights(
    weights: Iterable[HeldWeight], shape: ModelShape, seed: int, start: AdapterStart = "unchanged"
) -> None:
    """Fill weights from the seed: each is a slice of the value that the whole weight has in one process.

    Several are drawn at a time, as a generator keeps one core busy: 8 billion numbers take it 45 s.
    """

    @torch.no_grad()  # of one thread alone
    def fill(held: HeldWeight) -> None:
        value = first_value(held.name, shape, seed, start)
        for dim, (first, length) in enumerate(zip(held.box.offset, held.box.extent, strict=True)):
            value = value.narrow(dim, first, length)
        held.tensor.copy_(value)

    with ThreadPoolExecutor(min(torch.get_num_threads(), WEIGHTS_AT_ONCE)) as pool:
        for _ in pool.map(fill, weights):
            pass
