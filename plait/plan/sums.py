"""What is waited for of weights and gradients that several ranks hold: gathers, scatters and sums, once a step."""

from __future__ import annotations

import numpy as np

from plait.plan.candidates import SCHEDULES, SHARD_WHAT, Reals
from plait.plan.collectives import Collective, collective_s
from plait.plan.compute import LayerTime, sharing_ranks
from plait.plan.schedule import announces_last
from plait.plan.situation import Situation
from plait.plan.stages import fullest_weights

TOUCHED = 0.5
"""Of a micro-batch's tokens, those that are the first of their kind in it: of 256, 512 and 1,024 tokens of Shakespeare
with 2,048 kinds 0.58, 0.49 and 0.39."""

LAST_BYTES = 2**20
"""Of the last bucket of gradients, at least (parallel/buckets.py)."""
ANNOUNCING = [place for place, schedule in enumerate(SCHEDULES) if announces_last(schedule, micros=2)]


def shared_weights_s(
    scene: Situation, layer: LayerTime, again: Reals, layers: Reals, micros: Reals
) -> tuple[Reals, Reals, Reals]:
    """Exposed gathers of parameters, exposed gradient sums and what of both is hidden, per step."""
    c, stack = scene.candidates, scene.stack
    forward, backward = layers * layer.forward, layers * (layer.backward + again)
    common, experts = fullest_weights(scene.workload, c)
    stride, sharded = c.tensor, sharing_ranks(c, stack)
    group = np.where(c.shard_what > 0, sharded, 1)
    one = common + experts
    pieces = layers * stack.layer_pieces
    apart = stride * c.context // (sharded // c.shard)  # of two ranks that share the shards of a weight
    fully = c.shard_what == SHARD_WHAT.index("parameters")

    def moved(whole: Collective, ahead: Collective, number_bytes: int) -> Reals:
        """Layer by layer by the library; else from rank to rank, once a step."""
        by_layer, once = (
            collective_s(scene.roads, kind, number_bytes * one, group, apart, pieces) for kind in (whole, ahead)
        )
        return np.where(fully, by_layer, once)

    gather = moved("gather", "spread", scene.workload.number_bytes)
    scatter = moved("scatter", "swap", stack.gradient_sent_bytes)
    scatter = scatter * np.where(stack.sums_whole & (c.shard_what < SHARD_WHAT.index("gradients")), 2.0, 1.0)
    summed = _summed(scene, common / group, experts / group, pieces)
    window = stack.hides_parameters
    halfway = c.shard_what == SHARD_WHAT.index("gradients")
    # Parameters sharded: gathered for each pass of each micro-batch, gradients scattered after each.
    one_layer = np.maximum(1 / np.maximum(layers, 1), 1 - scene.hidden_at_most)
    each_forward = np.maximum(gather - window * forward, gather * one_layer)
    each_backward = np.maximum(gather + scatter - window * backward, scatter * one_layer)
    last = np.maximum(_last_bucket(scene, one, layers), 1 - scene.hidden_at_most)
    late = np.maximum(scatter + summed - stack.hides_gradients * backward, (scatter + summed) * last)
    early = np.maximum(gather - stack.hides_updates * forward, gather * last)
    parameters = np.where(fully, micros * each_forward, np.where(c.shard_what > 0, early, 0.0))
    gradients = np.where(fully, micros * each_backward + summed * (1 - stack.hides_gradients), late)
    gradients = np.where(halfway, gradients + (micros - 1) * np.maximum(scatter - window * backward, 0.0), gradients)
    total = np.where(fully, micros * (2 * gather + scatter) + summed, gather + scatter + summed)
    return parameters, gradients, np.maximum(total - parameters - gradients, 0.0)


def ends_s(scene: Situation, last_backward: Reals, micros: Reals) -> Reals:
    """The sum of a tied head's gradient with the embedding's, which another stage has: the embedding's is the very last
    of all gradients, so that nothing hides the sum but what may travel before (parallel/ends.py)."""
    w, c = scene.workload, scene.candidates
    table = scene.stack.gradient_sent_bytes * w.embedding_weights / c.tensor
    apart = c.devices // c.pipeline * (c.pipeline - 1)
    summed = collective_s(scene.roads, "reduce", table, np.where(c.pipeline > 1, 2, 1), np.maximum(apart, 1))
    ahead = scene.stack.ends_ahead & (c.batch_parts * c.context == 1) & (micros > 1) & np.isin(c.schedule, ANNOUNCING)
    rows = np.minimum(TOUCHED * c.micro_sequences * w.sequence * w.width / w.embedding_weights, 1.0)
    left = np.maximum(summed - last_backward, 0.0) + rows * summed
    return np.where(ahead, left, summed) * (w.tied and c.pipeline > 1)


def _last_bucket(scene: Situation, weights: Reals, layers: Reals) -> Reals:
    """Share of a rank's weights whose gradients are done only when the backward pass has ended, and that are waited for
    before the next forward pass begins: the embedding, or of a stage without one a layer."""
    c, w = scene.candidates, scene.workload
    table = np.where(c.pipeline == 1, w.embedding_weights / c.tensor / weights, 1 / np.maximum(layers, 1))
    return np.minimum(np.maximum(table, LAST_BYTES / (scene.stack.gradient_bytes * weights)), 1.0)


def _summed(scene: Situation, common: Reals, experts: Reals, pieces: Reals) -> Reals:
    """Sums of gradients over the ranks that hold the same: copies of a shard, or everyone where nothing is sharded."""
    c, stack = scene.candidates, scene.stack
    sharded = sharing_ranks(c, stack)
    split = c.shard_what > 0
    copies = np.where(split, c.replicate, c.replicate * c.shard * c.context)
    far = np.where(split, c.tensor * c.shard * c.context, c.tensor)
    summed = collective_s(scene.roads, "reduce", stack.gradient_sent_bytes * common, copies, far, pieces)
    few = np.maximum(copies / c.expert, 1)
    summed += collective_s(scene.roads, "reduce", stack.gradient_sent_bytes * experts, few, far * c.expert, pieces)
    # The pieces of a sequence, where each holds whole what the others hold.
    near = np.where(split, c.shard * c.context // sharded, 1)
    return summed + collective_s(
        scene.roads, "reduce", stack.gradient_sent_bytes * (common + experts), near, c.tensor, pieces
    )
