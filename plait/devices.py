"""The kinds of devices on which plait trains, one row each. No other module names one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["cpu", "cuda", "xpu", "tpu"]
"""The names that torch uses."""
NamedDevice = Literal["cpu", "tpu"]
"""The kinds that a recipe may name in run.devices; GPUs are named by their numbers."""
DevicePlace = Literal["host", "accelerator"]
"""On the host, workers share cores and memory, and an operation is done when its call returns. An accelerator has
its own memory and one worker, and queues its work in streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """The differences between one kind of device and the others."""

    name: DeviceName
    place: DevicePlace
    messages: Literal["gloo", "nccl", "xccl", "tpu_dist"]
    """torch.distributed's backend for tensors on the device."""
    kernels: Literal["none", "CUDA's"] = "none"
    """torch's features for it beyond the usual operations: attention over documents of any length, products grouped by
    expert, and steps recorded as graphs. Without these, plait uses the usual operations."""
    operations: Literal["launched", "compiled"] = "launched"
    """"launched": one by one, in streams. "compiled": collected, and compiled together for each new shape, which takes
    seconds; so attention, documents and experts keep to the shapes that the plan fixes. There are no streams, no pinned
    memory and no events; what torch offers for such a device is in torch.accelerator."""
    proof: Literal["tested", "written, not run", "run without a chip"] = "tested"
    """ "run without a chip": with the maker's own backend for torch, on a CPU."""

    @property
    def is_accelerator(self) -> bool:
        return self.place == "accelerator"

    @property
    def is_compiled(self) -> bool:
        """Whether operations are compiled for each shape (`operations`)."""
        return self.operations == "compiled"

    @property
    def process_groups(self) -> str:
        """The backend of a run's process groups. Tensors in the host's memory always use gloo."""
        return f"cpu:gloo,{self.name}:{self.messages}" if self.is_accelerator else self.messages


DEVICE_TRAITS: Mapping[DeviceName, DeviceTraits] = {
    row.name: row
    for row in (
        DeviceTraits(name="cpu", place="host", messages="gloo"),
        # AMD's GPUs, too: torch's builds for ROCm call them "cuda" and RCCL "nccl". These have not been run.
        DeviceTraits(name="cuda", place="accelerator", messages="nccl", kernels="CUDA's"),
        # Intel's GPUs. torch.xpu has the functions of torch.cuda that accelerator.py uses.
        DeviceTraits(name="xpu", place="accelerator", messages="xccl", proof="written, not run"),
        # Google's TPUs, with TorchTPU: the package torch_tpu, which torch loads if there is a chip.
        DeviceTraits(
            name="tpu",
            place="accelerator",
            messages="tpu_dist",
            operations="compiled",
            proof="run without a chip",
        ),
    )
}

ACCELERATORS = tuple(row for row in DEVICE_TRAITS.values() if row.is_accelerator)
ON_PAPER: DeviceName = "cuda"
"""The kind that accelerators of a cluster count as if they are not present."""


def traits_of(name: str) -> DeviceTraits:
    """The row of a device by torch's name; raises KeyError for a device that plait does not train on."""
    return DEVICE_TRAITS[name]  # pyright: ignore[reportArgumentType]
