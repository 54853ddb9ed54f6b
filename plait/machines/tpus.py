"""The TPU chips of a machine, found without torch, and the reasons why torch does not see them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from plait.errors import PlaitError
from plait.machines.gpus import ON_PROCESSOR, SUMMED_ONES, GpuLibrary, Host
from plait.units import counted

PCI = "/sys/bus/pci/devices"
GOOGLE = "0x1ae0"
GENERATIONS: Mapping[str, str] = {
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7",
}
"""Names by the chip's number on the PCI bus, as in torch_tpu 0.2.0 (_internal/utils/hardware.py). Other devices of
Google's, such as the network cards of its virtual machines, have other numbers."""
DEVICES_PER_CHIP: Mapping[str, int] = {"TPU v7": 2}
"""Number of devices per chip that programs see, if not one."""
_CUBES = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
_FLAT = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
TOPOLOGIES: Mapping[str, Mapping[int, str]] = {
    "TPU v4": _CUBES,
    "TPU v5p": _CUBES,
    "TPU v5e": _FLAT,
    "TPU v6e": _FLAT,
    "TPU v7": {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"},
}
"""Topology by number of devices on one machine, from the same file."""
TPU_PYTHON = (3, 12)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""The versions for which torch_tpu 0.2.0 has libraries."""
INSTALL = "pip install torch_tpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuChips:
    """The chips that a machine, or a container, may use."""

    count: int
    name: str = ""
    """Generation, such as "TPU v5e"; empty if there are no chips."""

    @property
    def devices(self) -> int:
        """Number of devices that programs see."""
        return self.count * DEVICES_PER_CHIP.get(self.name, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSoftware:
    """Software in addition to plait that training on chips requires."""

    python: tuple[int, int]
    torch: str
    torch_tpu: str | None
    """Its version; None if it is not installed."""
    libtpu: str | None


def find_tpu_chips(host: Host) -> TpuChips:
    """The chips on the PCI bus; a container has only those whose device files it was given."""
    found = [
        GENERATIONS.get((host.text(f"{PCI}/{name}/device") or "").strip(), "")
        for name in host.names_in(PCI)
        if (host.text(f"{PCI}/{name}/vendor") or "").strip() == GOOGLE
    ]
    names = [name for name in found if name]
    if not names:
        return TpuChips(count=0)
    handed = sum(name.isdecimal() for name in host.names_in("/dev/vfio"))
    handed += sum(bool(re.fullmatch(r"accel\d+", name)) for name in host.names_in("/dev"))
    return TpuChips(count=min(len(names), handed), name=names[0]) if handed else TpuChips(count=0)


def tpu_software() -> TpuSoftware:
    """The software that is installed in this Python."""
    found: dict[str, str | None] = {}
    for package in ("torch", "torch_tpu", "libtpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return TpuSoftware(
        python=sys.version_info[:2],
        torch=found["torch"] or "",
        torch_tpu=found["torch_tpu"],
        libtpu=found["libtpu"],
    )


def check_tpus_are_seen(host: Host, software: TpuSoftware, *, sees_tpus: bool, are_named: bool) -> None:
    """Raise PlaitError if the machine has chips that torch does not see, or has none although the recipe names TPUs."""
    if sees_tpus:
        return
    chips = find_tpu_chips(host)
    if chips.count:
        here = f"this machine has {counted(chips.count, 'chip')} of {chips.name}"
        raise PlaitError(f"{here}, and {why_unseen(software)}, or {ON_PROCESSOR}")
    if are_named:
        raise PlaitError(
            'run.devices = "tpu", but this machine has no TPU: no chip of Google\'s is on its PCI bus, or none was '
            "given to this container; remove run.devices to use what is here"
        )


def why_unseen(software: TpuSoftware) -> str:
    """Why torch does not see an existing chip, and what to do."""
    python, torch = software.python, _version(software.torch)
    if python < TPU_PYTHON:
        return (
            f"torch_tpu, which torch needs for them, needs Python {_dotted(TPU_PYTHON)} or newer, not "
            f"{_dotted(python)}; install plait with a newer one (make install PYTHON=python{_dotted(TPU_PYTHON)})"
        )
    if not OLDEST_TORCH <= torch <= NEWEST_TORCH:
        return (
            f"torch_tpu, which torch needs for them, is for torch {_dotted(OLDEST_TORCH)} to {_dotted(NEWEST_TORCH)}, "
            f"not {software.torch}; install one of these"
        )
    if software.torch_tpu is None:
        return f"torch_tpu, which torch needs for them, is not installed; {INSTALL}"
    if software.libtpu is None:
        return "libtpu, the driver that torch_tpu calls, is not installed; pip install libtpu"
    return (
        f"torch {software.torch} with torch_tpu {software.torch_tpu} does not see them; run "
        "python -c 'import torch_tpu' and see what it prints, unset TORCH_DEVICE_BACKEND_AUTOLOAD if it is 0"
    )


def check_tpu_computes(library: GpuLibrary, number: int) -> None:
    """Raise PlaitError if this process's chip cannot add: another program uses it, or its driver does not start."""
    try:
        found = library.sum_of_ones(number, SUMMED_ONES)
        what = f"{SUMMED_ONES:,} ones come to {found:g} there"
    except RuntimeError as error:
        found, what = None, str(error).partition("\n")[0]
    if found != SUMMED_ONES:
        raise PlaitError(
            f"chip {number}, a {library.gpu(number).name}, does not compute ({what}); a chip takes one program at a "
            f"time, so end any other that uses it (`sudo lsof /dev/vfio/* /dev/accel*` lists them), or {ON_PROCESSOR}"
        )


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
