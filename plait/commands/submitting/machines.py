"""Which machines there are to be had: as a person describes them, or as the scheduler answers."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.checked_json import parse_object
from plait.commands.submitting.tools import require_tool, tool_answer
from plait.errors import PlaitError
from plait.machines.catalog import find_device, find_device_by_driver_name
from plait.machines.cluster import FASTEST, Cluster, read_cluster

DESCRIBE = "describe the machines instead, for example --cluster 4x(8xH100)"
SERVER = "server processor"


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class NodeKind:
    """Nodes of one kind, as a scheduler tells of them."""

    device: str
    """The catalogue's name of the GPU, or of a processor."""
    per_node: int
    cores: int


def cluster_of_node_kinds(nodes: Sequence[NodeKind], name: str) -> Cluster:
    """The nodes as a cluster; those of which there are most come first. Processors are taken as a server's, slower or
    faster by their number of cores."""
    if not nodes:
        raise PlaitError(f"{name} has no nodes; name another partition, or {DESCRIBE}")
    counts = Counter(nodes)
    return _cluster_of_counts(
        [(kind, counts[kind]) for kind in sorted(counts, key=lambda one: (-counts[one], one))], name
    )


def cluster_of_partitions(nodes: Mapping[str, Sequence[NodeKind]]) -> Cluster:
    """The nodes of several partitions as a cluster, in the order in which the partitions are named; raises PlaitError
    where one of them has unlike nodes."""
    for name, kinds in nodes.items():
        if len(set(kinds)) != 1:
            has = f"has nodes of {len(set(kinds))} kinds" if kinds else "has no nodes that the others do not have"
            raise PlaitError(f"partition {name} {has}, and each of several needs one kind of its own; {DESCRIBE}")
    return _cluster_of_counts([(kinds[0], len(kinds)) for kinds in nodes.values()], "+".join(nodes))


def _cluster_of_counts(counts: Sequence[tuple[NodeKind, int]], name: str) -> Cluster:
    kinds = [kind for kind, _ in counts]
    text = "+".join(f"{count}x({kind.per_node}x{kind.device})" for kind, count in counts)
    cluster = read_cluster(text)
    islands = [
        replace(island, speed=_speed(kind)) if island.device.kind == "cpu" else island
        for island, kind in zip(cluster.islands, kinds, strict=True)
    ]
    return replace(cluster, name=name, islands=tuple(islands))


def _speed(kind: NodeKind) -> float:
    units = find_device(kind.device).units or kind.cores
    return min(FASTEST, max(1 / FASTEST, kind.cores / units))


def slurm_limit_s(partition: str) -> tuple[str, int] | None:
    """Of the partitions that are named (of the usual one, if none is), the one that ends jobs soonest which ask for no
    time, and after how many seconds: its DefaultTime, else its MaxTime. None where none ends them, or sinfo does not
    answer."""
    if shutil.which("sinfo") is None:
        return None
    try:
        said = tool_answer(["sinfo", "--noheader", "-o", "%P|%l|%L"], about="Slurm's partitions", within_s=30)
    except PlaitError:
        return None
    rows = [line.split("|") for line in said.splitlines() if line.count("|") == 2]
    named = re.split(r"[+,]", partition) if partition else []
    own = [row for row in rows if (row[0].rstrip("*") in named if named else row[0].endswith("*"))]
    limits = {}
    for name, most, usual in own:
        seconds = slurm_seconds(usual) or slurm_seconds(most)
        if seconds is not None:
            limits[name.rstrip("*")] = seconds
    return min(limits.items(), key=lambda pair: pair[1], default=None)


def slurm_seconds(text: str) -> int | None:
    """Seconds of a time as sinfo writes it: "30:00" (minutes), "8:00:00", "1-12:00:00"; None for "infinite" and
    "n/a"."""
    if not (match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)", text.strip())):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def slurm_cluster(partition: str) -> Cluster:
    """The nodes of a partition (of the usual one, if none is named) that are not down, by sinfo."""
    require_tool("sinfo", f"log in where Slurm is, or {DESCRIBE}")
    partitions = partition.split("+") if partition else []
    named = ["--partition", ",".join(partitions)] if partition else []
    said = tool_answer(["sinfo", "--noheader", "-N", "-o", "%N|%P|%T|%c|%G", *named], about="Slurm's nodes")
    if len(partitions) > 1:
        return cluster_of_partitions(_nodes_by_partition(said, partitions))
    return cluster_of_node_kinds(slurm_nodes(said, partition), f"partition {partition}" if partition else "Slurm")


def slurm_nodes(said: str, partition: str) -> list[NodeKind]:
    """The nodes of sinfo's lines `NAME|PARTITION|STATE|CORES|GRES`: of the usual partition, which "*" marks, where none
    is named."""
    return list(_slurm_nodes_by_name(said, partition).values())


def _nodes_by_partition(said: str, partitions: Sequence[str]) -> dict[str, list[NodeKind]]:
    """A node that is in several of the partitions counts in the first of them."""
    found, taken = dict[str, list[NodeKind]](), set[str]()
    for partition in partitions:
        own = _slurm_nodes_by_name(said, partition)
        found[partition] = [kind for name, kind in own.items() if name not in taken]
        taken |= set(own)
    return found


def _slurm_nodes_by_name(said: str, partition: str) -> dict[str, NodeKind]:
    rows = [line.split("|") for line in said.splitlines() if line.count("|") == 4]
    if partition:
        rows = [row for row in rows if row[1].rstrip("*") in partition.split(",")]
    elif any(row[1].endswith("*") for row in rows):
        rows = [row for row in rows if row[1].endswith("*")]
    there = {row[0]: row for row in rows if not row[2].startswith(("down", "drain", "fail", "maint", "unk"))}
    if rows and not there:
        raise PlaitError(f"all nodes of Slurm are {rows[0][2]}; sinfo -R says why, or {DESCRIBE}")
    return {name: _slurm_node(row) for name, row in there.items()}


def _slurm_node(row: Sequence[str]) -> NodeKind:
    cores = int(row[3].rstrip("+") or 1)
    for entry in row[4].split(","):
        words = entry.partition("(")[0].split(":")
        if words[0] == "gpu":
            if len(words) < 3:
                raise PlaitError(f"Slurm does not say which GPUs {row[0]} has ({entry}); {DESCRIBE}")
            device = find_device_by_driver_name(words[1].replace("_", " ")) or find_device(words[1].replace("_", " "))
            return NodeKind(device=device.name, per_node=int(words[2]), cores=cores)
    return NodeKind(device=SERVER, per_node=1, cores=cores)


def kubernetes_cluster() -> Cluster:
    """The nodes that take pods, by kubectl."""
    require_tool("kubectl", f"install it, or {DESCRIBE}")
    said = tool_answer(["kubectl", "get", "nodes", "--output", "json"], about="the nodes of Kubernetes", within_s=30)
    try:
        nodes = kubernetes_nodes(parse_object(said.encode()))
    except (ValueError, KeyError, AttributeError) as error:
        raise PlaitError(f"the nodes of Kubernetes: kubectl's answer is not understood ({error}); {DESCRIBE}") from None
    return cluster_of_node_kinds(nodes, "Kubernetes")


def kubernetes_nodes(answer: Mapping[str, object]) -> list[NodeKind]:
    """The nodes of a NodeList that may be used: those with GPUs, or where no node has any, all."""
    items = answer.get("items")
    found = [_kubernetes_node(item) for item in (items if isinstance(items, list) else []) if _takes_pods(item)]
    with_gpus = [kind for kind in found if kind.device != SERVER]
    return with_gpus or found


def _takes_pods(item: Mapping[str, Mapping[str, object]]) -> bool:
    spec = item.get("spec", {})
    taints = spec.get("taints") or []
    effects = [taint.get("effect") for taint in taints if "nvidia.com/gpu" not in taint.get("key", "")]  # type: ignore[union-attr]
    return not spec.get("unschedulable") and "NoSchedule" not in effects


def _kubernetes_node(item: Mapping[str, Mapping[str, Mapping[str, str]]]) -> NodeKind:
    labels, room = item["metadata"].get("labels", {}), item["status"].get("allocatable", {})
    cpu = str(room.get("cpu", "1"))
    cores = max(1, int(cpu.removesuffix("m")) // 1000 if cpu.endswith("m") else int(cpu))
    gpus = int(room.get("nvidia.com/gpu", "0"))
    if not gpus:
        return NodeKind(device=SERVER, per_node=1, cores=cores)
    product = labels.get("nvidia.com/gpu.product", "")
    device = find_device_by_driver_name(product)
    if device is None:
        name = item["metadata"].get("name", "a node")
        raise PlaitError(f'the catalogue does not know the GPUs of {name} ("{product}"); {DESCRIBE}')
    return NodeKind(device=device.name, per_node=gpus, cores=cores)
