"""How long a step takes, item by item, for many layouts at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.planner.problem.candidates import RECOMPUTE_MODES, SCHEDULES, Counts, Reals
from plait.planner.problem.stage_partition import RankLayers, expert_shard_ranks, micro_batches_per_step, rank_layers
from plait.planner.problem.trained_weights import fullest_trained_parameters
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.expert_traffic import exchanges, expert_all_to_all_s
from plait.planner.step_time.gradient_sync import data_parallel_sync_s, tied_embedding_sync_s
from plait.planner.step_time.launch_overhead import launch_overhead_s
from plait.planner.step_time.network_model import collective_s
from plait.planner.step_time.orthogonalization import orthogonalization_time
from plait.planner.step_time.roofline import LayerTime, local_tokens, shard_group_size
from plait.planner.step_time.stage_messages import message_cpu_s, stage_sends


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
    """Waiting for stragglers: random delays of the slowest node, beyond its constant speed."""
    host: Reals
    optimizer: Reals
    stage_message: Reals
    """One message to the next stage of a pipeline, where it travels while the next micro-batch is computed; the mean
    over the pipeline's hops."""
    slowest_stage_message: Reals
    """One message over the slowest hop, which no micro-batch can pass faster."""
    hidden: Reals
    hidden_sync: Reals
    """The part of it that gathers parameters and sums gradients."""
    busiest_layers: Reals
    """Layers on the busiest device, those for prediction ahead included."""
    step_s: Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExposedCommunication:
    """Exposed communication of one layer and one micro-batch, in seconds by axis; `hidden` is what arithmetic hides."""

    tensor: Reals
    context: Reals
    experts: Reals
    hidden: Reals


def estimate_step_time(inputs: CostInputs) -> StepTime:
    """Seconds of a step of every candidate; all devices wait for the slowest one."""
    workload, candidates, profile = inputs.workload, inputs.candidates, inputs.profile
    layer = inputs.device_time.layer_time(candidates)
    again = _recompute_s(inputs, layer)
    exposed = _exposed_communication(inputs, layer)
    head = inputs.device_time.head_s(candidates)
    per_layer = layer.forward + layer.backward + again + exposed.tensor + exposed.context + exposed.experts
    held = rank_layers(workload, candidates)
    micros = micro_batches_per_step(workload, candidates)
    alone = candidates.pipeline == 1
    busiest, layers, heads = _busiest_rank(held, per_layer, head, alone)
    end = held.last * per_layer + held.last_heads * head
    host = launch_overhead_s(inputs.device_time, candidates, held.fullest, busiest) + message_cpu_s(inputs)
    sends = stage_sends(inputs, busiest + host, per_layer, head)
    stage = busiest + host + sends.exposed
    through = (
        workload.layers_and_depths * per_layer
        + workload.heads_in_all * head
        + candidates.pipeline * (host + sends.mean_exposed)
    )
    whole = np.where(alone, stage, through)
    # Fuller stages in front set the pace only while those behind them neither fill nor drain.
    later = np.maximum(held.fullest_after * per_layer, end)
    eased = np.maximum(busiest - later, 0.0) * np.minimum(held.ranks_after_fullest, micros - 1)
    bubble = np.maximum(_bubble_s(inputs, stage, whole) - np.where(alone, 0.0, eased), 0.0)
    # Until the first micro-batch comes through, and the last comes back.
    bubble = bubble + 2 * (candidates.pipeline - 1) * sends.mean_message
    parameters, gradients, hidden = data_parallel_sync_s(inputs, layer, again, layers, micros)
    gradients = gradients + tied_embedding_sync_s(inputs, held.fullest * layer.forward, micros)
    optimizer = _optimizer_s(inputs)
    busy = {
        "products": layers * (layer.products + layer.products_backward),
        "scores": layers * (layer.scores + layer.scores_backward),
        "stream": layers * (layer.stream + layer.stream_backward),
        "head": heads,
        "recompute": layers * again,
        "tensor": layers * exposed.tensor,
        "context": layers * exposed.context,
        "experts": layers * exposed.experts,
        "passes": sends.exposed,
        "host": host,
    }
    items = {name: micros * value / profile.speed for name, value in busy.items()}
    once = {"parameters": parameters, "gradients": gradients, "bubble": bubble, "optimizer": optimizer}
    items |= {name: value / profile.speed for name, value in once.items()}
    items = {name: value * profile.calibration.message_factor(name) for name, value in items.items()}
    nodes = np.maximum(candidates.devices / inputs.network.devices_per_node, 1)
    items["waiting"] = sum(items.values()) * profile.other.straggler_share * np.log2(nodes)
    return StepTime(
        **items,
        stage_message=sends.mean_message,
        slowest_stage_message=sends.slowest_message,
        hidden=hidden + micros * layers * exposed.hidden,
        hidden_sync=hidden,
        busiest_layers=layers,
        step_s=np.add.reduce(list(items.values())),
    )


def _busiest_rank(held: RankLayers, per_layer: Reals, head: Reals, alone: Counts) -> tuple[Reals, Reals, Reals]:
    """Seconds, layers and seconds of heads of the rank that takes longest for a micro-batch."""
    full, end = held.fullest * per_layer, held.last * per_layer + held.last_heads * head
    middle = held.middle * per_layer + held.middle_heads * head
    busiest = np.where(alone, end, np.maximum(full, end))
    layers, heads = np.where(busiest > full, held.last, held.fullest), np.where(busiest > full, held.last_heads, 0.0)
    dearer = middle > busiest
    layers, heads = np.where(dearer, held.middle, layers), np.where(dearer, held.middle_heads, heads)
    return np.maximum(busiest, middle), layers, heads * head


def _recompute_s(inputs: CostInputs, layer: LayerTime) -> Reals:
    """Seconds of recomputation for one layer and micro-batch."""
    recompute = inputs.candidates.recompute
    # Without fused attention only its core is repeated; with it, norms and activations, and of the products a share.
    share = inputs.profile.other.selective_products
    flash = share * layer.products + max(share, 0.3) * layer.stream
    selective = layer.scores if inputs.workload.attention == "unfused" else flash
    chosen = np.where(recompute == RECOMPUTE_MODES.index("selective"), selective, 0.0)
    return np.where(recompute == RECOMPUTE_MODES.index("full"), layer.forward, chosen)


def _exposed_communication(inputs: CostInputs, layer: LayerTime) -> _ExposedCommunication:
    w, c, profile = inputs.workload, inputs.candidates, inputs.profile
    tokens = local_tokens(w, c)
    full = c.recompute == RECOMPUTE_MODES.index("full")
    tensor = (4 + 2 * full) * collective_s(inputs.network, "stream", w.element_bytes * tokens * w.width, c.tensor, 1)
    tensor = tensor * ((3 + w.latent.gathered_share) / 4 if w.latent else 1.0)
    # Keys and values travel round the context axis, and back with their gradients.
    keys = 2.0 * w.element_bytes * tokens * c.context * np.maximum(w.kv_heads / c.tensor, 1) * w.kernel_width
    once = collective_s(inputs.network, "keys", keys, c.context, c.tensor)
    context = (3 + full) * once
    under = np.minimum(profile.hides_context * (layer.scores + layer.scores_backward), context * inputs.largest_overlap)
    inside, between = expert_all_to_all_s(inputs.network, w, c, profile)
    times = exchanges(c) * w.moe_layers / w.layers
    experts = times * np.maximum(inside, between * (1 - profile.hides_experts))
    left = np.maximum(context - under, 0.0) * (c.context > 1)
    return _ExposedCommunication(
        tensor=tensor * (1 - profile.hides_tensor),
        context=left,
        experts=experts,
        hidden=tensor * profile.hides_tensor + (context - left) + times * np.maximum(inside, between) - experts,
    )


def _bubble_s(inputs: CostInputs, stage: Reals, whole: Reals) -> Reals:
    """Waiting of the busiest stage: the others' work on one micro-batch, cut into the chunks of an interleaving. Frozen
    layers have next to no weight gradients that could be put off."""
    c = inputs.candidates
    wait = np.maximum(whole - stage, 0.0) / c.virtual
    if inputs.workload.is_frozen:
        return wait
    # Weight gradients fill two thirds of it where they are put off (Qi et al. 2023, ZB-H1).
    return np.where(c.schedule == SCHEDULES.index("zero-bubble"), wait / 3, wait)


def _optimizer_s(inputs: CostInputs) -> Reals:
    c = inputs.candidates
    common, experts = fullest_trained_parameters(inputs.workload, c)
    split = np.where(c.shard_what > 0, shard_group_size(c, inputs.profile), 1)
    passes = inputs.device_time.update_s(common / split + experts / expert_shard_ranks(inputs.workload, c, split))
    return passes + orthogonalization_time(inputs).step_s
