"""The kinds of devices on which plait trains, one row each. No other module names one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["cpu", "cuda", "xpu"]
"""The names that torch uses."""
DevicePlace = Literal["host", "accelerator"]
"""On the host, workers share cores and memory, and an operation is done when its call returns. An accelerator has
its own memory and one worker, and queues its work in streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """What distinguishes one kind of device from the others."""

    name: DeviceName
    place: DevicePlace
    messages: Literal["gloo", "nccl", "xccl"]
    """torch.distributed's backend for tensors that lie on the device."""
    kernels: Literal["none", "CUDA's"] = "none"
    """What torch offers for it beyond the usual operations: attention over documents of any length, products grouped
    by expert, and steps recorded as graphs. Without these, plait uses the usual operations."""
    proof: Literal["tested", "written, not run"] = "tested"

    @property
    def is_accelerator(self) -> bool:
        return self.place == "accelerator"

    @property
    def process_groups(self) -> str:
        """The backend of a run's process groups. Tensors in the host's memory always travel by gloo."""
        return f"cpu:gloo,{self.name}:{self.messages}" if self.is_accelerator else self.messages


DEVICE_TRAITS: Mapping[DeviceName, DeviceTraits] = {
    row.name: row
    for row in (
        DeviceTraits(name="cpu", place="host", messages="gloo"),
        # AMD's GPUs, too: torch's builds for ROCm call them "cuda" and RCCL "nccl". These have not been run.
        DeviceTraits(name="cuda", place="accelerator", messages="nccl", kernels="CUDA's"),
        # Intel's GPUs. torch.xpu has the functions of torch.cuda that accelerator.py uses.
        DeviceTraits(name="xpu", place="accelerator", messages="xccl", proof="written, not run"),
    )
}

ACCELERATORS = tuple(row for row in DEVICE_TRAITS.values() if row.is_accelerator)
ON_PAPER: DeviceName = "cuda"
"""What the accelerators of a cluster count as that need not be there."""


def traits_of(name: str) -> DeviceTraits:
    """The row of a device by torch's name; raises KeyError for a device that plait does not train on."""
    return DEVICE_TRAITS[name]  # pyright: ignore[reportArgumentType]
