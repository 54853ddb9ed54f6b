"""How long communication takes: rings inside a node, between nodes at all their network cards at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from plait.cluster.catalog import Link
from plait.cluster.cluster import Cluster
from plait.planner.problem.candidates import Reals
from plait.planner.step_time.measured_network import MeasuredNetwork, measured_network_of

Collective = Literal["reduce", "stream", "gather", "scatter", "keys"]
"""reduce: all-reduce; stream: all-reduce, or its two halves in sequence parallelism; gather: all-gather; scatter:
reduce-scatter; keys: exchange of keys and values between context ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A cluster's links as bytes per second and device that large messages reach."""

    devices_per_node: int
    inside_bytes_per_s: float
    all_reduce_bytes_per_s: float
    """Rate of all-reduces inside a node; higher than `inside_bytes_per_s` where the switch adds up."""
    inside_latency_s: float
    between_bytes_per_s: float
    between_latency_s: float
    measured: MeasuredNetwork | None = None
    """Measured times, which replace the formulas."""


def network_of(cluster: Cluster) -> Network:
    """The narrowest links of a cluster: a collective waits for the slowest."""
    islands, networks = cluster.islands, _links_between_nodes(cluster)
    per_node = min(island.per_node for island in islands)
    return Network(
        devices_per_node=per_node,
        inside_bytes_per_s=min(
            achieved_bytes_per_s(island.inside, island.per_node, island.inside.reached) for island in islands
        ),
        all_reduce_bytes_per_s=min(
            achieved_bytes_per_s(i.inside, i.per_node, i.inside.all_reduce_reached) for i in islands
        ),
        inside_latency_s=max(island.inside.latency_s for island in islands),
        between_bytes_per_s=min(achieved_bytes_per_s(network, many, network.reached) for network, many in networks),
        between_latency_s=max(network.latency_s for network, _ in networks),
        measured=_measured_network(cluster, networks),
    )


def _measured_network(cluster: Cluster, networks: list[tuple[Link, int]]) -> MeasuredNetwork | None:
    if cluster.measured is None or not cluster.measured.links:
        return None
    inside = min(island.inside.bytes_per_s for island in cluster.islands)
    return measured_network_of(
        cluster.measured, {"inside": inside, "between": min(network.bytes_per_s for network, _ in networks)}
    )


def _links_between_nodes(cluster: Cluster) -> list[tuple[Link, int]]:
    """What messages between nodes may pass, with the devices of a node that share it: within each island of several
    nodes its own network, and what joins the islands."""
    islands = cluster.islands
    within = [
        (cluster.link_between_nodes(island), island.per_node)
        for island in islands
        if island.nodes > 1 or len(islands) == 1
    ]
    return within + ([(cluster.between, max(island.per_node for island in islands))] if len(islands) > 1 else [])


def achieved_bytes_per_s(link: Link, devices_per_node: int, achieved_share: float) -> float:
    """What a device gets of a link for large messages when all devices of its node use it at once."""
    wires = {"switch": 1.0, "shared": 1 / devices_per_node, "torus": 2.0 * link.axes}
    return link.bytes_per_s * achieved_share * wires[link.shape]


def collective_s(
    network: Network, kind: Collective, message_bytes: Any, group_size: Any, stride: Any, pieces: Any = 1.0
) -> Reals:
    """Seconds of a collective over `group_size` ranks that are `stride` apart; `message_bytes` is the whole result. It
    is sent in `pieces`, each of which pays the latency.

    Ranks are numbered through the nodes. A ring through n ranks, g of them in each node, moves (n-1)/n of the message
    past every rank; where it leaves a node it does so over the g cards of its ranks at once, while the links inside
    carry (g-1)/g of it: hence min(link, g cards), not one card.
    """
    message_bytes, group_size, stride = (np.asarray(x, dtype=np.float64) for x in (message_bytes, group_size, stride))
    together = np.clip(np.floor(network.devices_per_node / stride), 1, np.maximum(group_size, 1))
    nodes = np.maximum(np.ceil(group_size / together), 1)
    whole = kind in ("reduce", "stream")
    rate = network.all_reduce_bytes_per_s if whole else network.inside_bytes_per_s
    inside = message_bytes * (together - 1) / together / rate
    outside = (
        message_bytes
        * (group_size - 1)
        / np.maximum(group_size, 1)
        / together
        / network.between_bytes_per_s
        * (nodes > 1)
    )
    carried = np.maximum(inside, outside)
    if whole:
        spent = np.where(group_size > 1, 2 * (carried + pieces * _tree_latency_s(network, together, nodes)), 0.0)
    else:
        spent = np.where(group_size > 1, carried + pieces * _ring_latency_s(network, together, nodes), 0.0)
    if network.measured is None:
        return spent
    message_bytes, group_size, stride, nodes, pieces, spent = np.broadcast_arrays(
        message_bytes, group_size, stride, nodes, np.asarray(pieces, float), spent
    )
    return network.measured.collective_s(kind, message_bytes, (group_size, stride), nodes, pieces, spent)


def expert_all_to_all_s(
    network: Network, tokens: Any, token_bytes: float, experts_per_token: int, group_size: Any, stride: Any
) -> tuple[Reals, Reals]:
    """Seconds for each rank to send `tokens` to `experts_per_token` of the experts on `group_size` ranks: (inside,
    between) nodes.

    Between nodes a token goes once to each node that it has an expert on, and is copied there: libraries for experts
    (DeepEP) do so since 2025. With k nodes and c experts per token it has experts on k (1 - (1 - 1/k)^c) of them.
    """
    tokens, group_size, stride = (np.asarray(x, dtype=np.float64) for x in (tokens, group_size, stride))
    together = np.clip(np.floor(network.devices_per_node / stride), 1, np.maximum(group_size, 1))
    nodes = np.maximum(np.ceil(group_size / together), 1)
    inside = tokens * token_bytes * experts_per_token * (together - 1) / together / network.inside_bytes_per_s
    met = nodes * (1 - (1 - 1 / nodes) ** experts_per_token)
    outside = tokens * token_bytes * met * (nodes - 1) / nodes / network.between_bytes_per_s
    latency = (together - 1) * network.inside_latency_s
    return np.where(group_size > 1, inside + latency, 0.0), np.where(group_size > 1, outside, 0.0)


def stage_message_s(network: Network, message_bytes: Any, group_size: Any, stride: Any) -> Reals:
    """Seconds of one message to the next of `group_size` ranks that are `stride` apart."""
    far = np.asarray(stride) >= network.devices_per_node
    rate = np.where(far, network.between_bytes_per_s, network.inside_bytes_per_s)
    spent = np.asarray(message_bytes) / rate + np.where(far, network.between_latency_s, network.inside_latency_s)
    if network.measured is None:
        return spent
    message_bytes, group_size, stride = (np.asarray(x, dtype=np.float64) for x in (message_bytes, group_size, stride))
    message_bytes, group_size, stride, far, spent = np.broadcast_arrays(message_bytes, group_size, stride, far, spent)
    return network.measured.send_s(message_bytes, (group_size, stride), far, spent)


def cpu_overhead_s(network: Network, message_bytes: Any, stride: Any) -> Reals:
    """Processor seconds that one message to the rank `stride` further on costs either of the two, if it was timed."""
    message_bytes, far = np.broadcast_arrays(
        np.asarray(message_bytes, dtype=np.float64), np.asarray(stride) >= network.devices_per_node
    )
    return network.measured.cpu_overhead_s(message_bytes, far) if network.measured else np.zeros_like(message_bytes)


def _ring_latency_s(network: Network, together: Reals, nodes: Reals) -> Reals:
    """Latency of passing once through all ranks."""
    return nodes * (together - 1) * network.inside_latency_s + (nodes - 1) * network.between_latency_s


def _tree_latency_s(network: Network, together: Reals, nodes: Reals) -> Reals:
    """Latency of a sum: a chain inside the node, a tree over the nodes, which the library takes for short messages."""
    return (together - 1) * network.inside_latency_s + np.log2(np.maximum(nodes, 1)) * network.between_latency_s
