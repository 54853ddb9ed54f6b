"""Clusters as values: islands of equal nodes and what joins them; from short forms, from cluster.json, from a machine.

A cluster.json is an object with the keys of `Cluster`, each island one with those of `Island`:

    {"name": "two rooms",
     "islands": [{"device": "H100", "per_node": 8, "nodes": 4, "network": "infiniband-ndr"},
                 {"device": {"like": "RTX 4090", "name": "RTX 4090 48GB", "memory_bytes": 5e10}, "per_node": 2}],
     "between": "@10G"}

A device or link is a name of the catalogue, or an object with all its values, or with "like" and those that differ. A
link may also be a rate: "+400G" with a card for each device, "@1G" for each machine. What may be left out: nodes (1),
inside and between (what is usual for the device), network (the same as between), speed (1), name. `plait probe --out`
writes one with what it measured under "measured".
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.cluster.catalog import Device, Link, find_device, find_device_by_driver_name, find_link
from plait.cluster.described import check_keys, check_value, device_from_json, link_from_json, name_or_values
from plait.cluster.measured import Measurements, measurements_as_values, measurements_from_values
from plait.cluster.short import parse_short_form
from plait.cluster.topology import Machine
from plait.errors import PlaitError

PRODUCTS_REACH = 0.9
"""Share of the probed products' rate that other matrix products reach on a processor (readings:
planner/step_time/kernel_efficiency.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Equal nodes with equal devices."""

    device: Device
    per_node: int
    nodes: int
    inside: Link
    """Link between the devices of a node."""
    speed: float = 1.0
    """Speed of these devices relative to what the catalogue says: power limits, heat, age."""
    network: Link | None = None
    """Link between the nodes of this island; None where it is the cluster's `between`."""

    def __post_init__(self) -> None:
        for what, amount in (("per_node", self.per_node), ("nodes", self.nodes), ("speed", self.speed)):
            if not amount > 0:
                raise PlaitError(f"an island of {self.device.name} has {what} = {amount:g}; write more than 0")

    @property
    def n_devices(self) -> int:
        """Number of devices in all nodes of the island."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All machines of a run, as the planner sees them."""

    name: str
    islands: tuple[Island, ...]
    between: Link
    """Link between islands, and between nodes unless their island has its own."""
    measured: Measurements | None = field(default=None, hash=False)
    """What a probe measured on these machines; the planner prefers it to the catalogue's values."""

    def __post_init__(self) -> None:
        if not self.islands:
            raise PlaitError(f"the cluster {self.name} has no islands; name at least one device")

    @property
    def n_devices(self) -> int:
        """Number of devices in all islands."""
        return sum(island.n_devices for island in self.islands)

    @property
    def n_nodes(self) -> int:
        """Number of nodes in all islands."""
        return sum(island.nodes for island in self.islands)

    @property
    def price_per_hour(self) -> float | None:
        """US dollars per hour for all devices together; None if one of them has no public price."""
        return _sum_of([(island.n_devices, island.device.price_per_hour) for island in self.islands])

    @property
    def watts(self) -> float | None:
        """Board power of all devices together; None if that of one of them is not published."""
        return _sum_of([(island.n_devices, island.device.watts) for island in self.islands])

    def link_between_nodes(self, island: Island) -> Link:
        """The link between the nodes of this island."""
        return island.network or self.between


def device_bytes_per_s(network: Link, per_node: int) -> float:
    """Line rate of one device in one direction, in bytes per second, when all devices of its node send at once."""
    match network.shape:
        case "shared":
            return network.bytes_per_s / per_node
        case "torus":
            return network.bytes_per_s * 2 * network.axes
        case "switch":
            return network.bytes_per_s


def read_cluster(text: str | Path) -> Cluster:
    """Read a short form ("512xH100") or a cluster.json; raises PlaitError that says what to write instead."""
    path = Path(text)
    if path.suffix.lower() == ".json":
        return cluster_from_json(_file_text(path), str(path))
    said = parse_short_form(str(text))
    islands = [
        Island(device=part.device, per_node=part.per_node, nodes=part.nodes, inside=find_link(part.device.inside))
        for part in said.parts
    ]
    between = said.network or _usual_between(islands)
    return Cluster(name=str(text).strip(), islands=tuple(islands), between=between)


def cluster_of_machine(machine: Machine, measured_flops: float | None = None, *, workers: int = 1) -> Cluster:
    """This machine as a cluster of one node; `measured_flops` is the FLOP/s of float32 products measured on its
    processor; None takes a typical one's.

    A processor is one device, or `workers` devices that share its cores, memory and memory bandwidth equally. Raises
    PlaitError for a GPU that the catalogue lacks.
    """
    if machine.device == "cpu":
        whole = _processor(machine, measured_flops)
        known = _part_of(replace(whole, memory_bytes=machine.memory_bytes), workers)
        per_node = workers
    else:
        known, per_node = find_device_by_driver_name(machine.name), machine.devices
    if known is None:
        raise PlaitError(
            f"{machine.name} is not in plait's catalogue; describe it in a cluster.json and pass --cluster"
        )
    memory = machine.memory_bytes if machine.device == "cuda" else known.memory_bytes
    here = replace(known, name=machine.name, memory_bytes=memory)
    island = Island(device=here, per_node=per_node, nodes=1, inside=find_link(known.inside))
    return Cluster(name="this machine", islands=(island,), between=find_link(known.between))


def cluster_of_hosts(hosts: Sequence[tuple[Machine, float | None, int]], between: Link) -> Cluster:
    """Several hosts as one cluster. `hosts` holds each host's machine, the measured FLOP/s of its processor (or None)
    and its number of workers.

    Equal hosts in a row form one island.
    """
    islands: list[Island] = []
    for machine, flops, workers in hosts:
        [one] = cluster_of_machine(machine, flops, workers=workers).islands
        if islands and replace(islands[-1], nodes=1) == one:
            islands[-1] = replace(islands[-1], nodes=islands[-1].nodes + 1)
        else:
            islands.append(one)
    return Cluster(name=f"{len(hosts)} hosts", islands=tuple(islands), between=between)


def _part_of(processor: Device, workers: int) -> Device:
    return replace(
        processor,
        peak_flops={precision: rate / workers for precision, rate in processor.peak_flops.items()},
        memory_bytes=processor.memory_bytes // workers,
        memory_bytes_per_s=processor.memory_bytes_per_s / workers,
        units=max(1, (processor.units or 1) // workers),
    )


def cluster_json(cluster: Cluster) -> str:
    """The text of a cluster.json from which `cluster_from_json` reads the same cluster."""
    islands = [
        {
            "device": name_or_values(island.device),
            "per_node": island.per_node,
            "nodes": island.nodes,
            "inside": name_or_values(island.inside),
            "speed": island.speed,
            **({"network": name_or_values(island.network)} if island.network else {}),
        }
        for island in cluster.islands
    ]
    values = {"name": cluster.name, "islands": islands, "between": name_or_values(cluster.between)}
    if cluster.measured:
        values["measured"] = measurements_as_values(cluster.measured)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def cluster_from_json(text: str, where: str) -> Cluster:
    """Read the text of a cluster.json; `where` names it in errors."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise PlaitError(f"{where} is not JSON ({error}); docs/guide-plan.md has an example") from error
    check_keys(values, {"islands"}, {"name", "between", "measured"}, where)
    if not isinstance(values["islands"], list) or not values["islands"]:
        raise PlaitError(
            f'{where}: islands must be a list of one or more; write "islands": [{{"device": "H100", "per_node": 8}}]'
        )
    check_value(values.get("name", ""), "str", f"{where}: name")
    islands = [_island(entry, f"{where}, island {i}") for i, entry in enumerate(values["islands"], 1)]
    between = link_from_json(values["between"], f"{where}: between") if "between" in values else _usual_between(islands)
    name, measured_values = values.get("name", Path(where).stem), values.get("measured")
    measured = measurements_from_values(measured_values, f"{where}: measured") if measured_values is not None else None
    return Cluster(name=name, islands=tuple(islands), between=between, measured=measured)


def _island(values: Any, where: str) -> Island:
    check_keys(values, {"device", "per_node"}, {"nodes", "inside", "speed", "network"}, where)
    for key, annotation in (("per_node", "int"), ("nodes", "int"), ("speed", "float")):
        check_value(values.get(key, 1), annotation, f"{where}: {key}")
    known = device_from_json(values["device"], f"{where}: device")
    return Island(
        device=known,
        per_node=int(values["per_node"]),
        nodes=int(values.get("nodes", 1)),
        inside=link_from_json(values.get("inside", known.inside), f"{where}: inside"),
        speed=float(values.get("speed", 1)),
        network=link_from_json(values["network"], f"{where}: network") if "network" in values else None,
    )


def _usual_between(islands: list[Island]) -> Link:
    """The islands' usual link between nodes that is slowest per device."""
    usual = [(find_link(island.device.between), island.per_node) for island in islands]
    return min(usual, key=lambda pair: device_bytes_per_s(*pair))[0]


def _processor(machine: Machine, flops: float | None) -> Device:
    """This machine's processor as a device: the typical one nearest in cores, its FLOP/s scaled by cores unless they
    were measured."""
    typical = min(
        (find_device(name) for name in ("laptop", "desktop", "server")),
        key=lambda known: abs(math.log((known.units or 1) / machine.cores)),
    )
    rate = flops or typical.flops("float32") * machine.cores / (typical.units or 1)
    source = f"{'measured' if flops else 'arithmetic of a typical processor'}; memory speed of a {typical.name}"
    rates, reached = dict.fromkeys(typical.peak_flops, rate), PRODUCTS_REACH if flops else None
    return replace(typical, peak_flops=rates, achievable=reached, units=machine.cores, watts=None, source=source)


def _sum_of(parts: list[tuple[int, float | None]]) -> float | None:
    known = [count * amount for count, amount in parts if amount is not None]
    return sum(known) if len(known) == len(parts) else None


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlaitError(f"cannot read the cluster {path}: {reason}; name a cluster.json that exists") from error
