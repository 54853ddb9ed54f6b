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

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, get_args

from plait.checked_json import parse_json
from plait.errors import PlaitError
from plait.layout import LARGEST_CLUSTER
from plait.machines.catalog import (
    ClockInSteps,
    Device,
    DeviceKind,
    Link,
    Shape,
    find_device,
    find_device_by_driver_name,
    find_link,
)
from plait.machines.machine import Machine
from plait.machines.measured import Measurements, measurements_as_values, measurements_from_values, measurements_table
from plait.machines.short_form import parse_network, parse_short_form
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
    """A probe's measurements on these machines; the planner prefers them to the catalogue's values."""
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
        """A probe's measurements as `plait probe` prints them; for machines that were only described, their
        description."""
        return measurements_table(self.measured) if self.measured else f"{self.name}: {self.hardware}"

    def _repr_html_(self) -> str:
        """The cluster as a notebook shows it."""
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
    if "between" in values:
        between = link_from_json(values["between"], f"{where}: between")
    else:
        between = _slowest([(find_link(island.device.between), island.per_node) for island in islands])
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


# Clusters of machines that are here: one machine, or several hosts that joined.


PRODUCTS_REACH = 0.9
"""Share of the probed products' rate that other matrix products reach on a processor (readings:
planner/step_time/device_rates.py)."""


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
    memory = machine.memory_bytes if machine.has_accelerators else known.memory_bytes
    here = replace(known, name=machine.name, memory_bytes=memory)
    island = Island(device=here, per_node=per_node, nodes=1, inside=find_link(known.inside))
    return Cluster(name="this machine", islands=(island,), between=find_link(known.between))


def with_share_of_cores(cluster: Cluster, share: float) -> Cluster:
    """A processor's cluster whose workers together use this share of its cores."""
    if share == 1:
        return cluster
    (island,) = cluster.islands
    rates = {precision: rate * share for precision, rate in island.device.peak_flops.items()}
    return replace(cluster, islands=(replace(island, device=replace(island.device, peak_flops=rates)),))


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


def _processor(machine: Machine, flops: float | None) -> Device:
    """This machine's processor as a device: the typical one nearest in cores, its FLOP/s scaled by cores unless they
    were measured. A measured rate is that of the run's own arithmetic, whichever it is."""
    typical = min(
        (find_device(name) for name in ("laptop", "desktop", "server")),
        key=lambda known: abs(math.log((known.units or 1) / machine.cores)),
    )
    rates = {
        precision: flops or rate * machine.cores / (typical.units or 1)
        for precision, rate in typical.peak_flops.items()
    }
    source = f"{'measured' if flops else 'arithmetic of a typical processor'}; memory speed of a {typical.name}"
    reached = PRODUCTS_REACH if flops else None
    return replace(typical, peak_flops=rates, achievable=reached, units=machine.cores, watts=None, source=source)


# Devices and links as a cluster.json describes them: by name, like another one, or by all their values.


_WORDS = {
    "DeviceKind": get_args(DeviceKind),
    "Shape": get_args(Shape),
    "ClockInSteps": get_args(ClockInSteps),
}


def device_from_json(value: Any, where: str) -> Device:
    """The device that a cluster.json names or describes; error messages begin with `where`."""
    if isinstance(value, str):
        return find_device(value)
    return Device(**_values(Device, value, where))


def link_from_json(value: Any, where: str) -> Link:
    """The link that a cluster.json names ("nvlink4"), gives as a rate ("+400G", "@1G") or describes."""
    if isinstance(value, str):
        mark, name = (value[0], value[1:].strip()) if value[:1] in ("+", "@") else ("+", value)
        return parse_network(name, mark)
    return Link(**_values(Link, value, where))


def name_or_values(value: Device | Link) -> str | dict[str, Any]:
    """The value that reads back as this device or link: its name where the catalogue has the same values, otherwise
    all of them."""
    try:
        known = find_device(value.name) if isinstance(value, Device) else find_link(value.name)
    except PlaitError:
        return asdict(value)
    return value.name if known == value else asdict(value)


def check_keys(values: Any, needed: set[str], allowed: set[str], where: str) -> None:
    """Raise PlaitError unless `values` is an object that has all `needed` keys and, besides them, only `allowed`
    ones."""
    if not isinstance(values, dict):
        raise PlaitError(f"{where}: {json.dumps(values)} must be an object, with {_listed(needed or allowed)}")
    known = needed | allowed
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise PlaitError(f'{where}: "{key}" is not known; write {near[0] if near else _listed(known)}')
    if missing := needed - set(values):
        raise PlaitError(f"{where}: {_listed(missing)} missing; add it")


def check_value(value: Any, annotation: str, where: str) -> None:
    """Raise PlaitError unless a value of a cluster.json fits the annotation of its field."""
    if not _fits(value, annotation):
        raise PlaitError(f"{where} = {json.dumps(value)} does not fit; write {_wanted(annotation)}")


def _values(kind: type[Device] | type[Link], value: Any, where: str) -> dict[str, Any]:
    """All values of a Device or Link; those left out come from the one that "like" names, or are the defaults."""
    annotations = {field.name: str(field.type) for field in fields(kind)}
    unknown = {name: None for name, annotation in annotations.items() if "None" in annotation}
    like = value.get("like") if isinstance(value, dict) else None
    optional = {*unknown, "axes", "source", "all_reduce_reached", "clock_in_steps", "achievable_of", "price_source"}
    check_keys(value, set() if like else set(annotations) - optional, {"like", *annotations}, where)
    given = {name: value for name, value in value.items() if name != "like"}
    for name, value in given.items():
        check_value(value, annotations[name], f"{where}: {name}")
        if value is not None and "int" in annotations[name]:
            given[name] = int(value)
    if like:
        known = find_device(str(like)) if kind is Device else find_link(str(like))
        return {**asdict(known), "source": f"{where}, like {known.name}", **given}
    usual = {} if kind is Device else {"axes": 1, "all_reduce_reached": given["reached"]}
    return {**unknown, "source": where, **usual, **given}


def _fits(value: Any, annotation: str) -> bool:
    if annotation in _WORDS:
        return value in _WORDS[annotation]
    if value is None or isinstance(value, bool):
        return value is None and "None" in annotation
    if annotation.startswith("Mapping"):
        return isinstance(value, dict) and all(_fits(rate, "float") for rate in value.values())
    if annotation == "str":
        return isinstance(value, str)
    # A count of bytes may be written as 8e10; JSON as Python reads it has Infinity and NaN, which are no amounts.
    number = isinstance(value, int | float) and math.isfinite(value)
    return number and ("int" not in annotation or value == int(value))


def _wanted(annotation: str) -> str:
    if annotation in _WORDS:
        return f"one of {_listed(set(_WORDS[annotation]))}"
    if annotation.startswith("Mapping"):
        return 'FLOP/s by precision, for example {"bf16": 1e15}'
    return "text" if annotation == "str" else "a whole number" if "int" in annotation else "a number"


def _listed(words: set[str]) -> str:
    return ", ".join(sorted(words))
