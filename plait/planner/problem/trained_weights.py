"""Which weights of a workload learn, and what low-rank adapters add to it: the numbers that every price of a frozen
model is made of.

A frozen weight has no gradient, no sum over ranks and no moments; the backward pass computes the gradient of what it
reads, and none of its own. All functions answer arrays over candidates.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plait.model.adapter_shape import AdapterTarget
from plait.planner.problem.candidates import Candidates, Reals
from plait.planner.problem.stage_partition import layer_parameters, rank_layers
from plait.planner.problem.workload import Workload

_ROW_CUT: frozenset[AdapterTarget] = frozenset({"attention.o", "feedforward.down"})
"""Layers whose inputs tensor parallelism cuts: their B is whole on each rank, and of all others A is."""


def target_sizes(w: Workload) -> Mapping[AdapterTarget, tuple[int, int]]:
    """Inputs and outputs of each linear layer of a dense layer that has an adapter."""
    queries, keys = w.heads * w.head_width, w.kv_heads * w.head_width
    sizes: dict[AdapterTarget, tuple[int, int]] = {
        "attention.q": (w.width, queries),
        "attention.k": (w.width, keys),
        "attention.v": (w.width, keys),
        "attention.o": (queries, w.width),
        "feedforward.gate": (w.width, w.ffn),
        "feedforward.up": (w.width, w.ffn),
        "feedforward.down": (w.ffn, w.width),
    }
    return {target: sizes[target] for target in w.adapter_targets}


def local_target_sizes(w: Workload, c: Candidates) -> list[tuple[Reals, Reals]]:
    """Inputs and outputs of each adapter on one rank."""
    found = []
    for target, (inputs, outputs) in target_sizes(w).items():
        into, out = np.full(len(c), float(inputs)), np.full(len(c), float(outputs))
        found.append((into / c.tensor, out) if target in _ROW_CUT else (into, out / c.tensor))
    return found


def adapter_parameters(w: Workload, c: Candidates) -> Reals:
    """Weights of one layer's adapters on one rank before sharding; 0 where all weights learn."""
    return np.add.reduce([np.zeros(len(c)), *(w.adapter_rank * (i + o) for i, o in local_target_sizes(w, c))])


def dropped_numbers(w: Workload, c: Candidates) -> tuple[Reals, Reals]:
    """Numbers per token that one layer's adapters read where some are dropped, on one rank: of all adapters, and of the
    one that reads most. 0 without dropout."""
    inputs = [into for into, _ in local_target_sizes(w, c)] if w.adapters_drop else []
    return sum(inputs, np.zeros(len(c))), np.maximum.reduce([np.zeros(len(c)), *inputs])


def repeated_adapter_parameters(w: Workload) -> int:
    """Weights of one layer's adapters that every rank of a tensor group holds, so that their gradients are summed over
    it."""
    sizes = target_sizes(w).items()
    return w.adapter_rank * sum(outputs if target in _ROW_CUT else inputs for target, (inputs, outputs) in sizes)


def dequantized_parameters(w: Workload, c: Candidates) -> tuple[Reals, Reals]:
    """Numbers in an average layer's quantized matrices on one rank, before sharding: in all of them, which each pass
    over a micro-batch dequantizes again, and in the largest, as one is dequantized at a time. 0 for matrices that are
    not quantized."""
    if w.quantization == "none":
        return np.zeros(len(c)), np.zeros(len(c))
    common, _ = layer_parameters(w, c)
    return common, w.width * np.maximum(w.ffn, w.heads * w.head_width) / c.tensor


def trained_layer_parameters(w: Workload, c: Candidates) -> tuple[Reals, Reals]:
    """Weights of an average layer that learn on one rank before sharding: (those that expert groups copy, the
    experts')."""
    if w.is_frozen:
        return adapter_parameters(w, c), np.zeros(len(c))
    return layer_parameters(w, c)


def fullest_rank_parameters(
    w: Workload, c: Candidates, layer: tuple[Reals, Reals], tables: tuple[int, int]
) -> tuple[Reals, Reals]:
    """Weights on the rank of a pipeline that holds most of them before sharding, (common, experts'), of layers and
    tables (the embedding, with that of layers' inputs, and the output matrix) that have this many each."""
    common, experts = layer
    held = rank_layers(w, c)
    embedding, head = tables
    together = embedding if w.tied else embedding + head
    both = not w.tied and w.predict_ahead > 0  # the last stage looks tokens up, too
    at_ends = np.where(c.pipeline == 1, together, together if both else max(embedding, head)) / c.tensor
    ends = np.maximum(held.first, held.last) * common + at_ends
    middle = held.middle * common + (held.middle_heads > 0) * head / c.tensor
    return np.maximum(np.maximum(ends, middle), held.fullest * common), held.fullest * experts


def fullest_trained_parameters(w: Workload, c: Candidates) -> tuple[Reals, Reals]:
    """Weights that learn on the rank of a pipeline that holds most of them, (common, experts')."""
    table = w.embedding_parameters
    inputs = 0 if w.is_frozen else w.input_table_parameters
    tables = table * w.embedding_learns + inputs, table * w.head_learns
    return fullest_rank_parameters(w, c, trained_layer_parameters(w, c), tables)


def fullest_held_parameters(w: Workload, c: Candidates) -> Reals:
    """All weights on that rank, adapters and frozen ones included, in numbers as they are multiplied: quantized ones
    count by their bytes."""
    common, experts = (w.matrix_bytes / w.element_bytes * each for each in layer_parameters(w, c))
    tables = w.embedding_parameters + w.input_table_parameters, w.embedding_parameters
    whole = fullest_rank_parameters(w, c, (common + adapter_parameters(w, c), experts), tables)
    return np.add(*whole)
