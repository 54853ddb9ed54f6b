"""Pools: devices that could be rented or used, by zone, with prices and the links between zones.

A pool is read from a short form ("128xA100+384xV100") or from a pool.toml:

    currency = "USD"

    [[device]]
    name = "A100-40GB"       # of the catalogue
    count = 128
    per_node = 4
    zone = "us-east1-a"
    price = 2.74             # for one device and hour
    spot_price = 1.1
    interruptions_per_day = 0.1  # of one spot machine

    [[link]]
    from = "us-east1-a"
    to = "us-west1-b"
    bandwidth = 1.2e9        # bytes a second, measured between two machines; or a rate as in cluster.json: "100G"
    egress_price = 0.02      # for one GB, in both directions

Only name and count of a device must be given, and of a link its two zones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.layout import LARGEST_CLUSTER
from plait.machines.catalog import Device, DeviceKind, Link, find_device, link_at_rate
from plait.machines.cluster import check_keys, link_from_json
from plait.machines.short_form import parse_short_form
from plait.regular_file import SMALL_FILE_BYTES, read_regular_file

ONLY_ZONE = "pool"
"""The zone of devices that are listed without one."""
CATALOGUE_CURRENCY = "USD"
CURRENCIES = (
    "USD", "EUR", "GBP", "CHF", "JPY", "CNY", "INR", "KRW", "TWD", "HKD", "SGD", "AUD", "NZD", "CAD", "BRL", "MXN",
    "SEK", "NOK", "DKK", "PLN", "CZK", "HUF", "RON", "TRY", "ILS", "AED", "SAR", "ZAR", "THB", "IDR", "MYR", "VND",
)  # fmt: skip
ASSUMED_BANDWIDTH = 1.2e9
"""Bytes a second of a machine to another zone, if the pool does not say: between two regions of Google Cloud 1.0 to 1.3
GB/s were measured, between zones of one region 5.8 to 6.6 (Sailor, SOSP 2025)."""
ASSUMED_EGRESS_PRICE = 0.02
"""US dollars a GB to another zone, if the pool does not say: Google Cloud's price between regions of one continent (the
same source, 2025); between zones of one region it is half of that."""
ASSUMED_INTERRUPTIONS_PER_DAY = 0.1
"""Per spot machine: a judgement. Clouds publish no rate; it differs by kind, zone and hour."""
MOST_DEVICE_ENTRIES = 64
_MOST_PRICE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDevices:
    """Equal nodes of one kind in one zone."""

    device: Device
    count: int
    per_node: int
    zone: str = ONLY_ZONE
    price: float | None
    """For one device and hour, in the pool's currency; None if unknown."""
    spot_price: float | None = None
    """The price of a spot device, which may be taken back at any time; None if there are none."""
    interruptions_per_day: float = ASSUMED_INTERRUPTIONS_PER_DAY
    """How many times a day one spot machine is taken back."""
    assumed: tuple[str, ...] = ()
    """Assumptions in place of values that the pool does not give, a phrase each."""
    spot_assumed: tuple[str, ...] = ()
    """The same, for spot machines only."""

    @property
    def nodes(self) -> int:
        return self.count // self.per_node

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices that can be taken: powers of two within one GPU node, then whole nodes."""
        return _sizes(self.device.kind, self.per_node, self.nodes)


@cache
def _sizes(kind: DeviceKind, per_node: int, nodes: int) -> tuple[int, ...]:
    parts = [2**k for k in range(per_node.bit_length()) if 2**k < per_node] if kind == "gpu" else []
    return (*parts, *(per_node * number for number in range(1, nodes + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneLink:
    """The link between the machines of two zones, or within one."""

    zones: tuple[str, str]
    link: Link
    egress_price: float
    """For one GB that leaves either zone for the other, in the pool's currency."""
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices from which `plait plan` chooses, with all prices and links resolved."""

    name: str
    devices: tuple[PoolDevices, ...]
    links: tuple[ZoneLink, ...] = ()
    """One for each pair of zones; a link from a zone to itself only if its network is not the usual one of its
    devices."""
    currency: str = CATALOGUE_CURRENCY
    notes: tuple[str, ...] = ()
    """Sentences on how an ambiguous short form was read."""

    @property
    def n_devices(self) -> int:
        return sum(entry.count for entry in self.devices)

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.zone for entry in self.devices))

    def link_between(self, one: str, other: str) -> ZoneLink | None:
        """The link of two zones; None for a zone itself if its network is the usual one of its devices."""
        return next((link for link in self.links if set(link.zones) == {one, other}), None)


def pool_of_short_form(text: str) -> Pool:
    """The pool that "128xA100+384xV100" means: all devices in one zone, at the catalogue's prices."""
    said = parse_short_form(text)
    entries = [
        _with_catalogue_price(
            PoolDevices(device=part.device, count=part.per_node * part.nodes, per_node=part.per_node, price=None),
            CATALOGUE_CURRENCY,
        )
        for part in said.parts
    ]
    _check_total(entries, text)
    network = said.network or next((part.between for part in said.parts if part.between), None)
    links = [] if network is None else [ZoneLink(zones=(ONLY_ZONE, ONLY_ZONE), link=network, egress_price=0.0)]
    return Pool(name=text.strip(), devices=tuple(_merged(entries)), links=tuple(links), notes=said.notes)


def read_pool(path: Path) -> Pool:
    """Read a pool.toml; raises PlaitError that says what to write instead."""
    try:
        text = read_regular_file(path, SMALL_FILE_BYTES)
    except OSError as error:
        raise PlaitError(f"cannot read the pool {path}: {error.strerror}; name a pool.toml that exists") from error
    return pool_from_toml(text, str(path))


def pool_from_toml(text: bytes, where: str) -> Pool:
    """Read the text of a pool.toml; `where` names it in errors."""
    try:
        values: dict[str, Any] = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlaitError(f"{where} is not a pool: {error}; docs/guide-pools.md has an example") from error
    check_keys(values, {"device"}, {"link", "currency"}, where)
    currency = values.get("currency", CATALOGUE_CURRENCY)
    if currency not in CURRENCIES:
        raise PlaitError(f'{where}: currency = {currency!r} is not known; write one such as "USD", "EUR" or "JPY"')
    entries = [
        _devices(entry, currency, f"{where}, device {number}")
        for number, entry in enumerate(_tables(values["device"], where, "device"), 1)
    ]
    if len(entries) > MOST_DEVICE_ENTRIES:
        raise PlaitError(f"{where} has {len(entries)} [[device]] entries; write {MOST_DEVICE_ENTRIES} at most")
    _check_total(entries, where)
    zones = tuple(dict.fromkeys(entry.zone for entry in entries))
    given = [
        _zone_link(entry, zones, currency, f"{where}, link {number}")
        for number, entry in enumerate(_tables(values.get("link", []), where, "link"), 1)
    ]
    links = _all_links(given, zones, currency, where)
    return Pool(name=where, devices=tuple(_merged(entries)), links=links, currency=currency)


def _tables(value: Any, where: str, key: str) -> list[Any]:
    if not isinstance(value, list) or (key == "device" and not value):
        raise PlaitError(f"{where}: {key} must be a list of tables; write [[{key}]] before each")
    return value


def _devices(values: Any, currency: str, where: str) -> PoolDevices:
    optional = {"per_node", "zone", "price", "spot_price", "interruptions_per_day"}
    check_keys(values, {"name", "count"}, optional, where)
    if not isinstance(values["name"], str):
        raise PlaitError(f'{where}: name = {values["name"]!r} is not text; write for example name = "A100-40GB"')
    device = find_device(values["name"])
    count = _whole(values["count"], f"{where}: count")
    assumed = list[str]()
    if "per_node" in values:
        per_node = _whole(values["per_node"], f"{where}: per_node")
        if per_node > device.per_node:
            raise PlaitError(
                f"{where}: per_node = {per_node}, but {device.inside} joins {device.per_node} {device.name} at most"
            )
    else:
        per_node = min(device.per_node, count)
        assumed += [f"nodes of {per_node} {device.name}"] if count > 1 else []
    if count % per_node:
        raise PlaitError(
            f"{where}: {count} {device.name} do not fill nodes of {per_node}; write count = "
            f"{count // per_node * per_node or per_node} or another per_node"
        )
    zone = values.get("zone", ONLY_ZONE)
    if not isinstance(zone, str) or not zone.strip():
        raise PlaitError(f'{where}: zone = {zone!r} is not a name; write for example zone = "us-east1-a"')
    spot = _amount(values, "spot_price", where)
    interruptions = _amount(values, "interruptions_per_day", where)
    guessed = f"each spot machine taken back {ASSUMED_INTERRUPTIONS_PER_DAY:g} times a day"
    one = PoolDevices(
        device=device,
        count=count,
        per_node=per_node,
        zone=zone.strip(),
        price=_amount(values, "price", where),
        spot_price=spot,
        interruptions_per_day=ASSUMED_INTERRUPTIONS_PER_DAY if interruptions is None else interruptions,
        assumed=tuple(assumed),
        spot_assumed=(guessed,) if spot is not None and interruptions is None else (),
    )
    return one if one.price is not None else _with_catalogue_price(one, currency)


def _with_catalogue_price(one: PoolDevices, currency: str) -> PoolDevices:
    """The devices at the catalogue's price, if it has one in this currency."""
    device = one.device
    if device.price_per_hour is None or currency != CATALOGUE_CURRENCY:
        return one
    phrase = f"{device.name} at ${device.price_per_hour:g} an hour ({device.price_source})"
    return replace(one, price=device.price_per_hour, assumed=(*one.assumed, phrase))


def _zone_link(values: Any, zones: Sequence[str], currency: str, where: str) -> ZoneLink:
    check_keys(values, {"from", "to"}, {"bandwidth", "egress_price"}, where)
    for key in ("from", "to"):
        if values[key] not in zones:
            raise PlaitError(
                f"{where}: {key} = {values[key]!r} is not a zone of a [[device]]; the zones are {', '.join(zones)}"
            )
    one, other = values["from"], values["to"]
    assumed = list[str]()
    if "bandwidth" in values:
        link = _link(values["bandwidth"], f"{where}: bandwidth")
    else:
        link, phrase = _assumed_link(one, other)
        assumed.append(phrase)
    egress = _amount(values, "egress_price", where)
    if egress is None:
        egress, phrases = _assumed_egress(one, other, currency, where)
        assumed += phrases
    return ZoneLink(zones=(one, other), link=link, egress_price=egress, assumed=tuple(assumed))


def _link(value: Any, where: str) -> Link:
    """A number is a rate measured between two machines; text is a rate or a link, which belongs to each machine unless
    it begins with "+"."""
    if isinstance(value, str):
        return link_from_json(value if value[:1] in ("+", "@") else f"@{value}", where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e3 <= value <= 1e15:
        raise PlaitError(f'{where} = {value!r} is not a rate; write bytes a second such as 1.2e9, or "100G"')
    return replace(link_at_rate(value * 8 / 1e9, "machine"), reached=1.0, all_reduce_reached=1.0)


def _assumed_link(one: str, other: str) -> tuple[Link, str]:
    return _link(ASSUMED_BANDWIDTH, ""), f"{ASSUMED_BANDWIDTH / 1e9:g} GB/s a machine between {one} and {other}"


def _assumed_egress(one: str, other: str, currency: str, where: str) -> tuple[float, list[str]]:
    if one == other:
        return 0.0, []
    if currency != CATALOGUE_CURRENCY:
        raise PlaitError(
            f"{where}: the price of traffic between {one} and {other} is known in {CATALOGUE_CURRENCY} only; add "
            f"egress_price, for one GB, in {currency}"
        )
    return ASSUMED_EGRESS_PRICE, [f"${ASSUMED_EGRESS_PRICE:g} for each GB between {one} and {other}"]


def _all_links(given: Sequence[ZoneLink], zones: Sequence[str], currency: str, where: str) -> tuple[ZoneLink, ...]:
    """A link for each pair of zones: the given links, or assumed ones if none are given."""
    by_pair: dict[frozenset[str], ZoneLink] = {}
    for link in given:
        if (pair := frozenset(link.zones)) in by_pair:
            raise PlaitError(f"{where}: two links join {' and '.join(sorted(pair))}; leave one of them out")
        by_pair[pair] = link
    named = [pair for pair in by_pair if len(pair) > 1]
    for one, other in combinations(zones, 2):
        if (pair := frozenset((one, other))) in by_pair:
            continue
        if named:
            raise PlaitError(
                f"{where} has no [[link]] between {one} and {other}; add one, or leave out all links between zones to "
                "have them assumed"
            )
        link, phrase = _assumed_link(one, other)
        price, phrases = _assumed_egress(one, other, currency, where)
        by_pair[pair] = ZoneLink(zones=(one, other), link=link, egress_price=price, assumed=(phrase, *phrases))
    return tuple(by_pair.values())


def _merged(entries: Sequence[PoolDevices]) -> list[PoolDevices]:
    """The entries, with equal nodes of one zone merged."""
    merged: dict[PoolDevices, int] = {}
    for entry in entries:
        merged[replace(entry, count=entry.per_node)] = merged.get(replace(entry, count=entry.per_node), 0) + entry.count
    return [replace(entry, count=count) for entry, count in merged.items()]


def _check_total(entries: Sequence[PoolDevices], where: str) -> None:
    if (total := sum(entry.count for entry in entries)) > LARGEST_CLUSTER:
        raise PlaitError(f"{where} has {total} devices; name {LARGEST_CLUSTER} or fewer")


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST_CLUSTER:
        raise PlaitError(f"{where} = {value!r} is not a number of devices; write a whole number of 1 or more")
    return value


def _amount(values: Mapping[str, Any], key: str, where: str) -> float | None:
    """A price or another amount of 0 or more; None if the key is missing."""
    if (value := values.get(key)) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlaitError(f"{where}: {key} = {value!r:.80} is not a number; write one, such as {key} = 0.5")
    if not 0 <= value <= _MOST_PRICE:  # an integer of TOML may be too large for a float
        raise PlaitError(f"{where}: {key} = {value!r:.80} is out of range; write a number from 0 to {_MOST_PRICE:g}")
    return float(value)
