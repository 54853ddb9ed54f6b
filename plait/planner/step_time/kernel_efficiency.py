"""How efficiently the libraries' kernels compute products, attention and the loss on each kind of device."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.catalog import Device
from plait.planner.calibration.constants import constant_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEfficiency:
    """Efficiency of the kernels of one kind of device; their best shares of the peak are in software_profile.py."""

    tiles: bool
    """Whether a product's result is computed in large tiles, one per unit of the device (roofline.py)."""
    block: int
    """Without tiles: rows and columns are padded to a multiple of this."""
    head_power: float
    """Fused attention loses with heads narrower than 128: rate × (head width / 128) ** head_power."""
    few_keys: float
    """Sequence length at which fused attention reaches half of its rate."""
    attention_backward: float
    """Seconds of attention's backward pass over those of its forward pass."""
    logit_flops: float
    """FLOPs of the loss for each logit, beside moving it."""


GPU_KERNELS = KernelEfficiency(**constant_fields("kernels_gpu"))
TPU_KERNELS = KernelEfficiency(**constant_fields("kernels_tpu"))
CPU_KERNELS = KernelEfficiency(**constant_fields("kernels_cpu"))


def kernel_efficiency_of(device: Device) -> KernelEfficiency:
    """The kernel efficiency of a device's kind."""
    if device.kind == "cpu":
        return CPU_KERNELS
    return GPU_KERNELS if device.units else TPU_KERNELS
