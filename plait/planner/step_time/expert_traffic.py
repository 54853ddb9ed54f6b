"""The load of experts' tokens on each link, and its time.

Note [once a node]: a token's experts may be on several ranks of a node. Libraries for experts (DeepEP) then send it to
that node once, and copy it there; if routing is node-limited (DeepSeek-V3: 4 of 8 groups of experts are open to a
token), it goes to no more nodes than that. plait's own exchange sends a token once for each of its experts.

Note [all-to-all on a torus]: on a ring of n wires in each direction a message to any rank passes n / 4 of them on
average, so in a cube of a × a × a devices, 2 wires along each of 3 axes, each device reaches 8 / a of one wire's rate:
less than in all-gathers, whose messages go to neighbours. With two devices along an axis, both wires lead to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from plait.planner.problem.candidates import RECOMPUTE_MODES, Candidates, Reals
from plait.planner.problem.expert_loads import busiest_rank_load
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import ranks_of_an_expert
from plait.planner.problem.workload import Workload
from plait.planner.step_time.network_model import Network
from plait.planner.step_time.roofline import local_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraffic:
    """Bytes that a rank sends to experts of one layer for one micro-batch, one way; arrays over candidates."""

    inside: Reals
    """To ranks of its own node."""
    between: Reals
    """To other nodes."""
    nodes: Reals
    """Nodes that a group which shares out the experts lies on."""
    ranks_in_node: Reals
    """Ranks of such a group in a node."""
    stride: Reals
    """Distance between two ranks of a group."""

    @property
    def group_size(self) -> Reals:
        return self.nodes * self.ranks_in_node


def expert_traffic(network: Network, w: Workload, c: Candidates, profile: SoftwareProfile) -> ExpertTraffic:
    """The bytes of one layer's tokens to their experts, if tokens go to all experts alike; results travel back the same
    way, and gradients both ways once more."""
    # Half of the messages, those to the experts, are as narrow as what the experts multiply.
    token_bytes = w.routed_width * (1.5 if w.precision in ("fp8", "fp4") else w.element_bytes)
    sent = local_tokens(w, c) * ranks_of_an_expert(w, c) / c.tensor * token_bytes
    stride = np.where(w.expert_ranks == "any", 1, c.tensor).astype(np.float64)
    group = np.asarray(c.expert, dtype=np.float64)
    together = np.clip(np.floor(network.devices_per_node / stride), 1, np.maximum(group, 1))
    nodes = np.maximum(np.ceil(group / together), 1)
    there = group > 1
    if profile.expert_sends == "once an expert":
        inside, between = (w.experts_per_token * ranks / group for ranks in (together - 1, group - together))
    else:
        inside = w.experts_per_token * (together - 1) / together
        between = nodes_met(w, nodes) * (nodes - 1) / nodes
    return ExpertTraffic(
        inside=np.where(there, sent * inside, 0.0),
        between=np.where(there, sent * between, 0.0),
        nodes=nodes,
        ranks_in_node=together,
        stride=stride,
    )


def expert_all_to_all_s(network: Network, w: Workload, c: Candidates, profile: SoftwareProfile) -> tuple[Reals, Reals]:
    """Seconds for each rank to send one layer's tokens of a micro-batch to their experts, (inside, between) nodes; the
    busiest rank of a group, to which most come, sets the pace."""
    traffic, load = expert_traffic(network, w, c, profile), busiest_rank_load(w, c)
    rate = network.inside_bytes_per_s * _torus_share(network.torus_axes, traffic.ranks_in_node)
    inside = load * traffic.inside / rate + (traffic.ranks_in_node - 1) * network.inside_latency_s
    far_rate, far_latency_s = network.between_rate_and_latency(
        network.spans_islands(np.maximum(c.expert, 1), traffic.stride)
    )
    between = load * traffic.between / far_rate
    if profile.expert_sends == "once an expert":  # counts go first, and each rank sends to each of the others
        between = between + 2 * (traffic.nodes - 1) * traffic.ranks_in_node * far_latency_s
    return np.where(c.expert > 1, inside, 0.0), np.where(c.expert > 1, between, 0.0)


def exchanges(c: Candidates) -> Reals:
    """How often a layer's tokens, or gradients of as many, travel in a micro-batch: to the experts and back, forward
    and backward, and forward once more where the layer is computed a second time."""
    return 4.0 + 2.0 * (c.recompute == RECOMPUTE_MODES.index("full"))


def nodes_met(w: Workload, nodes: Any) -> Reals:
    """Expected number of nodes, of this many over which the experts are spread evenly, that a token has experts on; see
    Note [once a node]."""
    some, place = np.unique(np.asarray(nodes, dtype=np.float64), return_inverse=True)
    return np.array([_nodes_met(w, float(number)) for number in some])[place].reshape(np.shape(nodes))


def most_nodes_met(w: Workload, nodes: float) -> float:
    """The largest number of nodes that one token may go to."""
    per_group = max(nodes / w.expert_groups, 1.0)
    limit = w.expert_groups_chosen * per_group if w.expert_groups > 1 else nodes
    return min(nodes, limit, w.experts_per_token)


def _nodes_met(w: Workload, nodes: float) -> float:
    groups, chosen, each = w.expert_groups, w.expert_groups_chosen, w.experts_per_token
    if groups == 1 or chosen == groups:
        return nodes * (1 - (1 - 1 / nodes) ** each)
    if nodes >= groups:  # a group of experts lies on several nodes
        return nodes * (chosen / groups) * (1 - (1 - groups / (chosen * nodes)) ** each)
    # A node has several groups, of which i are open to the token, each choice falling on them with i / chosen.
    own = max(round(groups / nodes), 1)
    missed = sum(
        comb(own, i) * comb(groups - own, chosen - i) / comb(groups, chosen) * (1 - i / chosen) ** each
        for i in range(min(own, chosen) + 1)
    )
    return nodes * (1 - missed)


def _torus_share(axes: int, ranks: Reals) -> Reals:
    """What an all-to-all of this many ranks reaches of the rate of a ring that uses all wires; see Note [all-to-all on
    a torus]."""
    if not axes:
        return np.ones_like(ranks)
    side = np.maximum(ranks ** (1 / axes), 2.0)
    return np.minimum(8 / side / (2 * axes), 1.0)
