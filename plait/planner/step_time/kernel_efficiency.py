"""How the libraries' kernels go about products, attention and the loss on each kind of device."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.catalog import Device
from plait.planner.calibration.constants import constant_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEfficiency:
    """The habits of one kind of device; the shares of its rate that kernels reach at the best stand in
    software_profile.py."""

    tiles: bool
    """Whether a product's result is dealt out to the device's units in large tiles (roofline.py)."""
    block: int
    """Else the rows and columns that a product is filled up to."""
    head_power: float
    """Fused attention loses with heads narrower than 128 by this power of the ratio,"""
    few_keys: float
    """and with sequences of so many keys half of its rate."""
    attention_backward: float
    """Time of its backward pass against its forward."""
    logit_flops: float
    """What the loss computes for each logit beside moving it."""


GPU_KERNELS = KernelEfficiency(**constant_fields("kernels_gpu"))
TPU_KERNELS = KernelEfficiency(**constant_fields("kernels_tpu"))
CPU_KERNELS = KernelEfficiency(**constant_fields("kernels_cpu"))


def kernel_efficiency_of(device: Device) -> KernelEfficiency:
    """Those that run on a device."""
    if device.kind == "cpu":
        return CPU_KERNELS
    return GPU_KERNELS if device.units else TPU_KERNELS
