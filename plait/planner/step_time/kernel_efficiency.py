"""How the libraries' kernels go about products, attention and the loss on each kind of device."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.catalog import Device


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


GPU_KERNELS = KernelEfficiency(
    tiles=True, block=128, head_power=0.4, few_keys=512.0, attention_backward=3.0, logit_flops=0.0
)
"""Backward: 2.5 × the arithmetic; 0.83 × the rate is assumed."""
TPU_KERNELS = KernelEfficiency(
    tiles=False, block=128, head_power=0.4, few_keys=512.0, attention_backward=3.0, logit_flops=0.0
)
CPU_KERNELS = KernelEfficiency(
    tiles=False, block=16, head_power=0.2, few_keys=160.0, attention_backward=2.2, logit_flops=200.0
)
"""Read off what a probe timed (AMD EPYC, float32, torch 2.13, 2026-11-23). As shares of the rate of products of 1,024 ×
1,024: other products 0.85 to 1 whatever their size, down to 0.6 with 32 columns; attention forward 0.10 over 32 keys
with heads of 32, 0.30 over 256 of 32, 0.29 over 128 of 64, 0.52 over 1,024 of 64; backward 1.6 to 2.5 times as long."""


def kernel_efficiency_of(device: Device) -> KernelEfficiency:
    """Those that run on a device."""
    if device.kind == "cpu":
        return CPU_KERNELS
    return GPU_KERNELS if device.units else TPU_KERNELS
