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
"""Sum to everyone, also as the two halves that sequence parallelism makes of it; gather and scatter, which are one half
of it each; the exchange of keys between parts of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A cluster's links as bytes per second and device that large messages reach."""

    per_node: int
    inside_bytes_per_s: float
    reduce_bytes_per_s: float
    """Inside a node for sums to everyone, which a switch may add up itself."""
    inside_latency_s: float
    between_bytes_per_s: float
    between_latency_s: float
    measured: MeasuredNetwork | None = None
    """What a probe measured, which goes before the formulas."""


def network_of(cluster: Cluster) -> Network:
    """The narrowest links of a cluster: a collective waits for the slowest."""
    islands, networks = cluster.islands, _networks(cluster)
    per_node = min(island.per_node for island in islands)
    return Network(
        per_node=per_node,
        inside_bytes_per_s=min(
            link_bytes_per_s(island.inside, island.per_node, island.inside.reached) for island in islands
        ),
        reduce_bytes_per_s=min(link_bytes_per_s(i.inside, i.per_node, i.inside.all_reduce_reached) for i in islands),
        inside_latency_s=max(island.inside.latency_s for island in islands),
        between_bytes_per_s=min(link_bytes_per_s(network, many, network.reached) for network, many in networks),
        between_latency_s=max(network.latency_s for network, _ in networks),
        measured=_timed(cluster, networks),
    )


def _timed(cluster: Cluster, networks: list[tuple[Link, int]]) -> MeasuredNetwork | None:
    if cluster.measured is None or not cluster.measured.links:
        return None
    inside = min(island.inside.bytes_per_s for island in cluster.islands)
    return measured_network_of(
        cluster.measured, {"inside": inside, "between": min(network.bytes_per_s for network, _ in networks)}
    )


def _networks(cluster: Cluster) -> list[tuple[Link, int]]:
    """What messages between nodes may pass, with the devices of a node that share it: within each island of several
    nodes its own network, and what joins the islands."""
    islands = cluster.islands
    within = [(cluster.network(island), island.per_node) for island in islands if island.nodes > 1 or len(islands) == 1]
    return within + ([(cluster.between, max(island.per_node for island in islands))] if len(islands) > 1 else [])


def link_bytes_per_s(link: Link, per_node: int, reached: float) -> float:
    """What a device gets of a link for large messages when all devices of its node use it at once."""
    wires = {"switch": 1.0, "shared": 1 / per_node, "torus": 2.0 * link.axes}
    return link.bytes_per_s * reached * wires[link.shape]


def collective_s(roads: Network, kind: Collective, message: Any, size: Any, stride: Any, pieces: Any = 1.0) -> Reals:
    """Seconds of a collective over `size` ranks that sit `stride` apart; `message` is the whole result in bytes.

    It is sent in so many `pieces`, each of which pays the latency.

    Ranks are numbered through the nodes. A ring through n ranks, g of them in each node, moves (n-1)/n of the message
    past every rank; where it leaves a node it does so over the g cards of its ranks at once, while the links inside
    carry (g-1)/g of it: hence min(link, g cards), not one card.
    """
    message, size, stride = (np.asarray(x, dtype=np.float64) for x in (message, size, stride))
    together = np.clip(np.floor(roads.per_node / stride), 1, np.maximum(size, 1))
    nodes = np.maximum(np.ceil(size / together), 1)
    whole = kind in ("reduce", "stream")
    rate = roads.reduce_bytes_per_s if whole else roads.inside_bytes_per_s
    inside = message * (together - 1) / together / rate
    outside = message * (size - 1) / np.maximum(size, 1) / together / roads.between_bytes_per_s * (nodes > 1)
    carried = np.maximum(inside, outside)
    if whole:
        spent = np.where(size > 1, 2 * (carried + pieces * _tree_s(roads, together, nodes)), 0.0)
    else:
        spent = np.where(size > 1, carried + pieces * _ring_s(roads, together, nodes), 0.0)
    if roads.measured is None:
        return spent
    message, size, stride, nodes, pieces, spent = np.broadcast_arrays(
        message, size, stride, nodes, np.asarray(pieces, float), spent
    )
    return roads.measured.message_s(kind, message, (size, stride), nodes, pieces, spent)


def token_exchange_s(
    roads: Network, tokens: Any, token_bytes: float, choices: int, size: Any, stride: Any
) -> tuple[Reals, Reals]:
    """Seconds for each rank to send `tokens` to `choices` of the experts on `size` ranks: (inside, between) nodes.

    Between nodes a token goes once to each node that it has an expert on, and is copied there: libraries for experts
    (DeepEP) do so since 2025. With k nodes and c choices it has experts on k (1 - (1 - 1/k)^c) of them.
    """
    tokens, size, stride = (np.asarray(x, dtype=np.float64) for x in (tokens, size, stride))
    together = np.clip(np.floor(roads.per_node / stride), 1, np.maximum(size, 1))
    nodes = np.maximum(np.ceil(size / together), 1)
    inside = tokens * token_bytes * choices * (together - 1) / together / roads.inside_bytes_per_s
    met = nodes * (1 - (1 - 1 / nodes) ** choices)
    outside = tokens * token_bytes * met * (nodes - 1) / nodes / roads.between_bytes_per_s
    latency = (together - 1) * roads.inside_latency_s
    return np.where(size > 1, inside + latency, 0.0), np.where(size > 1, outside, 0.0)


def stage_message_s(roads: Network, message: Any, size: Any, stride: Any) -> Reals:
    """Seconds of one message to the next of `size` ranks that sit `stride` apart."""
    far = np.asarray(stride) >= roads.per_node
    rate = np.where(far, roads.between_bytes_per_s, roads.inside_bytes_per_s)
    spent = np.asarray(message) / rate + np.where(far, roads.between_latency_s, roads.inside_latency_s)
    if roads.measured is None:
        return spent
    message, size, stride = (np.asarray(x, dtype=np.float64) for x in (message, size, stride))
    message, size, stride, far, spent = np.broadcast_arrays(message, size, stride, far, spent)
    return roads.measured.send_s(message, (size, stride), far, spent)


def cpu_overhead_s(roads: Network, message: Any, stride: Any) -> Reals:
    """Processor seconds that one message to the rank `stride` further on costs either of the two, if it was timed."""
    message, far = np.broadcast_arrays(np.asarray(message, dtype=np.float64), np.asarray(stride) >= roads.per_node)
    return roads.measured.cpu_overhead_s(message, far) if roads.measured else np.zeros_like(message)


def _ring_s(roads: Network, together: Reals, nodes: Reals) -> Reals:
    """Latency of passing once through all ranks."""
    return nodes * (together - 1) * roads.inside_latency_s + (nodes - 1) * roads.between_latency_s


def _tree_s(roads: Network, together: Reals, nodes: Reals) -> Reals:
    """Latency of a sum: a chain inside the node, a tree over the nodes, which the library takes for short messages."""
    return (together - 1) * roads.inside_latency_s + np.log2(np.maximum(nodes, 1)) * roads.between_latency_s
