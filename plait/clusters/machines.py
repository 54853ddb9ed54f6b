"""The machines of a cluster and which of them a job takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.clusters.job import NodeGroup
from plait.clusters.request import Scheduler
from plait.clusters.tools import DESCRIBE
from plait.errors import PlaitError
from plait.machines.catalog import find_device
from plait.machines.cluster import FASTEST, Cluster, read_cluster
from plait.units import counted

SERVER = "server processor"


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class NodeKind:
    """Nodes of one kind, as a scheduler describes them."""

    device: str
    """The catalogue's name of the GPU, or of a processor."""
    per_node: int
    cores: int


def cluster_of_node_kinds(nodes: Sequence[NodeKind], name: str) -> Cluster:
    """The nodes as a cluster, the most frequent kind first."""
    if not nodes:
        raise PlaitError(f"{name} has no nodes; name another partition, or {DESCRIBE}")
    counts = Counter(nodes)
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return _cluster_of_counts(ordered, name)


def cluster_of_partitions(nodes: Mapping[str, Sequence[NodeKind]]) -> Cluster:
    """The nodes of several partitions as a cluster, in the order of the partitions; each must have one kind."""
    for name, kinds in nodes.items():
        if len(set(kinds)) != 1:
            has = f"has nodes of {len(set(kinds))} kinds" if kinds else "has no nodes that the others do not have"
            raise PlaitError(f"partition {name} {has}, and each of several needs one kind of its own; {DESCRIBE}")
    return _cluster_of_counts([(kinds[0], len(kinds)) for kinds in nodes.values()], "+".join(nodes))


def _cluster_of_counts(counts: Sequence[tuple[NodeKind, int]], name: str) -> Cluster:
    """Processors are taken as a server's, slower or faster by their number of cores."""
    cluster = read_cluster("+".join(f"{count}x({kind.per_node}x{kind.device})" for kind, count in counts))
    islands = []
    for island, (kind, _) in zip(cluster.islands, counts, strict=True):
        if island.device.kind == "cpu":
            speed = kind.cores / (find_device(kind.device).units or kind.cores)
            island = replace(island, speed=min(FASTEST, max(1 / FASTEST, speed)))
        islands.append(island)
    return replace(cluster, name=name, islands=tuple(islands))


def with_gpus(cluster: Cluster, gpus: int | None) -> Cluster:
    """The cluster with only the first `gpus` GPUs of each node."""
    if gpus is None:
        return cluster
    for island in cluster.islands:
        if island.device.kind == "cpu":
            raise PlaitError(f"--gpus {gpus}, and {cluster.name} has no GPUs; leave --gpus out")
        if gpus > island.per_node:
            raise PlaitError(f"--gpus {gpus}, and a node of {island.device.name} has {island.per_node}; ask for fewer")
    return replace(cluster, islands=tuple(replace(island, per_node=gpus) for island in cluster.islands))


def scaled(cluster: Cluster, nodes: int) -> Cluster:
    """The first `nodes` nodes of a cluster; of equal nodes also more than it has."""
    if len(cluster.islands) == 1:
        [island] = cluster.islands
        return replace(cluster, islands=(replace(island, nodes=nodes),))
    if nodes > cluster.n_nodes:
        raise PlaitError(f"{cluster.name} has {counted(cluster.n_nodes, 'node')}; ask for as many or fewer")
    kept, left = [], nodes
    for island in cluster.islands:
        if left:
            kept.append(replace(island, nodes=min(left, island.nodes)))
            left -= kept[-1].nodes
    return replace(cluster, islands=tuple(kept))


def node_groups(cluster: Cluster, nodes: int, partition: str, scheduler: Scheduler) -> tuple[NodeGroup, ...]:
    """Equal nodes together, the first `nodes` of the cluster; in Slurm each kind may have a partition of its own."""
    partitions = partition.split("+")
    if len(partitions) not in (1, len(cluster.islands)):
        raise PlaitError(
            f"{len(partitions)} partitions for {counted(len(cluster.islands), 'kind')} of nodes; name one, or one for "
            "each kind, joined by +"
        )
    islands = scaled(cluster, nodes).islands
    for device in (island.device for island in islands):
        if device.kind == "tpu":
            raise PlaitError(
                f"plait plans for {device.name} on paper, and trains on processors and GPUs; describe those"
            )
        if scheduler == "kubernetes" and device.kind == "gpu" and device.vendor != "NVIDIA":
            raise PlaitError(
                f"plait's pods ask for NVIDIA GPUs, and {device.name} is not one; submit to Slurm or by ssh"
            )
    if len(islands) > 1 and scheduler == "kubernetes":
        raise PlaitError("the pods of a job are equal; describe nodes of one kind, or submit to Slurm or by ssh")
    named = partitions * len(islands) if len(partitions) == 1 else partitions
    return tuple(
        NodeGroup(
            nodes=island.nodes,
            gpus=0 if island.device.kind == "cpu" else island.per_node,
            partition=where,
            device=island.device.name,
        )
        for island, where in zip(islands, named, strict=False)  # the last partitions may not be needed
    )
