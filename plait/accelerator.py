"""Queries to torch about the device on which this process computes: the host's CPU, or an accelerator.

Accelerators that launch operations have the same function names in one torch module each (torch.cuda, torch.xpu); those
that compile them use torch.accelerator. For the CPU, on which work is done when a call returns, most functions do
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.devices import ACCELERATORS, DEVICE_TRAITS, DeviceName, DeviceTraits

_COMPILED = tuple(row.name for row in ACCELERATORS if row.is_compiled)  # a constant to torch's compiler

FLASH_CAPABILITY = (8, 0)
"""The oldest compute capability that torch's flash kernels are made for: Ampere's."""


def is_accelerator(device: torch.device) -> bool:
    """Whether this device has its own memory and queues its work. Accepts any device, including torch's "meta"."""
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


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is queued in streams, concurrently with copies and transfers."""
    return any(row.name == device.type and not row.is_compiled for row in ACCELERATORS)


def is_compiled(device: torch.device) -> bool:
    """Whether operations are compiled for each shape, so that shapes should not change (`DeviceTraits.operations`)."""
    return device.type in _COMPILED


def accelerator_name() -> DeviceName | None:
    """The kind of accelerator that torch finds; None if it finds none that plait trains on."""
    for row in ACCELERATORS:
        if _is_loaded(row) if row.is_compiled else module_of(row.name).is_available():
            return row.name
    return None


def _is_loaded(row: DeviceTraits) -> bool:
    """Whether an extension of torch has registered a device of this kind, which it does if it finds one."""
    return torch._C._get_privateuse1_backend_name() == row.name


def named_devices() -> list[str]:
    """The kinds of devices that this process's torch knows, present or not."""
    return [row.name for row in DEVICE_TRAITS.values() if not row.is_compiled or _is_loaded(row)]


def initialized_accelerator() -> DeviceName | None:
    """The kind of accelerator that this process has already used."""
    for row in ACCELERATORS:
        if _is_loaded(row) if row.is_compiled else module_of(row.name).is_initialized():
            return row.name
    return None


def accelerator_count() -> int:
    """How many accelerators torch sees."""
    name = accelerator_name()
    if name is None:
        return 0
    return torch.accelerator.device_count() if DEVICE_TRAITS[name].is_compiled else module_of(name).device_count()


def gpu_count() -> int:
    """Number of accelerators that launch single operations; 0 if each shape is compiled, which is useless for text that
    grows by one token at a time."""
    name = accelerator_name()
    return 0 if name is None or DEVICE_TRAITS[name].is_compiled else accelerator_count()


def own_device(name: DeviceName | None) -> torch.device:
    """The accelerator that this process has chosen (`choose_device`); the CPU for "cpu" and None."""
    if name is None or not DEVICE_TRAITS[name].is_accelerator:
        return torch.device("cpu")
    if DEVICE_TRAITS[name].is_compiled:
        return torch.device(name, torch.accelerator.current_device_index())
    return torch.device(name, module_of(name).current_device())


def choose_device(device: torch.device) -> None:
    """Make an accelerator the current device of this process. One that compiles belongs to its process from the
    start."""
    if not is_compiled(device):
        module_of(device).set_device(device.index)


def module_of(device: torch.device | DeviceName) -> Any:
    """torch's module for an accelerator that launches operations: torch.cuda, torch.xpu."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if is_compiled(device):
        torch.accelerator.synchronize()
    elif is_accelerator(device):
        module_of(device).synchronize(device)


def free_memory_of(device: torch.device) -> int:
    """Free bytes of an accelerator's memory."""
    if is_compiled(device):
        return int(torch.accelerator.get_memory_info(device)[0])
    return int(module_of(device).mem_get_info(device)[0])


def allocatable_bytes(device: torch.device) -> int:
    """Bytes that torch could still allocate on an accelerator: free memory, and memory that torch keeps for reuse."""
    module = torch.accelerator if is_compiled(device) else module_of(device)
    return free_memory_of(device) + module.memory_reserved(device) - module.memory_allocated(device)


def peak_memory_of(device: torch.device) -> int:
    """The most bytes that tensors on an accelerator took since `reset_peak_memory`."""
    return int((torch.accelerator if is_compiled(device) else module_of(device)).max_memory_allocated(device))


def reset_peak_memory(device: torch.device) -> None:
    """Count an accelerator's peak of memory from here on."""
    (torch.accelerator if is_compiled(device) else module_of(device)).reset_peak_memory_stats(device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device, without waiting for the copy to an accelerator."""
    return tensor.pin_memory().to(device, non_blocking=True) if has_streams(device) else tensor.to(device)
