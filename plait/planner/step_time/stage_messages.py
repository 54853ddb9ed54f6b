"""What the stages of a pipeline wait for each other's messages, hop by hop: inside a node, on an island's own network,
or from one island to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.planner.problem.candidates import Reals
from plait.planner.problem.stage_partition import heads_of_stages, messages_each_way, stages_of
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.network_model import cpu_overhead_s, hop_message_s, stage_message_s
from plait.planner.step_time.roofline import local_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSends:
    """Seconds of the messages between stages; arrays over candidates."""

    exposed: Reals
    """What a micro-batch takes longer on the rank that sets the pace: its wait, there and back, or, where a slower hop
    is at a rank with less to compute, what that rank's wait exceeds its spare time by."""
    mean_exposed: Reals
    """The mean over ranks: what a micro-batch meets on its way through all of them."""
    slowest_message: Reals
    """One message over the slowest hop, where it travels while the next micro-batch is computed; else 0."""
    mean_message: Reals
    """One message, on average over hops."""


def stage_sends(inputs: CostInputs, busy_s: Reals, layer_s: Reals, head_s: Reals) -> StageSends:
    """The messages of one micro-batch: its busiest rank computes for `busy_s`, a layer takes `layer_s`, and a head,
    on whichever rank, `head_s`."""
    c, piped = inputs.candidates, inputs.candidates.pipeline > 1
    once, mean = _slowest_hop_s(inputs), _mean_hop_traffic_share(inputs)
    if inputs.profile.send_model == "by share":
        exposed = slowest_hop_wait_s(inputs)
        none, pace = np.zeros(len(c)), _added_to_pace(inputs, exposed, layer_s, head_s)
        return StageSends(exposed=pace, mean_exposed=exposed * mean, slowest_message=none, mean_message=none)
    # At the least, what a wire takes longer for one micro-batch after the other than the ranks do.
    left = np.where(piped, np.maximum(messages_each_way(c.pipeline, c.virtual) * once - busy_s, 0.0), 0.0)
    sent = np.where(piped, once, 0.0) * inputs.profile.calibration.messages
    return StageSends(exposed=left, mean_exposed=left * mean, slowest_message=sent, mean_message=sent * mean)


def slowest_hop_wait_s(inputs: CostInputs) -> Reals:
    """What the rank at the slowest hop waits for the messages of one micro-batch, there and back, where that is a share
    of them; else 0."""
    c, profile = inputs.candidates, inputs.profile
    if profile.send_model != "by share":
        return np.zeros(len(c))
    messages = np.where(_is_one_at_a_time(inputs), 4, 2) * c.virtual
    return np.where(c.pipeline > 1, messages * _slowest_hop_s(inputs) * (1 - profile.hides_pipeline), 0.0)


def _is_one_at_a_time(inputs: CostInputs) -> NDArray[np.bool_]:
    """Mask of pipelines with ranks between two neighbours, which wait for the messages of one after those of the
    other."""
    return (inputs.candidates.pipeline > 2) & inputs.profile.other.sends_one_at_a_time


def _slowest_hop_s(inputs: CostInputs) -> Reals:
    c = inputs.candidates
    return stage_message_s(inputs.network, _message_bytes(inputs), c.pipeline, c.devices // c.pipeline)


def hop_shares(inputs: CostInputs) -> Reals:
    """Time of a message from each rank of a pipeline to the next as a share of that over the slowest hop; shape
    [ranks, candidates], for candidates of one pipeline degree.

    The last rank sends to the first where it holds a stage before the first's next one; else it counts as the rank
    before it.
    """
    c, network = inputs.candidates, inputs.network
    ranks, stride, per_node = int(c.pipeline[0]), c.devices // c.pipeline, network.devices_per_node
    place = np.arange(ranks)[:, None]
    back = (place == ranks - 1) & (c.virtual > 1)
    first = np.minimum(place, max(ranks - 2, 0)) * stride
    last = first + 2 * stride - 1  # of the ranks of both stages
    far = (last // per_node > first // per_node) | (back & (c.devices > per_node))
    crosses = back & bool(network.island_starts)
    for start in network.island_starts:
        crosses = crosses | ((first < start) & (start <= last))
    hops = hop_message_s(network, _message_bytes(inputs), (c.pipeline, stride), far, crosses)
    ends = (place == 0) | (place == ranks - 1)
    return np.where(ends & _is_one_at_a_time(inputs), 0.5, 1.0) * hops / hops.max(axis=0)


def message_cpu_s(inputs: CostInputs) -> Reals:
    """What the messages of one micro-batch cost a rank's processor: two come and two go for each of its stages, but for
    the first and the last of all, and of two ranks each has one of these."""
    c = inputs.candidates
    if not inputs.profile.cpu_carries_messages:
        return np.zeros(len(c))
    messages = np.where(c.pipeline == 2, 4 * c.virtual - 2, 4 * c.virtual) * (c.pipeline > 1)
    return messages * cpu_overhead_s(inputs.network, _message_bytes(inputs), c.devices // c.pipeline)


def _mean_hop_traffic_share(inputs: CostInputs) -> Reals:
    """Mean share of stage messages per hop; 1.0 where hops are equal."""
    c, shares = inputs.candidates, np.ones(len(inputs.candidates))
    unequal = _has_unequal_hops(inputs)
    for ranks in np.unique(c.pipeline[unequal]):
        rows = np.flatnonzero(unequal & (c.pipeline == ranks))
        shares[rows] = hop_shares(inputs.with_candidates(c.select(rows))).mean(axis=0)
    return shares


def _added_to_pace(inputs: CostInputs, exposed: Reals, layer_s: Reals, head_s: Reals) -> Reals:
    """What the wait `exposed` at the slowest hop, and less at the others, adds to the busiest rank's micro-batch."""
    w, c, added = inputs.workload, inputs.candidates, exposed.copy()
    unequal = _has_unequal_hops(inputs) & (exposed > 0)
    for ranks, virtual in np.unique(np.stack([c.pipeline, c.virtual])[:, unequal], axis=1).T:
        rows = np.flatnonzero(unequal & (c.pipeline == ranks) & (c.virtual == virtual))
        layers = stages_of(w, int(ranks * virtual), c.layer_split)
        heads = heads_of_stages(w, layers)
        busy = np.array([sum(layers[rank::ranks]) for rank in range(ranks)])[:, None] * layer_s[rows]
        busy = busy + np.array([sum(heads[rank::ranks]) for rank in range(ranks)])[:, None] * head_s[rows]
        busy[-1] += (w.layers_and_depths - w.layers) * layer_s[rows]
        waits = hop_shares(inputs.with_candidates(c.select(rows))) * exposed[rows]
        added[rows] = (busy + waits).max(axis=0) - busy.max(axis=0)
    return added


def _has_unequal_hops(inputs: CostInputs) -> NDArray[np.bool_]:
    """Mask of pipelines whose hops, or what ranks wait for at them, may differ: several stages in a node, several
    islands, one message at a time."""
    c, network = inputs.candidates, inputs.network
    inside = c.devices // c.pipeline < network.devices_per_node
    return (inside | bool(network.island_starts) | _is_one_at_a_time(inputs)) & (c.pipeline > 1)


def _message_bytes(inputs: CostInputs) -> Reals:
    """Bytes of one micro-batch's stream, as stages send it."""
    w, c = inputs.workload, inputs.candidates
    split = np.where(c.sequence_parallel > 0, c.tensor, 1)
    return inputs.profile.stage_message_bytes(w.element_bytes) * local_tokens(w, c) * w.width / split
