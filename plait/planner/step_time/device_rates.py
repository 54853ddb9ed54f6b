"""What a device can do: arithmetic and memory rates in a precision, as a long run holds them, and how efficiently the
libraries' kernels of its kind compute products, attention and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.machines.catalog import Device
from plait.planner.calibration.constants import constant, constant_fields
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import PricedPrecision

USUAL_ACHIEVABLE_SHARE = constant("usual_achievable_share")
UNTHROTTLED_FLOPS_PER_WATT = constant("unthrottled_flops_per_watt")
THROTTLE_EXPONENT = constant("throttle_exponent")
"""Up to UNTHROTTLED_FLOPS_PER_WATT of board power a device keeps its clock; beyond, the rate falls with this power
of the excess."""
A100_PEAK_FLOPS = 312e12
STREAM_SHARE = constant("stream_share")
FALLBACK_PRECISIONS: Mapping[PricedPrecision, PricedPrecision] = {
    "fp4": "fp8",
    "fp8": "bf16",
    "bf16": "fp16",
    "fp16": "float32",
    "tf32": "float32",
}
"""Precision that replaces one that a device lacks."""


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
    message_units: float
    """Share of the device's units that collectives take from other kernels while they run beside them."""
    logit_flops: float
    """FLOPs of the loss for each logit, beside moving it."""


GPU_KERNELS = KernelEfficiency(**constant_fields("kernels_gpu"))
TPU_KERNELS = KernelEfficiency(**constant_fields("kernels_tpu"))
CPU_KERNELS = KernelEfficiency(**constant_fields("kernels_cpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Arithmetic and memory rates of one device under one software profile, in FLOP/s and bytes/s."""

    linear_flops: float
    """Rate of the largest linear layers' products."""
    high_precision_flops: float
    """Rate of the largest products in 16 bits, or in float32 where all are: the head, and attention that is not
    fused."""
    attention_flops: float
    """Rate that the shares of attention kernels refer to."""
    operand_bytes: float
    """Bytes of a number as products read and write it."""
    stream_bytes_per_s: float
    compute_units: int
    """Tiles of a result that are computed at once, where products are divided into tiles."""
    kernels: KernelEfficiency


def device_rates(
    device: Device, precision: PricedPrecision, profile: SoftwareProfile, speed: float = 1.0
) -> DeviceRates:
    """The rates of a device in a precision.

    products = peak × achievable share × profile.product_share × sustained_flops (constants.toml); attention refers to
    the peak, less `flash_lag` on devices faster than an A100.
    """
    peak = peak_flops(device, "bf16" if precision in ("fp8", "fp4") else precision)
    reached = (device.achievable or USUAL_ACHIEVABLE_SHARE) * profile.product_share * speed
    keeps_clock = profile.clock == "as measured" and device.clock_in_steps == "kept"
    sustained = 1.0 if keeps_clock else sustained_share(peak, device.watts)
    plain = linear = peak * reached * sustained
    if precision in ("fp8", "fp4"):
        narrow = peak_flops(device, precision)
        slower = sustained_share(narrow, device.watts) / sustained_share(peak, device.watts)
        linear = max(linear, narrow * reached * profile.fp8_share * sustained * slower)
    # Attention kernels lag behind the devices: one written for another generation gets less out of it.
    lag = min(1.0, (A100_PEAK_FLOPS / peak) ** profile.flash_lag)
    # A processor's kernels go by the rate of its large products, which is its peak where that was measured.
    large = USUAL_ACHIEVABLE_SHARE if device.kind == "cpu" and device.achievable is None else 1.0
    return DeviceRates(
        linear_flops=linear,
        high_precision_flops=plain,
        attention_flops=peak * large * speed * lag * sustained,
        operand_bytes=4.0 if precision in ("float32", "tf32") else 2.0,
        stream_bytes_per_s=device.memory_bytes_per_s * STREAM_SHARE,
        compute_units=device.units or 0,
        kernels=kernel_efficiency_of(device),
    )


def sustained_share(peak: float, watts: float | None) -> float:
    """Share of its short-run rate that a device holds in a long run: min(1, (knee × watts / peak) ** exponent). The
    more arithmetic a watt must feed, the slower the clock that the power limit leaves."""
    return min(1.0, (UNTHROTTLED_FLOPS_PER_WATT * watts / peak) ** THROTTLE_EXPONENT) if watts else 1.0


def peak_flops(device: Device, precision: PricedPrecision) -> float:
    """The device's dense peak in a precision, or in the next coarser one that it has."""
    tried: PricedPrecision | None = precision
    while tried and tried not in device.peak_flops:
        tried = FALLBACK_PRECISIONS.get(tried)
    return device.peak_flops[tried] if tried else max(device.peak_flops.values())


def kernel_efficiency_of(device: Device) -> KernelEfficiency:
    """The kernel efficiency of a device's kind."""
    if device.kind == "cpu":
        return CPU_KERNELS
    return GPU_KERNELS if device.units else TPU_KERNELS
