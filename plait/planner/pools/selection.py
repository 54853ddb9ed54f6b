"""Some devices of a pool, and the cluster that they form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from plait.machines.catalog import Link, find_link
from plait.machines.cluster import Cluster, Island, device_bytes_per_s
from plait.machines.pool import Pool, PoolDevices, ZoneLink
from plait.units import counted

DeviceCounts = tuple[int, ...]
"""Number of devices from each entry of a pool."""


@dataclass(frozen=True)
class Selection:
    """Devices of a pool that a run would take."""

    pool: Pool
    counts: DeviceCounts

    @cached_property
    def taken(self) -> tuple[tuple[PoolDevices, int], ...]:
        """The entries from which devices are taken, zone by zone, with the number of devices."""
        zones = self.pool.zones
        pairs = [(entry, count) for entry, count in zip(self.pool.devices, self.counts, strict=True) if count]
        return tuple(sorted(pairs, key=lambda pair: zones.index(pair[0].zone)))

    @property
    def n_devices(self) -> int:
        return sum(self.counts)

    @cached_property
    def zones(self) -> tuple[str, ...]:
        """The zones that are used."""
        return tuple(dict.fromkeys(entry.zone for entry, _ in self.taken))

    @cached_property
    def links(self) -> tuple[ZoneLink, ...]:
        """The links in use, except the usual networks of the devices."""
        return tuple(link for link in self.pool.links if set(link.zones) <= set(self.zones))

    @cached_property
    def cluster(self) -> Cluster:
        """The devices in the planner's form: an island for each entry, joined by the slowest link of its zones."""
        islands = [_island(self.pool, entry, count) for entry, count in self.taken]
        own = [(island.network or _known_link(island.device.between), island.per_node) for island in islands]
        across = [(link.link, island.per_node) for link in self.links if len(set(link.zones)) > 1 for island in islands]
        between = _slowest(across or own)
        islands = [
            Island(
                device=island.device,
                per_node=island.per_node,
                nodes=island.nodes,
                inside=island.inside,
                network=None if network == between else network,
            )
            for island, (network, _) in zip(islands, own, strict=True)
        ]
        return Cluster(name=str(self), islands=tuple(islands), between=between)

    @cached_property
    def zone_of_nodes(self) -> tuple[str, ...]:
        """The zone of each node of the cluster."""
        return tuple(entry.zone for entry, count in self.taken for _ in range(-(-count // entry.per_node)))

    @property
    def spot_nodes_per_day(self) -> float:
        """Interruptions per day of all machines that are available as spot machines."""
        return sum(
            -(-count // entry.per_node) * entry.interruptions_per_day
            for entry, count in self.taken
            if entry.spot_price is not None
        )

    def by_zone(self) -> dict[str, dict[str, int]]:
        """Devices by zone and name."""
        found: dict[str, dict[str, int]] = {}
        for entry, count in self.taken:
            names = found.setdefault(entry.zone, {})
            names[entry.device.name] = names.get(entry.device.name, 0) + count
        return found

    def __str__(self) -> str:
        """The devices in words, with their zones if the pool has several."""
        kinds: dict[str, int] = {}
        for entry, count in self.taken:
            kinds[entry.device.name] = kinds.get(entry.device.name, 0) + count
        what = " + ".join(f"{count} × {name}" for name, count in kinds.items())
        if len(self.pool.zones) == 1:
            return what
        return f"{what} in {self.zones[0] if len(self.zones) == 1 else counted(len(self.zones), 'zone')}"


_known_link = cache(find_link)


def _island(pool: Pool, entry: PoolDevices, count: int) -> Island:
    per_node = min(entry.per_node, count)
    own = pool.link_between(entry.zone, entry.zone)
    return Island(
        device=entry.device,
        per_node=per_node,
        nodes=count // per_node,
        inside=_known_link(entry.device.inside),
        network=own.link if own else _known_link(entry.device.between),
    )


def _slowest(links: list[tuple[Link, int]]) -> Link:
    """The slowest link per device; each link comes with the number of devices per node."""
    return min(links, key=lambda pair: device_bytes_per_s(*pair))[0]
