"""Memory of Muon's update in addition to weights, gradients and moments: pieces and results in transfer, and a batch of
whole matrices (parallel/whole_matrices.py). Activations are freed by then."""

from __future__ import annotations

import numpy as np

from plait.partition.matrix_owners import BATCH_NUMBERS
from plait.planner.problem.candidates import Candidates, Reals
from plait.planner.problem.stage_partition import expert_shard_ranks, layer_parameters, rank_layers
from plait.planner.problem.workload import Workload
from plait.planner.step_time.orthogonalization import layer_matrices, share_away_from_owners

COPIES_OF_A_BATCH = 2
"""A batch, and the result of the next iteration."""


def update_bytes(w: Workload, c: Candidates) -> Reals:
    """Bytes of an update's buffers on the fullest rank, where one rank computes for all copies of a matrix; 0 where
    numbers are updated one by one."""
    if w.orthogonalization is None:
        return np.zeros(len(c))
    stage, layers = c.devices / c.pipeline, rank_layers(w, c).fullest
    common, experts = layer_parameters(w, c)
    held = layers * (common / c.shard + experts / expert_shard_ranks(w, c, c.shard))
    of_others = (stage - 1) / stage
    whole = held * c.shard * c.tensor / stage  # of which this rank is the owner
    away = share_away_from_owners(w, c)
    arrived = np.where(c.shard * c.tensor > 1, whole * of_others * away, 0.0)
    of_others = of_others * np.where(c.shard * c.tensor < stage, 1.0, away)
    batch = np.maximum.reduce([_batch(layers, stage, one) for some in layer_matrices(w) for one in some])
    numbers = np.maximum(arrived + held * of_others + batch, 2 * held * of_others)
    return w.orthogonalization.number_bytes * numbers


def _batch(layers: Reals, stage: Reals, matrices: tuple[int, int, float]) -> Reals:
    """Numbers held while computing with a rank's matrices of one shape."""
    small, large = sorted(matrices[:2])
    own = np.maximum(np.ceil(layers * matrices[2] / stage), 1) * small * large
    return np.minimum(own, max(BATCH_NUMBERS, small * large)) * (COPIES_OF_A_BATCH + 2 * small / large)
