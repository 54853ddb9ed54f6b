"""How long communication takes: rings inside a node, between nodes at all their network cards at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plait.machines.catalog import Link
from plait.machines.cluster import Cluster
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
    """The slowest of all that lies between nodes, which groups with ranks on several islands wait for."""
    between_latency_s: float
    island_bytes_per_s: float
    """The slowest of the islands' own networks, for groups that do not leave their island."""
    island_latency_s: float
    one_card_per_node: bool = False
    """Whether all devices of a node share one wire to other nodes; the rates are then those while all of them send."""
    island_starts: tuple[int, ...] = ()
    """The first rank of every island but the first."""
    measured: MeasuredNetwork | None = None
    """Measured times, which replace the formulas."""
    torus_axes: int = 0
    """Axes of the torus inside a node, or slice; 0 where a switch or a shared wire joins its devices."""

    def spans_islands(self, group_size: Any, stride: Any) -> NDArray[np.bool_]:
        """Whether a group of this many ranks that are `stride` apart has some on two islands: such groups fill blocks
        of group_size × stride ranks in a row."""
        block = np.asarray(group_size, dtype=np.float64) * np.asarray(stride, dtype=np.float64)
        found = np.zeros(block.shape, dtype=bool)
        for start in self.island_starts:
            found |= start % block != 0
        return found

    def between_rate_and_latency(self, crosses: NDArray[np.bool_]) -> tuple[Reals, Reals]:
        """Bytes per second and device, and seconds, of the slowest network that is used between nodes."""
        return (
            np.where(crosses, self.between_bytes_per_s, self.island_bytes_per_s),
            np.where(crosses, self.between_latency_s, self.island_latency_s),
        )


def network_of(cluster: Cluster) -> Network:
    """The narrowest links of a cluster: a collective waits for the slowest that it uses."""
    islands, within = cluster.islands, _networks_of_islands(cluster)
    joining = [(cluster.between, max(island.per_node for island in islands))] if len(islands) > 1 else []
    networks = within + joining
    rates = [achieved_bytes_per_s(network, many, network.reached) for network, many in networks]
    latencies, own = [network.latency_s for network, _ in networks], len(within) or 1
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
        between_bytes_per_s=min(rates),
        between_latency_s=max(latencies),
        island_bytes_per_s=min(rates[:own]),
        island_latency_s=max(latencies[:own]),
        one_card_per_node=all(network.shape == "shared" for network, _ in networks),
        island_starts=tuple(accumulate(island.n_devices for island in islands[:-1])),
        measured=_measured_network(cluster, networks),
        torus_axes=max(island.inside.axes if island.inside.shape == "torus" else 0 for island in islands),
    )


def _measured_network(cluster: Cluster, networks: list[tuple[Link, int]]) -> MeasuredNetwork | None:
    if cluster.measured is None or not cluster.measured.links:
        return None
    inside = min(island.inside.bytes_per_s for island in cluster.islands)
    return measured_network_of(
        cluster.measured, {"inside": inside, "between": min(network.bytes_per_s for network, _ in networks)}
    )


def _networks_of_islands(cluster: Cluster) -> list[tuple[Link, int]]:
    """The network of each island of several nodes, with the devices of a node that share it."""
    return [
        (cluster.link_between_nodes(island), island.per_node)
        for island in cluster.islands
        if island.nodes > 1 or len(cluster.islands) == 1
    ]


def achieved_bytes_per_s(link: Link, devices_per_node: int, achieved_share: float) -> float:
    """A device's share of a link for large messages when all devices of its node use it at once."""
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
    far_rate, far_latency_s = network.between_rate_and_latency(network.spans_islands(group_size, stride))
    whole = kind in ("reduce", "stream")
    rate = network.all_reduce_bytes_per_s if whole else network.inside_bytes_per_s
    inside = message_bytes * (together - 1) / together / rate
    outside = message_bytes * (group_size - 1) / np.maximum(group_size, 1) / together / far_rate * (nodes > 1)
    carried = np.maximum(inside, outside)
    if whole:
        spent = np.where(
            group_size > 1, 2 * (carried + pieces * _tree_latency_s(network, together, nodes, far_latency_s)), 0.0
        )
    else:
        spent = np.where(
            group_size > 1, carried + pieces * _ring_latency_s(network, together, nodes, far_latency_s), 0.0
        )
    if network.measured is None:
        return spent
    message_bytes, group_size, stride, nodes, pieces, spent = np.broadcast_arrays(
        message_bytes, group_size, stride, nodes, np.asarray(pieces, float), spent
    )
    return network.measured.collective_s(kind, message_bytes, (group_size, stride), nodes, pieces, spent)


def stage_message_s(network: Network, message_bytes: Any, group_size: Any, stride: Any) -> Reals:
    """Seconds of one message to the next of `group_size` ranks that are `stride` apart, over the slowest hop between
    two of them; the ends of the ranks' row are those of the cluster's."""
    group_size, stride = np.asarray(group_size), np.asarray(stride)
    far = (group_size - 1) * stride >= network.devices_per_node
    return hop_message_s(network, message_bytes, (group_size, stride), far, far & bool(network.island_starts))


def hop_message_s(network: Network, message_bytes: Any, rank_groups: tuple[Any, Any], far: Any, crosses: Any) -> Reals:
    """Seconds of one message to the next of a group's ranks (their number and stride): to another node where it is
    `far`, to another island where it `crosses`."""
    far_rate, far_latency_s = network.between_rate_and_latency(crosses)
    if network.one_card_per_node:  # of a node only the ranks of one stage send at once
        far_rate = far_rate * network.devices_per_node / np.minimum(rank_groups[1], network.devices_per_node)
    rate = np.where(far, far_rate, network.inside_bytes_per_s)
    spent = np.asarray(message_bytes) / rate + np.where(far, far_latency_s, network.inside_latency_s)
    if network.measured is None:
        return spent
    message_bytes, group_size, stride = (np.asarray(x, dtype=np.float64) for x in (message_bytes, *rank_groups))
    message_bytes, group_size, stride, far, spent = np.broadcast_arrays(message_bytes, group_size, stride, far, spent)
    return network.measured.send_s(message_bytes, (group_size, stride), far, spent)


def cpu_overhead_s(network: Network, message_bytes: Any, stride: Any) -> Reals:
    """Processor seconds that one message to the rank `stride` further on costs either of the two, if it was timed."""
    message_bytes, far = np.broadcast_arrays(
        np.asarray(message_bytes, dtype=np.float64), np.asarray(stride) >= network.devices_per_node
    )
    return network.measured.cpu_overhead_s(message_bytes, far) if network.measured else np.zeros_like(message_bytes)


def _ring_latency_s(network: Network, together: Reals, nodes: Reals, far_latency_s: Reals) -> Reals:
    """Latency of passing once through all ranks."""
    return nodes * (together - 1) * network.inside_latency_s + (nodes - 1) * far_latency_s


def _tree_latency_s(network: Network, together: Reals, nodes: Reals, far_latency_s: Reals) -> Reals:
    """Latency of a sum: a chain inside the node, a tree over the nodes, which the library takes for short messages."""
    return (together - 1) * network.inside_latency_s + np.log2(np.maximum(nodes, 1)) * far_latency_s
