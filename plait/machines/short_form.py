"""Clusters in a few characters: "512xH100", "2x(8xA100)+400G", "macbook+4090@1G", "4xp5.48xlarge"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from plait.errors import PlaitError
from plait.layout import LARGEST_CLUSTER
from plait.machines.catalog import (
    Device,
    Link,
    find_device,
    find_instance,
    find_link,
    is_device,
    link_at_rate,
    link_names,
    nearest_links_text,
    slice_chips,
)
from plait.units import counted

# Note [the grammar of short forms]
#   cluster := part {"+" part} [network]
#   part    := [COUNT "x"] DEVICE  |  COUNT "x(" COUNT "x" DEVICE ")"      2x(8xA100): two nodes of eight
#            | [COUNT "x"] MACHINE |  [COUNT "x"] DEVICE "x" COUNT         4xH100x8: four nodes of eight
#   network := "+" RATE  |  "@" RATE  |  "+" LINK  |  "@" LINK             between the nodes; the usual one if left out
#   RATE    := NUMBER ("M" | "G" | "T")                                    bits a second; 50GB/s is bytes
# DEVICE is any name of the catalogue, with or without its memory size ("A100", "a100-40gb", "TPU v5p"); LINK is a link
# of it ("infiniband-ndr"). MACHINE is a whole node: a cloud's instance ("p5.48xlarge"), a DGX or HGX ("DGX H100"), a
# TPU slice ("v5p-256"). Upper and lower case are the same.
# A count of devices becomes full nodes of their usual size: 512xH100 is 64 nodes of 8. Racks and TPU slices may be used
# in part, by the fewest equal ones: 128xGB200 is 2 racks of 64.
# "+400G" is what data centres quote: a network card of 400 Gbit/s for each *device*, with direct memory access.
# "@1G" is what offices and homes have: one network card of 1 Gbit/s for each *machine*, shared by its devices.

_COUNTED = re.compile(r"(-?\d+)\s*[x×*]\s*(.+)", re.IGNORECASE)
_COUNTED_LAST = re.compile(r"(.*[^\sx×*(])\s*[x×*]\s*(\d+)", re.IGNORECASE)
_MOST_GBIT_PER_S = 1e6
_RATE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([MGTmgt])(?:(b|bit)?(?:/s|ps)?|(B(?:/s|ps)))")
_GBIT = {"m": 1e-3, "g": 1.0, "t": 1e3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortFormPart:
    """Equal nodes of one kind of device."""

    device: Device
    per_node: int
    nodes: int
    between: Link | None = None
    """The link between machines of this name; None for the usual link between nodes of the device."""
    note: str = ""
    """The meaning of a whole machine's or slice's name; empty if devices are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortForm:
    """A parsed short form; `network` is None where it names none, which means the usual one."""

    parts: tuple[ShortFormPart, ...]
    network: Link | None
    notes: tuple[str, ...] = ()
    """Sentences on how the text was read, where a person could mean something else."""


def parse_short_form(text: str) -> ShortForm:
    """Parse a short form, see Note [the grammar of short forms]; raises PlaitError for any other text."""
    pieces = re.split(r"([+@])", f"+{text}")[1:]
    marked = list(zip(pieces[::2], (piece.strip() for piece in pieces[1::2]), strict=True))
    if any(not piece for _, piece in marked):
        raise PlaitError(
            f'"{text}" is not a cluster; write for example 512xH100, "2x(8xA100)+400G" or "macbook+4090@1G"'
        )
    mark, last = marked[-1]
    joined = parse_network(last, mark) if mark == "@" or _is_network(last) else None
    parts = marked[:-1] if joined else marked
    for before, piece in parts:
        if before == "@" or _is_network(piece):
            raise PlaitError(f'"{text}" names the network before its end; write it once, last, as in "macbook+4090@1G"')
    if not parts:
        raise PlaitError(f'"{text}" is a network without devices; write for example "2x(8xA100)+400G"')
    read = tuple(_part(piece) for _, piece in parts)
    notes = [part.note for part in read if part.note]
    if joined and len(read) == 1 and read[0].nodes == 1:
        notes.append(_check_idle_network(text, parts[0][1], f"{mark}{last}", read[0]))
    return ShortForm(parts=read, network=joined, notes=tuple(notes))


def parse_network(text: str, mark: str) -> Link:
    """The link that "400G" or "infiniband-ndr" means; a rate is that of each device after the mark "+", of each
    machine after "@"."""
    if text.lower() in link_names():
        return find_link(text)
    rate = _RATE.fullmatch(text)
    if rate is None:
        raise PlaitError(f'"{text}" is neither a rate such as 400G nor a link; {nearest_links_text(text)}')
    gbit_per_s = float(rate[1]) * _GBIT[rate[2].lower()] * (8 if rate[4] else 1)
    if gbit_per_s <= 0:
        raise PlaitError(f'a link of "{text}" carries nothing; write a rate above zero, for example 1G')
    if gbit_per_s > _MOST_GBIT_PER_S:
        raise PlaitError(f'no link is as fast as "{text[:40]}"; write a rate such as 400G')
    return link_at_rate(gbit_per_s, "machine" if mark == "@" else "device")


def _is_network(piece: str) -> bool:
    return bool(_RATE.fullmatch(piece)) or piece.lower() in link_names()


def _check_idle_network(text: str, piece: str, network: str, part: ShortFormPart) -> str:
    """That a network joins nothing where there is one machine; raises PlaitError where several may be meant."""
    if part.per_node == 1 or piece.endswith(")") or part.note:
        return f'"{network}" changes nothing: there is one machine'
    name = part.device.name
    raise PlaitError(
        f'"{text}" is one machine of {part.per_node} {name}, and "{network}" is a network between machines; for '
        f'{part.per_node} machines write "{part.per_node}x(1x{name}){network}", for two such machines '
        f'"2x({part.per_node}x{name}){network}", for this one leave the network out'
    )


def _part(piece: str) -> ShortFormPart:
    first = _COUNTED.fullmatch(piece)
    count, rest = (_count(first[1], piece), first[2].strip()) if first else (1, piece)
    is_node = rest.startswith("(") and rest.endswith(")")
    inner = rest[1:-1].strip() if is_node else rest
    if machine := _whole_machine(inner, count):
        return machine
    if not is_node:
        last = _COUNTED_LAST.fullmatch(rest)
        if last is None or not (is_device(last[1]) or find_instance(last[1])):  # the "x" of "RTX 4090" counts nothing
            return _full_nodes(find_device(rest), count)
        if first is None:
            return _full_nodes(find_device(last[1]), _count(last[2], piece))
        inner = f"{last[2]}x{last[1]}"
    node = _COUNTED.fullmatch(inner)
    per_node, name = (_count(node[1], piece), node[2]) if node else (1, inner)
    if _whole_machine(name, per_node):
        raise PlaitError(
            f'"{name}" is a whole machine, and "{piece}" puts it into one; write {count * per_node}x{name}'
        )
    known = find_device(name)
    if per_node > known.per_node:
        raise PlaitError(
            f'"{piece}" has {per_node} {known.name} in a node, but {known.inside} joins {known.per_node} at most; '
            f"write {math.ceil(count * per_node / known.per_node)}x({known.per_node}x{name}), or a cluster.json"
        )
    return ShortFormPart(device=known, per_node=per_node, nodes=count)


def _whole_machine(name: str, count: int) -> ShortFormPart | None:
    """`count` machines or slices of this name; None where it names a device. Raises PlaitError for a slice that cannot
    be."""
    if found := slice_chips(name):
        return _slices(name, *found, count)
    if not (machine := find_instance(name)):
        return None
    link = machine.between
    between = parse_network(link[1:], link[0]) if link.startswith("@") else find_link(link)
    devices = f"{machine.devices} × {machine.device.name}" if machine.devices > 1 else f"one {machine.device.name}"
    note = f"{name} is a machine with {devices}"
    return ShortFormPart(device=machine.device, per_node=machine.devices, nodes=count, between=between, note=note)


def _slices(name: str, kind: str, chips: int, counts: str, count: int) -> ShortFormPart:
    device = find_device("v5e" if kind == "v5litepod" else kind)
    part = device.node_part or 1
    if not 0 < chips <= device.per_node or chips % part:
        each = " (two a chip)" if counts == "TensorCores" else ""
        raise PlaitError(
            f'"{name}" is not a slice: the number counts {counts}{each}, and a slice of {device.name} has {part} to '
            f"{device.per_node} chips{f', a multiple of {part}' if part > 1 else ''}; write the chips, as in "
            f"{max(part, min(device.per_node, chips // part * part))}x{device.name}"
        )
    number = f"{counts}, two a chip: {counted(chips, 'chip')}" if counts == "TensorCores" else "chips"
    return ShortFormPart(device=device, per_node=chips, nodes=count, note=f"the number in {name} counts {number}")


def _count(digits: str, piece: str) -> int:
    if len(digits) > len(str(LARGEST_CLUSTER)) or (count := int(digits)) > LARGEST_CLUSTER:
        raise PlaitError(f'"{piece[:20]}…" has too many devices; write a count of {LARGEST_CLUSTER} or fewer')
    if count < 1:
        raise PlaitError(f'"{piece}" has no devices; write a count of 1 or more')
    return count


def _full_nodes(device: Device, count: int) -> ShortFormPart:
    """`count` devices in the fewest equal nodes of their kind; raises PlaitError if they do not fill any."""
    usual, part = device.per_node, device.node_part
    if count <= usual:
        return ShortFormPart(device=device, per_node=count, nodes=1)
    for nodes in range(math.ceil(count / usual), count // (part or usual) + 1):
        if count % nodes == 0 and count // nodes % (part or usual) == 0:
            return ShortFormPart(device=device, per_node=count // nodes, nodes=nodes)
    fit, equal = part or usual, math.gcd(count, usual)
    raise PlaitError(
        f"{count} {device.name} do not fill nodes of {usual}; take {count // fit * fit} or {(count // fit + 1) * fit}, "
        f"or write the nodes, as in {count // equal}x({equal}x{device.name})"
    )
