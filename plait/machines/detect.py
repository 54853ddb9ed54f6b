"""Detects this host's devices. Imports torch, so it runs in a worker."""

from __future__ import annotations

from dataclasses import replace

from plait.devices import DEVICE_TRAITS
from plait.errors import PlaitError
from plait.machines.gpus import (
    BF16_CAPABILITY,
    FP16_CAPABILITY,
    CompileTools,
    GpuLibrary,
    Host,
    ThisHost,
    TorchGpus,
    check_gpus_are_seen,
    check_gpus_are_usable,
    find_compile_tools,
    why_not_compiled,
)
from plait.machines.machine import Machine, detect_cpu_machine
from plait.machines.requested_workers import ANY_WORKERS, RequestedWorkers, chosen_gpus
from plait.machines.tpus import check_tpus_are_seen, tpu_software


def detect_machine(
    requested: RequestedWorkers = ANY_WORKERS,
    library: GpuLibrary | None = None,
    here: Host | None = None,
    tools: CompileTools | None = None,
) -> Machine:
    """This host with the GPUs that are requested, if torch sees any; where these differ, the one with the least memory
    stands for all. Raises PlaitError for GPUs that are not there or cannot be used.

    `library` is what finds the GPUs, torch where none is given; `here` the host to ask about its driver, and `tools`
    what it compiles with, else those of this host.
    """
    library = library or TorchGpus()
    if requested.devices != "cpu":
        _check_accelerators_are_seen(requested, library, here or ThisHost())
    if numbers := chosen_gpus(requested, library.count()):
        check_gpus_are_usable(library, numbers)
    return describe_machine(requested, library, tools)


def _check_accelerators_are_seen(requested: RequestedWorkers, library: GpuLibrary, host: Host) -> None:
    """Raise PlaitError where the recipe asks for accelerators that torch does not see, or leaves the choice open and
    torch does not see those that are there."""
    named, found = requested.devices, library.name()
    sees_tpus = found is not None and DEVICE_TRAITS[found].is_compiled
    if named == "tpu":
        check_tpus_are_seen(host, tpu_software(), sees_tpus=sees_tpus, are_named=True)
        return
    if sees_tpus and isinstance(named, tuple):
        raise PlaitError(
            "run.devices names GPUs by number, and this machine has TPU chips, which have none; write "
            'run.devices = "tpu", and run.workers = 4 for four of them'
        )
    check_gpus_are_seen(library, host)
    if found is None:
        check_tpus_are_seen(host, tpu_software(), sees_tpus=False, are_named=False)


def describe_machine(
    requested: RequestedWorkers = ANY_WORKERS, library: GpuLibrary | None = None, tools: CompileTools | None = None
) -> Machine:
    """The same as `detect_machine`, without checking whether GPUs are free: for a process that fills them."""
    library, host = library or TorchGpus(), detect_cpu_machine()
    present = library.count()
    numbers, name = chosen_gpus(requested, present), library.name()
    if not numbers or name is None:
        return host
    gpus = [library.gpu(number) for number in numbers]
    least = min(gpus, key=lambda one: one.memory_bytes)
    oldest = min(one.capability for one in gpus)
    return replace(
        host,
        device=name,
        name=least.name,
        devices=len(gpus),
        memory_bytes=least.memory_bytes,
        unlike=tuple(dict.fromkeys(one.name for one in gpus if one.name != least.name)),
        gpus=() if numbers == tuple(range(present)) else numbers,
        without=_lacking(oldest) if library.build().cuda else (),
        uncompiled=why_not_compiled(tools or find_compile_tools(), oldest) if library.build().cuda else "",
    )


def _lacking(capability: tuple[int, int]) -> tuple[str, ...]:
    """The arithmetic of 16 bits that CUDA's GPUs of this compute capability do not have, or not in fast units."""
    needs = {"bf16": BF16_CAPABILITY, "fp16": FP16_CAPABILITY}
    return tuple(name for name, least in needs.items() if capability < least)
