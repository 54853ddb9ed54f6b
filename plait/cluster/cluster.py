"""Clusters as values: islands of equal nodes and what joins them; from short forms and from cluster.json.

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
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from plait.checked_json import parse_json
from plait.cluster.catalog import Device, Link, find_link
from plait.cluster.described import check_keys, check_value, device_from_json, link_from_json, name_or_values
from plait.cluster.measured import Measurements, measurements_as_values, measurements_from_values
from plait.cluster.probe.table import measurements_table
from plait.cluster.short import parse_short_form
from plait.errors import PlaitError
from plait.layout import LARGEST_CLUSTER
from plait.regular_file import SMALL_FILE_BYTES, read_regular_file

FASTEST = 1000.0
"""Largest speed of a device relative to the catalogue's, and its inverse the smallest."""


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
        if not 1 / FASTEST <= self.speed <= FASTEST:
            raise PlaitError(f"an island of {self.device.name} has speed = {self.speed:g}; write {FASTEST:g} at most")

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
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences on how a short form was read, where a person could mean something else."""

    def __post_init__(self) -> None:
        if not self.islands:
            raise PlaitError(f"the cluster {self.name} has no islands; name at least one device")
        if self.n_devices > LARGEST_CLUSTER:
            raise PlaitError(f"the cluster {self.name} has {self.n_devices} devices; name {LARGEST_CLUSTER} or fewer")

    @property
    def n_devices(self) -> int:
        """Number of devices in all islands."""
        return sum(island.n_devices for island in self.islands)

    @property
    def n_nodes(self) -> int:
        """Number of nodes in all islands."""
        return sum(island.nodes for island in self.islands)

    @property
    def hour_devices(self) -> int:
        """Devices that device-hours count, as a run's receipt does (Plan.devices): GPUs or TPU chips, and of machines
        that compute on their processors the machines, however many workers share one."""
        return sum(i.nodes if i.device.kind == "cpu" else i.n_devices for i in self.islands)

    @property
    def price_per_hour(self) -> float | None:
        """US dollars per hour for all devices together; None if one of them has no public price."""
        return _sum_of([(island.n_devices, island.device.price_per_hour) for island in self.islands])

    @property
    def watts(self) -> float | None:
        """Board power of all devices together; None if that of one of them is not published."""
        return _sum_of([(island.n_devices, island.device.watts) for island in self.islands])

    @property
    def hardware(self) -> str:
        """Number and names of its devices, and what joins them, in words."""
        islands = [f"{i.nodes} × ({i.per_node} × {i.device.name})" for i in self.islands]
        return " + ".join(islands) + (f", joined by {self.between.name}" if self.n_nodes > 1 else "")

    def __str__(self) -> str:
        """What a probe measured, as `plait probe` prints it; of machines that were only described, what they are."""
        return measurements_table(self.measured) if self.measured else f"{self.name}: {self.hardware}"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{escape(str(self))}</pre>"

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
        return cluster_from_json(_file_bytes(path), str(path))
    said = parse_short_form(str(text))
    islands = [
        Island(device=part.device, per_node=part.per_node, nodes=part.nodes, inside=find_link(part.device.inside))
        for part in said.parts
    ]
    usual = [part.between or find_link(part.device.between) for part in said.parts]
    between = said.network or _slowest(list(zip(usual, (part.per_node for part in said.parts), strict=True)))
    if said.network is None:
        islands = [
            island if part.between in (None, between) else replace(island, network=part.between)
            for island, part in zip(islands, said.parts, strict=True)
        ]
    return Cluster(name=str(text).strip(), islands=tuple(islands), between=between, notes=said.notes)


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


def cluster_from_json(text: str | bytes, where: str) -> Cluster:
    """Read the text of a cluster.json; `where` names it in errors."""
    try:
        values = parse_json(text, constants="kept")  # the sentences below name the key
    except ValueError as error:
        raise PlaitError(f"{where} is not a cluster: {error}; docs/guide-plan.md has an example") from error
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
    return _slowest([(find_link(island.device.between), island.per_node) for island in islands])


def _slowest(links: list[tuple[Link, int]]) -> Link:
    """The link that is slowest per device; each stands with the devices of a node."""
    return min(links, key=lambda pair: device_bytes_per_s(*pair))[0]


def _sum_of(parts: list[tuple[int, float | None]]) -> float | None:
    known = [count * amount for count, amount in parts if amount is not None]
    return sum(known) if len(known) == len(parts) else None


def _file_bytes(path: Path) -> bytes:
    try:
        return read_regular_file(path, SMALL_FILE_BYTES)
    except OSError as error:
        raise PlaitError(
            f"cannot read the cluster {path}: {error.strerror}; name a cluster.json that exists"
        ) from error
