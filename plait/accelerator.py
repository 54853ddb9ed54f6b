"""What plait asks torch about the device on which this process computes: the host's processor, or an accelerator.

Accelerators have torch's functions of one module each (torch.cuda, torch.xpu) under the same names. For the processor,
on which work is done when a call returns, most of them do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.devices import ACCELERATORS, DEVICE_TRAITS, DeviceName

FLASH_CAPABILITY = (8, 0)
"""The oldest compute capability that torch's flash kernels are made for: Ampere's."""


def is_accelerator(device: torch.device) -> bool:
    """Whether this device has memory of its own and queues its work. Accepts any device, including torch's "meta"."""
    return any(row.name == device.type for row in ACCELERATORS)


def has_cuda_kernels(device: torch.device) -> bool:
    """Whether torch's CUDA-only features exist for the device (`DeviceTraits.kernels`)."""
    return any(row.name == device.type and row.kernels == "CUDA's" for row in ACCELERATORS)


def suits_flash_kernels(numbers: Tensor) -> bool:
    """Whether torch's 16-bit CUDA kernels for attention over segments and for products grouped by expert take this
    tensor. In float16 that depends on the GPU: Volta and Turing (V100, T4) have none of them."""
    if numbers.dtype not in (torch.bfloat16, torch.float16) or not has_cuda_kernels(numbers.device):
        return False
    if numbers.dtype == torch.bfloat16:
        return True
    return module_of(numbers.device).get_device_capability(numbers.device) >= FLASH_CAPABILITY


def accelerator_name() -> DeviceName | None:
    """The kind of accelerator that torch finds; None if it finds none that plait trains on."""
    for row in ACCELERATORS:
        if module_of(row.name).is_available():
            return row.name
    return None


def initialized_accelerator() -> DeviceName | None:
    """The kind of accelerator that this process has already used."""
    for row in ACCELERATORS:
        if module_of(row.name).is_initialized():
            return row.name
    return None


def accelerator_count() -> int:
    """How many accelerators torch sees."""
    name = accelerator_name()
    return module_of(name).device_count() if name else 0


def own_device(name: DeviceName | None) -> torch.device:
    """The accelerator that this process has chosen (`choose_device`); the CPU for "cpu" and None."""
    if name is None or not DEVICE_TRAITS[name].is_accelerator:
        return torch.device("cpu")
    return torch.device(name, module_of(name).current_device())


def choose_device(device: torch.device) -> None:
    """Make an accelerator the current device of this process."""
    module_of(device).set_device(device.index)


def module_of(device: torch.device | DeviceName) -> Any:
    """torch's module for an accelerator: torch.cuda, torch.xpu."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if is_accelerator(device):
        module_of(device).synchronize(device)


def free_memory_of(device: torch.device) -> int:
    """Free bytes of an accelerator's memory."""
    return int(module_of(device).mem_get_info(device)[0])


def allocatable_bytes(device: torch.device) -> int:
    """Bytes that torch could still allocate on an accelerator: free memory, and memory that torch keeps for reuse."""
    module = module_of(device)
    return free_memory_of(device) + module.memory_reserved(device) - module.memory_allocated(device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device, without waiting for the copy to an accelerator."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_accelerator(device) else tensor.to(device)
