"""The devices and links that plait knows, read from catalog.toml; for the planner, which needs no torch."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from plait.errors import PlaitError

DeviceKind = Literal["gpu", "tpu", "cpu"]
ClockInSteps = Literal["unknown", "kept"]
Shape = Literal["switch", "torus", "shared"]

_PRECISIONS = {
    "bf16": "bf16_dense_tflops", "fp16": "bf16_dense_tflops", "fp8": "fp8_dense_tflops", "fp4": "fp4_dense_tflops",
    "tf32": "tf32_dense_tflops", "float32": "float32_tflops",
}  # fmt: skip
# Words in a device's name that do not distinguish it from others: makers, sockets, kinds of memory, and the size of a
# TPU slice ("v3-256").
_NOISE = re.compile(
    r"\(.*?\)|\b(?:nvidia|geforce|rtx|tesla|amd|instinct|google|cloud|tpu|apple|gpu|processor|hgx|dgx|nvl72|sxm\d?"
    r"|hbm\d\w*|\d+w|[\d.]+\s*tb/s)\b|(?<=\bv\d)-\d+\b|(?<=\bv\d[a-z])-\d+\b"
)
_MIG_SLICE = re.compile(r"\bmig ((\d)g)\.(\d+)gb")
_MEMORY = re.compile(r"\b(\d+)\s*gi?b\b")
_MEMORY_AS_TYPED = re.compile(r"\b(\d+)\s*g(?:i?b)?\b")
"""People also write "A100-40G"; drivers do not, and "3g" in their names of MIG slices is no size."""

_WITHOUT_PRICE: Mapping[str, Any] = {"price_per_hour": None, "price_source": ""}
_NVIDIA_MACHINE = re.compile(r"(?:nvidia\s+)?[dh]gx[\s_-]+(.+)")
_TPU_SLICE = re.compile(r"(?:google\s+)?(?:cloud\s+)?(?:tpu[\s_-]*)?(v\d+\s?[a-z]*|(?<=tpu)7x)-(\d+)")

SMALLEST_AMOUNT, LARGEST_AMOUNT = 1e-9, 1e24
"""Bounds of a device's or a link's figures: beyond any machine, and within what step times can be computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or processor as programs see it: a GPU, a TPU chip, all cores of a machine."""

    name: str
    vendor: str
    kind: DeviceKind
    peak_flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s by precision (bf16, fp16, fp8, fp4, tf32, float32); a precision that the device lacks is absent."""
    achievable: float | None
    """Share of the bf16 peak that large matrix products reach, more than all of it where a device runs faster than its
    maker states; None where it was never measured."""
    memory_bytes: int
    """Memory that a program can use, without the driver's share."""
    memory_bytes_per_s: float
    inside: str
    """Name of the link that joins the devices of a node."""
    per_node: int
    """Largest number of devices that the `inside` link joins: those of a server, of a rack, of a TPU slice."""
    node_part: int | None
    """Smallest number of devices that can be rented as part of a node; any multiple of it can be rented, too. None:
    only whole nodes."""
    between: str
    """Name of the most common link between nodes of this device."""
    price_per_hour: float | None
    """US dollars for one device."""
    watts: float | None
    units: int | None
    """Number of multiprocessors, compute units or cores; a product's tiles run on them in waves."""
    source: str
    clock_in_steps: ClockInSteps = "unknown"
    """Whether products reach the `achievable` share in whole steps of plait, too, whatever power the device takes."""
    achievable_of: str = ""
    """The device whose `achievable` is assumed of this one; "" where it is its own."""
    price_source: str = ""
    """Where and when `price_per_hour` was read; empty if there is no price."""

    def __post_init__(self) -> None:
        rates = {f"peak_flops of {precision}": rate for precision, rate in self.peak_flops.items()}
        fields = ("memory_bytes", "memory_bytes_per_s", "per_node")
        _must_be_amounts(self.name, {key: getattr(self, key) for key in fields} | rates)

    def flops(self, precision: str) -> float:
        """Peak FLOP/s in this precision; raises PlaitError where the device has none or none was published."""
        if precision in self.peak_flops:
            return self.peak_flops[precision]
        known = ", ".join(self.peak_flops)
        raise PlaitError(f"the catalogue knows no {precision} arithmetic of {self.name}; choose one of {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between the devices of a node, or between nodes."""

    name: str
    bytes_per_s: float
    """Line rate in one direction. "switch": the rate of each device. "shared": the rate of the one wire that all
    devices of a node use together. "torus": the rate of each of the two wires that a device has along each axis."""
    latency_s: float
    """Seconds of one step of a ring, from a device to the next, software included."""
    reached: float
    """Share of the line rate that large ring collectives reach."""
    all_reduce_reached: float
    """Share of the line rate that an all-reduce reaches: more than `reached` where the switch itself adds up."""
    shape: Shape
    axes: int = 1
    """Axes of a torus; 1 for any other network."""
    source: str

    def __post_init__(self) -> None:
        _must_be_amounts(self.name, {key: getattr(self, key) for key in ("bytes_per_s", "reached", "axes")})
        if self.latency_s < 0:
            raise PlaitError(f"{self.name}: latency_s = {self.latency_s:g} is before it was sent; write 0 or more")


def find_device(name: str) -> Device:
    """The device that a person means by a name such as "H100", "a100-40gb", "RTX 4090" or "TPU v5p"; raises
    PlaitError with the nearest names."""
    text = name.lower()
    size = _MEMORY.search(text) or _MEMORY_AS_TYPED.search(text)
    word = _word(text)
    entries = [entry for entry in _entries().values() if word in map(_word, entry["aliases"])]
    if not entries:
        raise PlaitError(f'"{name}" is not a device of the catalogue; {_nearest_devices(word)}')
    if not size:
        return _device(min(entries, key=lambda entry: len(entry["key"].split())))
    return _device_of_size(entries, int(size[1]))


def is_device(name: str) -> bool:
    """Whether the catalogue has a device of this name, regardless of its memory."""
    word = _word(name.lower())
    return any(word in map(_word, entry["aliases"]) for entry in _entries().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A whole machine as clouds and NVIDIA name it: "p5.48xlarge", "DGX H100"."""

    device: Device
    devices: int
    between: str
    """The link between several of them, or a rate of each machine: "@80G"."""
    source: str


def find_instance(name: str) -> Instance | None:
    """The machine of this name; None where the name is not that of a whole machine. Raises PlaitError for a DGX or HGX
    of a device that the catalogue lacks."""
    plain = re.sub(r"[^a-z0-9]+", "", name.lower()).removeprefix("standard")
    for key, entry in _catalog()["instance"].items():
        if plain in (re.sub(r"[^a-z0-9]+", "", alias) for alias in (key, *entry.get("aliases", ()))):
            device = find_device(entry["device"])
            return Instance(device=device, devices=entry["devices"], between=entry["between"], source=entry["source"])
    if not (made := _NVIDIA_MACHINE.match(name.lower())):
        return None
    device = find_device(made[1])
    source = f"NVIDIA's machine with all devices that {device.inside} joins"
    return Instance(device=device, devices=device.per_node, between=device.between, source=source)


def slice_chips(name: str) -> tuple[str, int, str] | None:
    """The TPU, the chips of the slice and what the number counts, in "v5p-256": ("v5p", 128, "TensorCores"); None where
    the name is not that of a slice. Raises PlaitError for a TPU of which Google names no slices so."""
    if not (named := _TPU_SLICE.fullmatch(name.lower().strip())):
        return None
    kind, number = re.sub(r"[^a-z0-9]", "", named[1]), int(named[2][:9])
    counts = _catalog()["tpu_slices"].get(kind)
    if counts is None:
        device = find_device(kind if kind.startswith("v") else f"v{kind}")
        raise PlaitError(
            f'"{name}" may count chips or TensorCores, as Google names no slices of {device.name} by a number; write '
            f"the chips, as in {number}x{device.name}"
        )
    return kind, number // 2 if counts == "TensorCores" else number, counts


def find_device_by_driver_name(name: str) -> Device | None:
    """The device whose driver reports this name, such as "NVIDIA A100-SXM4-80GB"; None if the catalogue has none."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fits = (entry for key, entry in _entries().items() if words.issuperset(key.split()))
    found = next((entry for entry in fits if ("laptop" in words) == ("laptop" in entry["key"])), None)
    if found is None:
        return None
    size, part = _MEMORY.search(name.lower()), _MIG_SLICE.search(name.lower())
    whole = _device_of_size([found], int(size[1])) if size and int(size[1]) in _sizes(found) else _device(found)
    return _mig_slice(whole, found.get("mig_units", {}), part) if part else whole


def _mig_slice(whole: Device, units_of: Mapping[str, int], part: re.Match[str]) -> Device:
    """A slice such as 3g.40gb: the units of its kind, else its sevenths; its eighths of the memory and its speed."""
    slices, memory_gb = int(part[2]), int(part[3])
    units = units_of.get(f"{part[1]}.{memory_gb}gb", units_of.get(part[1]))
    share = units / whole.units if units and whole.units else slices / 7
    memory = 1.0 if slices == 7 else min(8, round(8 * memory_gb * 2**30 / whole.memory_bytes)) / 8
    return replace(
        whole,
        peak_flops={precision: rate * share for precision, rate in whole.peak_flops.items()},
        memory_bytes=round(whole.memory_bytes * memory),
        memory_bytes_per_s=whole.memory_bytes_per_s * memory,
        units=whole.units and round(whole.units * share),
        **_WITHOUT_PRICE,
    )


def find_link(name: str) -> Link:
    """The catalogue's link of this name; raises PlaitError with the nearest names."""
    entry = _catalog()["link"].get(name.lower())
    if entry is None:
        raise PlaitError(f'"{name}" is not a link of the catalogue; {nearest_links_text(name)}')
    return Link(
        name=name.lower(),
        bytes_per_s=entry["gbytes_per_s"] * 1e9,
        latency_s=entry["latency_us"] / 1e6,
        reached=entry["reached"],
        all_reduce_reached=entry.get("all_reduce_reached", entry["reached"]),
        shape=entry["shape"],
        axes=entry.get("axes", 1),
        source=entry["source"],
    )


def nearest_links_text(name: str) -> str:
    """Suggestions for a name that no link has."""
    near = difflib.get_close_matches(name.lower(), list(_catalog()["link"]), n=3, cutoff=0.6)
    return f"the nearest names are {', '.join(near)}" if near else "write for example infiniband-ndr"


def link_at_rate(gbit_per_s: float, of: Literal["device", "machine"]) -> Link:
    """A network link of this rate, with one card per device (RoCE and similar) or one card per machine (Ethernet, TCP).

    A rate that the catalogue lacks takes its latency and its reached share from the catalogue's entry whose rate is
    nearest as a ratio.
    """
    prefix = "roce-" if of == "device" else "ethernet-"
    names = [name for name in _catalog()["link"] if name.startswith(prefix)]
    rate = gbit_per_s / 8 * 1e9
    near = min((find_link(name) for name in names), key=lambda known: abs(math.log(known.bytes_per_s / rate)))
    if near.bytes_per_s == rate:
        return near
    return replace(near, name=f"{prefix}{gbit_per_s:g}g", bytes_per_s=rate, source=f"as {near.name}, at another rate")


def device_names() -> tuple[str, ...]:
    """Names of all devices in the catalogue, as their makers write them."""
    return tuple(entry["name"] for entry in _entries().values())


def link_names() -> tuple[str, ...]:
    """Names of all links in the catalogue."""
    return tuple(_catalog()["link"])


def _must_be_amounts(name: str, amounts: Mapping[str, float]) -> None:
    for what, amount in amounts.items():
        if not amount > 0:
            raise PlaitError(f"{name}: {what} = {amount:g} cannot be; write more than 0")
        if not SMALLEST_AMOUNT <= amount <= LARGEST_AMOUNT:
            raise PlaitError(f"{name}: {what} = {amount:g} cannot be; write {SMALLEST_AMOUNT:g} to {LARGEST_AMOUNT:g}")


def _device(entry: Mapping[str, Any]) -> Device:
    lacks = entry.get("without", ())
    like = _catalog()["device"].get(entry.get("achievable_as", ""), {})
    rates = {p: entry[key] * 1e12 for p, key in _PRECISIONS.items() if key in entry and p not in lacks}
    usable = entry.get("usable_memory", _catalog()["usable_memory"][entry["vendor"]])
    return Device(
        name=entry["name"],
        vendor=entry["vendor"],
        kind=entry.get("kind", "gpu"),
        peak_flops=rates,
        achievable=entry.get("achievable", like.get("achievable")),
        achievable_of=like.get("name", ""),
        clock_in_steps=entry.get("clock_in_steps", "unknown"),
        memory_bytes=round(entry["memory_gb"] * 2**30 * usable),
        memory_bytes_per_s=entry["memory_gbytes_per_s"] * 1e9,
        inside=entry["inside"],
        per_node=entry["per_node"],
        node_part=entry.get("node_part"),
        between=entry["between"],
        price_per_hour=entry.get("price_per_hour"),
        watts=entry.get("watts"),
        units=entry.get("units"),
        source=entry["source"],
        price_source=entry.get("price_source", ""),
    )


def _device_of_size(entries: Sequence[Mapping[str, Any]], memory_gb: int) -> Device:
    for entry in entries:
        if memory_gb == entry["memory_gb"]:
            return _device(entry)
    for entry in entries:
        if memory_gb in _sizes(entry):
            base = re.sub(r" \d+GB$", "", entry["name"])
            # The price is that of the size which the entry describes.
            return _device({**entry, "name": f"{base} {memory_gb}GB", "memory_gb": memory_gb, **_WITHOUT_PRICE})
    sizes = sorted({size for entry in entries for size in _sizes(entry)})
    plain = re.sub(r" \d+GB$", "", entries[0]["name"])
    raise PlaitError(f"no {plain} has {memory_gb} GB; the catalogue knows {' and '.join(map(str, sizes))} GB")


def _sizes(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return (entry["memory_gb"], *entry.get("memory_sizes_gb", ()))


def _word(text: str) -> str:
    """The part of a name that identifies the device, without maker and memory: "a100" for "nvidia a100-sxm4-80gb",
    etc."""
    plain = _NOISE.sub(" ", _MEMORY_AS_TYPED.sub(" ", text.lower()))
    return re.sub(r"[^a-z0-9]+", "", plain).removeprefix("tpu").removeprefix("rtx")


def _nearest_devices(word: str) -> str:
    names: dict[str, list[str]] = {}
    for entry in _entries().values():
        for alias in entry["aliases"]:
            names.setdefault(_word(alias), []).append(entry["name"])
    names |= {_word(key): [key] for key in _catalog()["instance"]}
    close = difflib.get_close_matches(word, list(names), n=3, cutoff=0.6)
    near = dict.fromkeys(name for match in close for name in names[match])
    if not near:
        return "describe yours in a cluster.json"
    return f"the nearest {'are' if len(near) > 1 else 'is'} {', '.join(near)}"


def _entries() -> dict[str, dict[str, Any]]:
    return {key: {**entry, "key": key} for key, entry in _catalog()["device"].items()}


@cache
def _catalog() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "catalog.toml").read_text(encoding="utf-8"))
