"""How long a step takes, item by item, for many layouts at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.cluster.cluster import Cluster
from plait.plan.arithmetic import Arithmetic, arithmetic
from plait.plan.candidates import RECOMPUTE, SCHEDULES, SHARD_WHAT, Candidates, Reals
from plait.plan.clocked import hidden_at_most
from plait.plan.collectives import Collective, Roads, collective_s, exchange_s, pass_s, roads
from plait.plan.compute import LayerTime, local_tokens, sharing_ranks
from plait.plan.host import host_s
from plait.plan.stack import Stack
from plait.plan.stages import fullest_weights, messages_each_way, micro_batches, stage_layers
from plait.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a step, arrays over candidates; the items of the busiest device add up to `step_s`.

    Communication is given as what is exposed; `hidden` is what runs under arithmetic.
    """

    products: Reals
    scores: Reals
    stream: Reals
    head: Reals
    recompute: Reals
    tensor: Reals
    context: Reals
    experts: Reals
    passes: Reals
    parameters: Reals
    gradients: Reals
    bubble: Reals
    waiting: Reals
    """For the slowest node, beyond what its speed explains."""
    host: Reals
    optimizer: Reals
    sent: Reals
    """One message to the next stage of a pipeline, where it travels while the next micro-batch is computed."""
    hidden: Reals
    step_s: Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What every item is priced with."""

    workload: Workload
    candidates: Candidates
    stack: Stack
    arithmetic: Arithmetic
    roads: Roads
    hidden_at_most: float
    """Share of a message that arithmetic may hide, as a probe found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exposed:
    """One layer's and one micro-batch's communication that arithmetic does not hide, and what it does."""

    tensor: Reals
    context: Reals
    experts: Reals
    hidden: Reals


def timing(workload: Workload, cluster: Cluster, candidates: Candidates, stack: Stack) -> Timing:
    """Seconds of a step of every candidate on the cluster, its slowest device setting the pace."""
    scene = _Scene(
        workload=workload,
        candidates=candidates,
        stack=stack,
        arithmetic=arithmetic(workload, cluster, stack),
        roads=roads(cluster),
        hidden_at_most=hidden_at_most(cluster),
    )
    layer = scene.arithmetic.layer(candidates)
    again = _again(scene, layer)
    exposed = _exposed(scene, layer)
    head = scene.arithmetic.head(candidates)
    per_layer = layer.forward + layer.backward + again + exposed.tensor + exposed.context + exposed.experts
    held = stage_layers(workload, candidates)
    micros = micro_batches(workload, candidates)
    alone = candidates.pipeline == 1
    busiest = np.where(
        alone, held.most * per_layer + head, np.maximum(held.most * per_layer, held.last * per_layer + head)
    )
    layers = np.where(busiest > held.most * per_layer, held.last, held.most)
    heads = np.where(busiest > held.most * per_layer, head, 0.0)
    host = host_s(scene.arithmetic, candidates, held.most, busiest)
    passes, sent = _passes(scene, busiest + host)
    sent = sent * stack.calibration.messages
    stage = busiest + host + passes
    whole = np.where(alone, stage, (workload.layers * per_layer + head) + candidates.pipeline * (host + passes))
    # Fuller stages in front set the pace only while those behind them neither fill nor drain.
    later = np.maximum(held.later * per_layer, held.last * per_layer + head)
    eased = np.maximum(busiest - later, 0.0) * np.minimum(held.behind, micros - 1)
    bubble = np.maximum(_bubble(scene, stage, whole) - np.where(alone, 0.0, eased), 0.0)
    bubble = bubble + 2 * (candidates.pipeline - 1) * sent  # until the first comes through, and the last comes back
    parameters, gradients, hidden = _data(scene, layer, again, layers, micros)
    gradients = gradients + _ends(scene)
    optimizer = _optimizer(scene)
    busy = {
        "products": layers * (layer.products + layer.products_backward),
        "scores": layers * (layer.scores + layer.scores_backward),
        "stream": layers * (layer.stream + layer.stream_backward),
        "head": heads,
        "recompute": layers * again,
        "tensor": layers * exposed.tensor,
        "context": layers * exposed.context,
        "experts": layers * exposed.experts,
        "passes": passes,
        "host": host,
    }
    items = {name: micros * value / stack.speed for name, value in busy.items()}
    once = {"parameters": parameters, "gradients": gradients, "bubble": bubble, "optimizer": optimizer}
    items |= {name: value / stack.speed for name, value in once.items()}
    items = {name: value * stack.calibration.of_messages(name) for name, value in items.items()}
    nodes = np.maximum(candidates.devices / scene.roads.per_node, 1)
    items["waiting"] = sum(items.values()) * stack.straggling * np.log2(nodes)
    return Timing(
        **items, sent=sent, hidden=hidden + micros * layers * exposed.hidden, step_s=np.add.reduce(list(items.values()))
    )


def _again(scene: _Scene, layer: LayerTime) -> Reals:
    """What is computed a second time for one layer and micro-batch."""
    recompute = scene.candidates.recompute
    # Without fused attention only its core is repeated; with it, norms and activations, and of the products a share.
    share = scene.stack.selective_products
    flash = share * layer.products + max(share, 0.3) * layer.stream
    selective = layer.scores if scene.workload.attention == "unfused" else flash
    chosen = np.where(recompute == RECOMPUTE.index("selective"), selective, 0.0)
    return np.where(recompute == RECOMPUTE.index("full"), layer.forward, chosen)


def _exposed(scene: _Scene, layer: LayerTime) -> _Exposed:
    w, c, stack = scene.workload, scene.candidates, scene.stack
    tokens = local_tokens(w, c)
    full = c.recompute == RECOMPUTE.index("full")
    tensor = (4 + 2 * full) * collective_s(scene.roads, "stream", w.number_bytes * tokens * w.width, c.tensor, 1)
    # Keys and values travel round the context axis, and back with their gradients.
    keys = 2.0 * w.number_bytes * tokens * c.context * np.maximum(w.kv_heads / c.tensor, 1) * w.head_width
    once = collective_s(scene.roads, "keys", keys, c.context, c.tensor)
    context = (3 + full) * once
    under = np.minimum(stack.hides_context * (layer.scores + layer.scores_backward), context * scene.hidden_at_most)
    # Half of the messages, those to the experts, are as narrow as what the experts multiply.
    token_bytes = w.routed_width * (1.5 if w.precision in ("fp8", "fp4") else w.number_bytes)
    inside, between = exchange_s(scene.roads, tokens / c.tensor, token_bytes, w.experts_per_token, c.expert, 1)
    times = (4 + 2 * full) * w.sparse_layers / w.layers
    experts = times * np.maximum(inside, between * (1 - stack.hides_experts))
    left = np.maximum(context - under, 0.0) * (c.context > 1)
    return _Exposed(
        tensor=tensor * (1 - stack.hides_tensor),
        context=left,
        experts=experts,
        hidden=tensor * stack.hides_tensor + (context - left) + times * np.maximum(inside, between) - experts,
    )


def _passes(scene: _Scene, busy: Reals) -> tuple[Reals, Reals]:
    """Exposed sends between stages for one micro-batch, there and back; and one that is not, where it is sent ahead."""
    w, c = scene.workload, scene.candidates
    split = np.where(c.sequence_parallel > 0, c.tensor, 1)
    stream_bytes = w.number_bytes * local_tokens(w, c) * w.width / split
    once = pass_s(scene.roads, stream_bytes, c.devices // c.pipeline)
    piped = c.pipeline > 1
    if scene.stack.sends == "by share":
        return np.where(piped, 2 * c.virtual * once * (1 - scene.stack.hides_pipeline), 0.0), np.zeros(len(c))
    # At the least, what a wire takes longer for one micro-batch after the other than the ranks do.
    return np.where(piped, np.maximum(messages_each_way(c.pipeline, c.virtual) * once - busy, 0.0), 0.0), np.where(
        piped, once, 0.0
    )


def _bubble(scene: _Scene, stage: Reals, whole: Reals) -> Reals:
    """Waiting of the busiest stage: the others' work on one micro-batch, cut into the chunks of an interleaving."""
    c = scene.candidates
    wait = np.maximum(whole - stage, 0.0) / c.virtual
    # Weight gradients fill two thirds of it where they are put off (Qi et al. 2023, ZB-H1).
    return np.where(c.schedule == SCHEDULES.index("zero-bubble"), wait / 3, wait)


def _data(scene: _Scene, layer: LayerTime, again: Reals, layers: Reals, micros: Reals) -> tuple[Reals, Reals, Reals]:
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
    one_layer = np.maximum(np.where(c.pipeline * layers > 0, 1 / np.maximum(layers, 1), 1.0), 1 - scene.hidden_at_most)
    each_forward = np.maximum(gather - window * forward, gather * one_layer)
    each_backward = np.maximum(gather + scatter - window * backward, scatter * one_layer)
    late = np.maximum(scatter + summed - stack.hides_gradients * backward, (scatter + summed) * one_layer)
    early = np.maximum(gather - stack.hides_updates * forward, gather * one_layer)
    parameters = np.where(fully, micros * each_forward, np.where(c.shard_what > 0, early, 0.0))
    gradients = np.where(fully, micros * each_backward + summed * (1 - stack.hides_gradients), late)
    gradients = np.where(halfway, gradients + (micros - 1) * np.maximum(scatter - window * backward, 0.0), gradients)
    total = np.where(fully, micros * (2 * gather + scatter) + summed, gather + scatter + summed)
    return parameters, gradients, np.maximum(total - parameters - gradients, 0.0)


def _ends(scene: _Scene) -> Reals:
    """The sum of a tied head's gradient with the embedding's, which another stage has: the embedding's is the very last
    of all gradients, so that nothing hides the sum."""
    w, c = scene.workload, scene.candidates
    table = scene.stack.gradient_sent_bytes * w.embedding_weights / c.tensor
    apart = c.devices // c.pipeline * (c.pipeline - 1)
    summed = collective_s(scene.roads, "reduce", table, np.where(c.pipeline > 1, 2, 1), np.maximum(apart, 1))
    return summed * (w.tied and c.pipeline > 1)


def _summed(scene: _Scene, common: Reals, experts: Reals, pieces: Reals) -> Reals:
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


def _optimizer(scene: _Scene) -> Reals:
    c = scene.candidates
    common, experts = fullest_weights(scene.workload, c)
    split = np.where(c.shard_what > 0, sharing_ranks(c, scene.stack), 1)
    return scene.arithmetic.update((common + experts) / split)
