"""How long a step takes, item by item, for many layouts at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.cluster.cluster import Cluster
from plait.planner.problem.candidates import RECOMPUTE, SCHEDULES, Candidates, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import fullest_weights, messages_each_way, micro_batches, stage_layers
from plait.planner.problem.workload import Workload
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.device_time import device_time_of
from plait.planner.step_time.gradient_sync import shared_weights_s, tied_embedding_sync_s
from plait.planner.step_time.launch_overhead import launch_overhead_s
from plait.planner.step_time.measured_network import largest_overlap
from plait.planner.step_time.network_model import (
    collective_s,
    cpu_overhead_s,
    network_of,
    stage_message_s,
    token_exchange_s,
)
from plait.planner.step_time.roofline import LayerTime, local_tokens, sharing_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
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
class _Exposed:
    """One layer's and one micro-batch's communication that arithmetic does not hide, and what it does."""

    tensor: Reals
    context: Reals
    experts: Reals
    hidden: Reals


def step_time(workload: Workload, cluster: Cluster, candidates: Candidates, profile: SoftwareProfile) -> StepTime:
    """Seconds of a step of every candidate on the cluster, its slowest device setting the pace."""
    inputs = CostInputs(
        workload=workload,
        candidates=candidates,
        profile=profile,
        arithmetic=device_time_of(workload, cluster, profile),
        roads=network_of(cluster),
        hidden_at_most=largest_overlap(cluster),
    )
    layer = inputs.arithmetic.layer(candidates)
    again = _again(inputs, layer)
    exposed = _exposed(inputs, layer)
    head = inputs.arithmetic.head(candidates)
    per_layer = layer.forward + layer.backward + again + exposed.tensor + exposed.context + exposed.experts
    held = stage_layers(workload, candidates)
    micros = micro_batches(workload, candidates)
    alone = candidates.pipeline == 1
    busiest = np.where(
        alone, held.most * per_layer + head, np.maximum(held.most * per_layer, held.last * per_layer + head)
    )
    layers = np.where(busiest > held.most * per_layer, held.last, held.most)
    heads = np.where(busiest > held.most * per_layer, head, 0.0)
    host = launch_overhead_s(inputs.arithmetic, candidates, held.most, busiest) + _handling(inputs)
    passes, sent = _passes(inputs, busiest + host)
    sent = sent * profile.calibration.messages
    stage = busiest + host + passes
    whole = np.where(alone, stage, (workload.layers * per_layer + head) + candidates.pipeline * (host + passes))
    # Fuller stages in front set the pace only while those behind them neither fill nor drain.
    later = np.maximum(held.later * per_layer, held.last * per_layer + head)
    eased = np.maximum(busiest - later, 0.0) * np.minimum(held.before_last, micros - 1)
    bubble = np.maximum(_bubble(inputs, stage, whole) - np.where(alone, 0.0, eased), 0.0)
    bubble = bubble + 2 * (candidates.pipeline - 1) * sent  # until the first comes through, and the last comes back
    parameters, gradients, hidden = shared_weights_s(inputs, layer, again, layers, micros)
    gradients = gradients + tied_embedding_sync_s(inputs, held.most * layer.forward, micros)
    optimizer = _optimizer(inputs)
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
    items = {name: micros * value / profile.speed for name, value in busy.items()}
    once = {"parameters": parameters, "gradients": gradients, "bubble": bubble, "optimizer": optimizer}
    items |= {name: value / profile.speed for name, value in once.items()}
    items = {name: value * profile.calibration.message_factor(name) for name, value in items.items()}
    nodes = np.maximum(candidates.devices / inputs.roads.per_node, 1)
    items["waiting"] = sum(items.values()) * profile.straggler_share * np.log2(nodes)
    return StepTime(
        **items, sent=sent, hidden=hidden + micros * layers * exposed.hidden, step_s=np.add.reduce(list(items.values()))
    )


def _again(inputs: CostInputs, layer: LayerTime) -> Reals:
    """What is computed a second time for one layer and micro-batch."""
    recompute = inputs.candidates.recompute
    # Without fused attention only its core is repeated; with it, norms and activations, and of the products a share.
    share = inputs.profile.selective_products
    flash = share * layer.products + max(share, 0.3) * layer.stream
    selective = layer.scores if inputs.workload.attention == "unfused" else flash
    chosen = np.where(recompute == RECOMPUTE.index("selective"), selective, 0.0)
    return np.where(recompute == RECOMPUTE.index("full"), layer.forward, chosen)


def _exposed(inputs: CostInputs, layer: LayerTime) -> _Exposed:
    w, c, profile = inputs.workload, inputs.candidates, inputs.profile
    tokens = local_tokens(w, c)
    full = c.recompute == RECOMPUTE.index("full")
    tensor = (4 + 2 * full) * collective_s(inputs.roads, "stream", w.element_bytes * tokens * w.width, c.tensor, 1)
    # Keys and values travel round the context axis, and back with their gradients.
    keys = 2.0 * w.element_bytes * tokens * c.context * np.maximum(w.kv_heads / c.tensor, 1) * w.head_width
    once = collective_s(inputs.roads, "keys", keys, c.context, c.tensor)
    context = (3 + full) * once
    under = np.minimum(profile.hides_context * (layer.scores + layer.scores_backward), context * inputs.hidden_at_most)
    # Half of the messages, those to the experts, are as narrow as what the experts multiply.
    token_bytes = w.routed_width * (1.5 if w.precision in ("fp8", "fp4") else w.element_bytes)
    inside, between = token_exchange_s(inputs.roads, tokens / c.tensor, token_bytes, w.experts_per_token, c.expert, 1)
    times = (4 + 2 * full) * w.sparse_layers / w.layers
    experts = times * np.maximum(inside, between * (1 - profile.hides_experts))
    left = np.maximum(context - under, 0.0) * (c.context > 1)
    return _Exposed(
        tensor=tensor * (1 - profile.hides_tensor),
        context=left,
        experts=experts,
        hidden=tensor * profile.hides_tensor + (context - left) + times * np.maximum(inside, between) - experts,
    )


def _passes(inputs: CostInputs, busy: Reals) -> tuple[Reals, Reals]:
    """Exposed sends between stages for one micro-batch, there and back; and one that is not, where it is sent ahead."""
    c, piped = inputs.candidates, inputs.candidates.pipeline > 1
    once = stage_message_s(inputs.roads, _stream_bytes(inputs), c.pipeline, c.devices // c.pipeline)
    if inputs.profile.sends == "by share":
        return np.where(piped, 2 * c.virtual * once * (1 - inputs.profile.hides_pipeline), 0.0), np.zeros(len(c))
    # At the least, what a wire takes longer for one micro-batch after the other than the ranks do.
    left = np.maximum(messages_each_way(c.pipeline, c.virtual) * once - busy, 0.0)
    return np.where(piped, left, 0.0), np.where(piped, once, 0.0)


def _handling(inputs: CostInputs) -> Reals:
    """What the messages of one micro-batch cost a rank's processor: two come and two go for each of its stages, but for
    the first and the last of all, and of two ranks each has one of these."""
    c = inputs.candidates
    if not inputs.profile.handles_messages:
        return np.zeros(len(c))
    messages = np.where(c.pipeline == 2, 4 * c.virtual - 2, 4 * c.virtual) * (c.pipeline > 1)
    return messages * cpu_overhead_s(inputs.roads, _stream_bytes(inputs), c.devices // c.pipeline)


def _stream_bytes(inputs: CostInputs) -> Reals:
    """Of the stream of one micro-batch, as stages send it."""
    w, c = inputs.workload, inputs.candidates
    split = np.where(c.sequence_parallel > 0, c.tensor, 1)
    return w.element_bytes * local_tokens(w, c) * w.width / split


def _bubble(inputs: CostInputs, stage: Reals, whole: Reals) -> Reals:
    """Waiting of the busiest stage: the others' work on one micro-batch, cut into the chunks of an interleaving."""
    c = inputs.candidates
    wait = np.maximum(whole - stage, 0.0) / c.virtual
    # Weight gradients fill two thirds of it where they are put off (Qi et al. 2023, ZB-H1).
    return np.where(c.schedule == SCHEDULES.index("zero-bubble"), wait / 3, wait)


def _optimizer(inputs: CostInputs) -> Reals:
    c = inputs.candidates
    common, experts = fullest_weights(inputs.workload, c)
    split = np.where(c.shard_what > 0, sharing_ranks(c, inputs.profile), 1)
    return inputs.arithmetic.update((common + experts) / split)
