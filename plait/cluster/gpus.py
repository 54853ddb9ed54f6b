"""The GPUs as torch sees them, and why one cannot be used: a sentence before anything is planned or compiled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.cluster.nvidia_driver import Host, NvidiaCards, find_nvidia_cards
from plait.errors import PlaitError
from plait.units import counted, format_bytes

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each CUDA major version: NVIDIA, CUDA Compatibility, "minor version compatibility"."""
BF16_CAPABILITY = (8, 0)
"""The oldest compute capability with bf16 arithmetic and with flash kernels for documents: Ampere."""
USUAL_USE_SHARE, USUAL_USE_BYTES = 0.1, 3 * 2**29
"""What a GPU may have in use without being taken, the larger of both: the asking process's own context (0.3 to 0.6 GiB)
and a desktop's windows."""
SUMMED_ONES = 1_000
ON_PROCESSOR = 'write run.devices = "cpu" to train on the processor'


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Its compute capability: (9, 0) for an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What the installed torch was compiled for."""

    version: str
    cuda: str | None
    """Version of CUDA, such as "13.0"; None for processors, or another maker's GPUs."""
    kernels: tuple[str, ...] = ()
    """Architectures that it has kernels for: "sm_90", or "compute_120" where a driver may compile them."""


class GpuLibrary(Protocol):
    """What plait asks torch about GPUs."""

    def build(self) -> TorchBuild:
        """What it was compiled for."""
        ...

    def count(self) -> int:
        """Number of GPUs that it can use."""
        ...

    def gpu(self, number: int) -> Gpu:
        """One of them."""
        ...

    def free_bytes(self, number: int) -> int | None:
        """Free memory of one of them; None where it lets nobody in."""
        ...

    def sum_of_ones(self, number: int, count: int) -> float:
        """What so many ones come to that one of them makes and adds; raises RuntimeError where it cannot."""
        ...


class TorchGpus:
    """The GPUs of this process's torch."""

    def build(self) -> TorchBuild:
        kernels = torch.cuda.get_arch_list() if torch.cuda.is_available() else ()
        return TorchBuild(version=torch.__version__, cuda=torch.version.cuda, kernels=tuple(kernels))

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def gpu(self, number: int) -> Gpu:
        found = torch.cuda.get_device_properties(number)
        return Gpu(name=found.name, memory_bytes=found.total_memory, capability=(found.major, found.minor))

    def free_bytes(self, number: int) -> int | None:
        try:
            return torch.cuda.mem_get_info(number)[0]
        except RuntimeError:  # "busy or unavailable": exclusive mode, or out of memory for a context
            return None

    def sum_of_ones(self, number: int, count: int) -> float:
        return float(torch.ones(count, device=torch.device("cuda", number)).sum())


def check_gpus_are_seen(library: GpuLibrary, host: Host) -> None:
    """Raise PlaitError where the machine has NVIDIA GPUs that torch does not see, unless they are hidden on purpose."""
    visible, seen = host.variable("CUDA_VISIBLE_DEVICES"), library.count()
    if visible is None and seen:
        return
    named = _visible_numbers(visible)
    if named == ():
        return
    cards = find_nvidia_cards(host)
    if unknown := [number for number in named or () if cards.count and number >= max(cards.count, seen)]:
        has = "only GPU 0" if cards.count == 1 else f"GPUs 0 to {cards.count - 1}"
        raise PlaitError(
            f"CUDA_VISIBLE_DEVICES={visible} names GPU {unknown[0]}, and this machine has {has}; "
            "name these, or unset it"
        )
    if cards.count and not seen:
        raise PlaitError(_why_none_is_seen(cards, library.build()))


def _visible_numbers(visible: str | None) -> tuple[int, ...] | None:
    """The numbers that CUDA_VISIBLE_DEVICES lists, up to the first negative one, as CUDA reads it; empty where it hides
    all GPUs; None where it is not set or names GPUs by identifiers."""
    if visible is None:
        return None
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if any(not re.fullmatch(r"-?\d+", entry) for entry in entries):
        return () if entries[0] == "NoDevFiles" else None
    numbers = [int(entry) for entry in entries]
    end = next((at for at, number in enumerate(numbers) if number < 0), len(numbers))
    return tuple(numbers[:end])


def _why_none_is_seen(cards: NvidiaCards, build: TorchBuild) -> str:
    here = f"this machine has {counted(cards.count, 'NVIDIA GPU')}, and torch {build.version}"
    if build.cuda is None:
        return f"{here} is built without CUDA; install a CUDA build (pytorch.org/get-started), or {ON_PROCESSOR}"
    needed = OLDEST_DRIVERS.get(_major(build.cuda))
    if cards.driver and needed and _major(cards.driver) < needed:
        older = max((major for major, driver in OLDEST_DRIVERS.items() if driver <= _major(cards.driver)), default=None)
        other = f", install torch for CUDA {older}" if older and older > 11 else ""
        return (
            f"{here} for CUDA {build.cuda} needs driver {needed} or newer, not {cards.driver}; "
            f"update the driver{other}, or {ON_PROCESSOR}"
        )
    return (
        f"{here} for CUDA {build.cuda} cannot use any; see what nvidia-smi says, restart the machine, or {ON_PROCESSOR}"
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def check_gpus_are_usable(library: GpuLibrary, numbers: Sequence[int]) -> None:
    """Raise PlaitError where torch has no kernels for one of these GPUs, or another program uses its memory."""
    build = library.build()
    for number in numbers:
        _check_kernels(number, library.gpu(number), build)
    for number in numbers:
        _check_free(number, library.gpu(number), library.free_bytes(number))


def check_gpu_computes(library: GpuLibrary, number: int) -> None:
    """Raise PlaitError where a GPU that is there cannot add: it has fallen off its bus, or its driver only describes
    it. For the process that is about to use it, as it makes a context there."""
    try:
        found = library.sum_of_ones(number, SUMMED_ONES)
        what = f"{SUMMED_ONES:,} ones come to {found:g} there"
    except RuntimeError as error:
        found, what = None, str(error).partition("\n")[0]
    if found != SUMMED_ONES:
        raise PlaitError(
            f"GPU {number}, a {library.gpu(number).name}, does not compute ({what}); see what nvidia-smi says, restart "
            f"the machine, name other GPUs in run.devices, or {ON_PROCESSOR}"
        )


def _check_kernels(number: int, gpu: Gpu, build: TorchBuild) -> None:
    if build.cuda is None or not build.kernels or any(has_kernels_for(one, gpu.capability) for one in build.kernels):
        return
    major, minor = gpu.capability
    oldest = min((found for one in build.kernels if (found := _capability(one))), default=(0, 0))
    newer = "one for CUDA 13 (driver 580 or newer)" if _major(build.cuda) < 13 else "a newer one"
    other = "one for CUDA 12.6, which older GPUs need" if gpu.capability < oldest else newer
    raise PlaitError(
        f"torch {build.version} has no kernels for GPU {number}, a {gpu.name} (compute capability {major}.{minor}); "
        f"install {other}, name other GPUs in run.devices, or {ON_PROCESSOR}"
    )


def has_kernels_for(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on such a GPU: machine code ("sm_80") within one major version from its
    minor version on, intermediate code ("compute_80") on every later one; with a letter ("sm_90a") on its own alone."""
    built = _capability(architecture)
    if built is None:
        return False
    if architecture[-1].isalpha():
        return built == capability and architecture[-1] == "a"
    return built <= capability and (architecture.startswith("compute_") or built[0] == capability[0])


def _capability(architecture: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]?", architecture)
    return (int(found[1]), int(found[2])) if found else None


def _check_free(number: int, gpu: Gpu, free: int | None) -> None:
    usual = max(USUAL_USE_SHARE * gpu.memory_bytes, USUAL_USE_BYTES)
    if free is not None and gpu.memory_bytes - free <= usual:
        return
    has = "lets no other program in" if free is None else f"has only {format_bytes(free)} free"
    raise PlaitError(
        f"GPU {number}, a {gpu.name} of {format_bytes(gpu.memory_bytes)}, {has}: another program uses it; "
        "end that one (nvidia-smi lists it), or name other GPUs in run.devices"
    )
