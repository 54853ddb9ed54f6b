"""Exposed synchronization of weights and gradients over ranks: all-gathers, reduce-scatters and all-reduces."""

from __future__ import annotations

import numpy as np

from plait.planner.problem.candidates import SCHEDULES, SHARDED_STATES, Reals
from plait.planner.problem.software_profile import keeps_weights_gathered, splits_weights
from plait.planner.problem.stage_partition import (
    data_ranks_of_expert_group,
    expert_shard_ranks,
    fewer_expert_copies,
    rank_layers,
)
from plait.planner.problem.trained_weights import (
    fullest_held_parameters,
    fullest_trained_parameters,
    repeated_adapter_parameters,
)
from plait.planner.problem.workload import expected_distinct_tokens
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.network_model import Collective, collective_s, stage_message_s
from plait.planner.step_time.roofline import LayerTime, local_tokens, shard_group_size

EXACT_BYTES = 4
"""Bytes of a number that is gathered as it is kept, in float32."""
LAST_BUCKET_BYTES = 2**20
"""Smallest size in bytes of the last gradient bucket (parallel/gradient_buckets.py)."""


def data_parallel_sync_s(
    inputs: CostInputs, layer: LayerTime, recompute_s: Reals, layers: Reals, n_microbatches: Reals
) -> tuple[Reals, Reals, Reals]:
    """Exposed gathers of parameters, exposed gradient sums and what of both is hidden, per step.

    What runs under arithmetic slows it down: collectives compute, too, on units that the products then lack. That
    counts with the gradient sums.
    """
    c, profile = inputs.candidates, inputs.profile
    forward, backward = layers * layer.forward, layers * (layer.backward + recompute_s)
    common, experts = fullest_trained_parameters(inputs.workload, c)
    stride, sharded = c.tensor, shard_group_size(c, profile)
    group = np.where(c.shard_what > 0, sharded, 1)
    one = common + experts
    pieces = layers * profile.other.layer_pieces
    apart = stride * c.context // (sharded // c.shard)  # distance between two ranks of a shard group
    fully, stays = splits_weights(c, profile), keeps_weights_gathered(c, profile)

    over = data_ranks_of_expert_group(inputs.workload, c)
    expert_group = expert_shard_ranks(inputs.workload, c, group)

    def moved(kind: Collective, number_bytes: int, numbers: Reals) -> Reals:
        whole = collective_s(inputs.network, kind, number_bytes * numbers, group, apart, pieces)
        if (c.expert == 1).all():
            return whole
        # Experts that ranks share out have fewer copies, which stand further apart.
        rest = collective_s(inputs.network, kind, number_bytes * (numbers - experts), group, apart, pieces)
        own = collective_s(inputs.network, kind, number_bytes * experts, expert_group, apart * over, pieces)
        return np.where(over > 1, rest + own, whole)

    # Sharded parameters are gathered with the frozen ones; after an update those that learn.
    gathered = np.where(fully, fullest_held_parameters(inputs.workload, c), one) if inputs.workload.is_frozen else one
    gather = moved("gather", inputs.workload.element_bytes, gathered)
    scatter = moved("scatter", profile.gradient_message_bytes, one)
    scatter = scatter * np.where(
        profile.other.all_reduces_shards & (c.shard_what < SHARDED_STATES.index("gradients")), 2.0, 1.0
    )
    summed = _all_reduce_s(inputs, common / group, experts / expert_group, pieces)
    window = profile.hides_parameters
    halfway = (c.shard_what == SHARDED_STATES.index("gradients")) & ~fully
    # Parameters sharded: gathered for each pass of each micro-batch, gradients scattered after each.
    one_layer = np.maximum(1 / np.maximum(layers, 1), 1 - inputs.largest_overlap)
    passing, at_first, once = gather, np.zeros(len(c)), np.zeros(len(c))
    if profile.lasting_weights != "for each pass":
        tables_last = stays | (profile.lasting_weights == "once a step")
        embedding, head = (np.where(tables_last, one, 0.0) for one in _lasting_tables(inputs))
        layers_s = moved("gather", inputs.workload.element_bytes, gathered - embedding - head)
        passing = np.where(stays, 0.0, layers_s)
        # The first forward begins with the embedding; all else travels under it.
        at_first = collective_s(inputs.network, "gather", EXACT_BYTES * embedding, group, apart, 1.0)
        head_bytes = inputs.workload.element_bytes if inputs.workload.rounds_gathered_head else EXACT_BYTES
        head_s = collective_s(inputs.network, "gather", head_bytes * head, group, apart, 1.0)
        once = np.where(tables_last, at_first + head_s, 0.0) + np.where(stays, layers_s, 0.0)
        first_layers_s = np.maximum(layers_s - window * forward, layers_s * one_layer)
        at_first = np.where(tables_last, at_first, 0.0) + np.where(stays, first_layers_s, 0.0)
    each_forward = np.maximum(passing - window * forward, passing * one_layer)
    if profile.hides_scatters:
        each_backward = np.maximum(passing + scatter - window * backward, scatter * one_layer)
    else:
        each_backward = scatter + np.maximum(passing - window * backward, passing * one_layer)
    last = np.maximum(_last_bucket_share(inputs, one, layers), 1 - inputs.largest_overlap)
    late = np.maximum(scatter + summed - profile.hides_gradients * backward, (scatter + summed) * last)
    early = np.maximum(gather - profile.hides_updates * forward, gather * last)
    sums = np.where(c.sums_once, 1.0, n_microbatches)
    parameters = np.where(fully, n_microbatches * each_forward + at_first, np.where(c.shard_what > 0, early, 0.0))
    gradients = np.where(fully, sums * each_backward + summed * (1 - profile.hides_gradients), late)
    gradients = np.where(
        halfway, gradients + (n_microbatches - 1) * np.maximum(scatter - window * backward, 0.0), gradients
    )
    total = np.where(fully, n_microbatches * 2 * passing + sums * scatter + once + summed, gather + scatter + summed)
    hidden = np.maximum(total - parameters - gradients, 0.0)
    slowed = inputs.device_time.rates.kernels.message_units if inputs.network.measured is None else 0.0
    return parameters, gradients + slowed * hidden, hidden


def _lasting_tables(inputs: CostInputs) -> tuple[Reals, Reals]:
    """Numbers of the embedding and of an output matrix of its own on a rank, where it has no pipeline to keep all
    else gathered, too."""
    w, c = inputs.workload, inputs.candidates
    table = np.where(c.pipeline == 1, w.embedding_parameters / c.tensor, 0.0)
    return table, 0.0 * table if w.tied else table


def tied_embedding_sync_s(inputs: CostInputs, forward_s: Reals, n_microbatches: Reals) -> Reals:
    """Seconds per step of keeping a tied head and its embedding, on two stages, the same, and whatever other tables
    stand on several stages.

    The embedding's gradient is the very last of all, so nothing hides a sum of both. Where one end keeps the table
    (parallel/tied_embedding.py), the exposed messages are the rows of the first micro-batch and the gradients
    of the last one; the other rows travel before the first gradient of a stage, which comes after `forward_s`, of one
    stage and micro-batch, has passed through all stages.
    """
    w, c, profile = inputs.workload, inputs.candidates, inputs.profile
    table = profile.gradient_message_bytes * w.embedding_parameters / c.tensor
    apart = np.maximum(c.devices // c.pipeline * (c.pipeline - 1), 1)
    summed = collective_s(inputs.network, "reduce", table, np.where(c.pipeline > 1, 2, 1), apart)
    if not w.embedding_learns:
        return 0.0 * summed
    if w.heads_after or w.predict_ahead:
        # Tied, all that look up or score share one table; else the output matrix has its ranks, and the embedding.
        middle, both = len(w.heads_after), 2 if w.predict_ahead else 1
        sharing = [2 + middle] if w.tied else [1 + middle, both]
        return np.add.reduce(
            [collective_s(inputs.network, "reduce", table, np.minimum(some, c.pipeline), apart) for some in sharing]
        )
    if not (profile.keeps_tied_table_once and w.tied):
        return summed * (w.tied and c.pipeline > 1)
    once, every = (
        stage_message_s(inputs.network, table * expected_distinct_tokens(tokens, w.vocabulary) / w.vocabulary, 2, apart)
        for tokens in (local_tokens(w, c), local_tokens(w, c) * n_microbatches)
    )
    filling = forward_s * np.where(c.schedule == SCHEDULES.index("gpipe"), n_microbatches, c.pipeline)
    few = 2 * once + np.maximum(every - once - filling, 0.0)
    return np.where(c.data_parallel_degree * c.context == 1, few, summed) * (c.pipeline > 1)


def _last_bucket_share(inputs: CostInputs, weights: Reals, layers: Reals) -> Reals:
    """Share of a rank's weights whose gradients are done only when the backward pass has ended, and that are waited for
    before the next forward pass begins: the embedding, or of a stage without one a layer."""
    c, w = inputs.candidates, inputs.workload
    table = np.where(c.pipeline == 1, w.embedding_parameters / c.tensor / weights, 1 / np.maximum(layers, 1))
    table = table if w.embedding_learns else 1 / np.maximum(layers, 1)
    return np.minimum(np.maximum(table, LAST_BUCKET_BYTES / (inputs.profile.gradient_bytes * weights)), 1.0)


def _all_reduce_s(inputs: CostInputs, common: Reals, experts: Reals, pieces: Reals) -> Reals:
    """Sums of gradients over the ranks that hold the same: copies of a shard, or everyone where nothing is sharded."""
    c, profile = inputs.candidates, inputs.profile
    sharded = shard_group_size(c, profile)
    split = c.shard_what > 0
    copies = np.where(split, c.replicate, c.replicate * c.shard * c.context)
    far = np.where(split, c.tensor * c.shard * c.context, c.tensor)
    summed = collective_s(inputs.network, "reduce", profile.gradient_message_bytes * common, copies, far, pieces)
    # Context ranks that hold the same weights or the same shard.
    near = np.where(split, c.shard * c.context // sharded, 1)
    fewer, group = fewer_expert_copies(inputs.workload, c), np.where(split, sharded, 1)
    few = np.maximum(copies * group * near / fewer / expert_shard_ranks(inputs.workload, c, group), 1)
    beyond = np.maximum(fewer / (group * near), 1)  # ranks of an expert group that are no ranks of one shard group
    summed += collective_s(
        inputs.network, "reduce", profile.gradient_message_bytes * experts, few, far * beyond, pieces
    )
    if inputs.workload.is_frozen:  # one of an adapter's two weights is whole on each rank of a tensor group
        own = rank_layers(inputs.workload, c).fullest * repeated_adapter_parameters(inputs.workload)
        summed += collective_s(inputs.network, "reduce", profile.gradient_message_bytes * own, c.tensor, 1, pieces)
    if (latent := inputs.workload.latent) is not None:  # so are its down-projections
        own = rank_layers(inputs.workload, c).fullest * latent.whole_weights
        summed += collective_s(inputs.network, "reduce", profile.gradient_message_bytes * own, c.tensor, 1, pieces)
    return summed + collective_s(
        inputs.network, "reduce", profile.gradient_message_bytes * common, near, c.tensor, pieces
    )
