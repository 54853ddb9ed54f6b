"""The cost of Muon's update, apart from passing over weights: the products that orthogonalize whole matrices, and the
transfer of their pieces to the rank that owns a matrix and back (parallel/whole_matrices.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.partition.matrix_owners import NEWTON_SCHULZ_STEPS, CopiesCompute
from plait.planner.problem.candidates import SHARDED_STATES, Candidates, Reals
from plait.planner.problem.stage_partition import expert_shard_ranks, layer_parameters, rank_layers
from plait.planner.problem.workload import Workload
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.network_model import collective_s

Matrices = Sequence[tuple[int, int, float]]
"""Both sides of matrices, and their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrthogonalizationTime:
    """Seconds of a step, arrays over candidates; zeros without Muon."""

    one_for_all: Reals
    """With one owner among all ranks that have a matrix."""
    each_for_itself: Reals
    """With an owner in each copy of a matrix; infinite if devices differ, since their copies would drift apart."""

    @property
    def step_s(self) -> Reals:
        """The cheaper of the two."""
        return np.minimum(self.one_for_all, self.each_for_itself)

    def copies_compute(self, index: int) -> CopiesCompute:
        """The cheaper way for a candidate; if they are equal, the one that works on unequal devices."""
        return "each for itself" if self.each_for_itself[index] < self.one_for_all[index] else "one for all"


def orthogonalization_time(inputs: CostInputs) -> OrthogonalizationTime:
    """Time of Muon's products and messages, for both ways of computing for copies of a matrix.

    An owner's share of the products is the mean: they are balanced. It receives as much as it sends.
    """
    w, c = inputs.workload, inputs.candidates
    if w.orthogonalization is None:
        return OrthogonalizationTime(one_for_all=np.zeros(len(c)), each_for_itself=np.zeros(len(c)))
    layers, stage, pieces = rank_layers(w, c).fullest, c.devices / c.pipeline, 1.0 * c.shard * c.tensor
    of_expert = c.expert * expert_shard_ranks(w, c, c.shard) * c.tensor
    common_s, experts_s = (layers * _products_s(inputs, some) for some in layer_matrices(w))
    common, experts = layer_parameters(w, c)
    held = layers * (common / c.shard + experts / expert_shard_ranks(w, c, c.shard))
    held_bytes, away = w.orthogonalization.number_bytes * held, share_away_from_owners(w, c)

    def moved_s(numbers_bytes: Reals, ranks: Any) -> Reals:
        stride = np.where((ranks < stage) & (c.tensor == 1), c.context, 1)
        return np.where(ranks > 1, collective_s(inputs.network, "gather", numbers_bytes, ranks, stride), 0.0)

    there = (pieces > 1) * moved_s(held_bytes * away, stage)
    back = moved_s(held_bytes * np.where(pieces < stage, 1.0, away), stage)
    alike = len({(island.device.name, island.speed) for island in inputs.cluster.islands}) == 1
    each = common_s / pieces + experts_s / of_expert + 2 * moved_s(held_bytes * away, pieces)
    return OrthogonalizationTime(
        one_for_all=(common_s + experts_s) / stage + there + back,
        each_for_itself=each if alike else np.full(len(c), np.inf),
    )


def share_away_from_owners(w: Workload, c: Candidates) -> Reals:
    """The approximate share of pieces that are not on the rank that owns their matrix, if there are many ranks: all,
    except where ranges of buckets are split, which contain small matrices whole."""
    largest = max(one * other for some in layer_matrices(w) for one, other, _ in some)
    ranges = (c.shard_what == SHARDED_STATES.index("optimizer")) & (c.tensor == 1)
    return np.where(ranges, np.minimum(4.0 * largest * c.shard / USUAL_BUCKET_BYTES, 1.0), 1.0)


USUAL_BUCKET_BYTES = 8 * 2**20
"""For a bucket of gradients (parallel/gradient_buckets.py)."""


def layer_matrices(w: Workload) -> tuple[Matrices, Matrices]:
    """The matrices of an average layer that Muon updates: (those of all, the experts')."""
    queries, keys, sparse = w.heads * w.head_width, w.kv_heads * w.head_width, w.moe_layers / w.layers
    if w.latent is not None:
        attention = [(inner, columns, 1.0) for inner, columns, _ in w.latent.products]
    else:
        attention = [(w.width, queries, 2.0), (w.width, keys, 2.0)]
    dense = (w.width, w.ffn, w.feedforward_matrices * (1 - sparse))
    shared = (w.width, w.shared_ffn, w.feedforward_matrices * sparse)
    experts = (w.width, w.expert_ffn, w.feedforward_matrices * sparse * w.experts)
    return [one for one in (*attention, dense, shared) if one[1] and one[2]], [one for one in (experts,) if one[2]]


def _products_s(inputs: CostInputs, matrices: Matrices) -> Reals:
    """Seconds of orthogonalizing these on one device."""
    assert inputs.workload.orthogonalization is not None
    found = np.zeros(len(inputs.candidates))
    for one, other, number in matrices:
        small, large = min(one, other), max(one, other)
        for inner, columns in ((large, small), (small, small), (small, large)):
            found = found + NEWTON_SCHULZ_STEPS * inputs.device_time.product_s(small, inner, columns, number)
    return found / inputs.workload.orthogonalization.speed
