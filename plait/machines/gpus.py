"""The GPUs as torch sees them, and why one cannot be used: a sentence before anything is planned or compiled."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from plait.accelerator import accelerator_count, accelerator_name, free_memory_of, is_compiled, module_of
from plait.devices import DeviceName
from plait.errors import PlaitError
from plait.units import counted, format_bytes

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each CUDA major version: NVIDIA, CUDA Compatibility, "minor version compatibility"."""
BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (7, 0)
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
    """NVIDIA's compute capability: (9, 0) for an H100. Other makers' GPUs have none: (0, 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch: its version, and the backends that it was compiled for."""

    version: str
    cuda: str | None
    """Version of CUDA, such as "13.0"; None for processors, or another maker's GPUs."""
    kernels: tuple[str, ...] = ()
    """Architectures that it has kernels for: "sm_90", or "compute_120" where a driver may compile them."""


class GpuLibrary(Protocol):
    """plait's queries to torch about GPUs."""

    def name(self) -> DeviceName | None:
        """torch's name for this kind of GPU; None if there are none."""
        ...

    def build(self) -> TorchBuild:
        """The installed torch build."""
        ...

    def count(self) -> int:
        """Number of GPUs that it can use."""
        ...

    def gpu(self, number: int) -> Gpu:
        """One of them."""
        ...

    def free_bytes(self, number: int) -> int | None:
        """Free memory of one of them; None if it takes no other process."""
        ...

    def sum_of_ones(self, number: int, count: int) -> float:
        """The sum of this many ones that one GPU creates and adds; raises RuntimeError if it cannot."""
        ...


class TorchGpus:
    """The GPUs of this process's torch: NVIDIA's, AMD's in a build for ROCm, or Intel's."""

    def __init__(self) -> None:
        self._name: DeviceName | None = accelerator_name()

    def name(self) -> DeviceName | None:
        return self._name

    def build(self) -> TorchBuild:
        if self._name is not None and is_compiled(torch.device(self._name)):
            return TorchBuild(version=torch.__version__, cuda=None)  # a CUDA build serves these devices, too
        kernels = module_of(self._name).get_arch_list() if self._name else ()
        return TorchBuild(version=torch.__version__, cuda=torch.version.cuda, kernels=tuple(kernels))

    def count(self) -> int:
        return accelerator_count()

    def gpu(self, number: int) -> Gpu:
        with warnings.catch_warnings():  # TorchTPU calls the function experimental
            warnings.simplefilter("ignore")
            found = module_of(self._device(number)).get_device_properties(number)
        capability = (getattr(found, "major", 0), getattr(found, "minor", 0))
        return Gpu(name=found.name, memory_bytes=found.total_memory, capability=capability)

    def free_bytes(self, number: int) -> int | None:
        if is_compiled(self._device(number)):  # asking takes the device, which has one process
            return self.gpu(number).memory_bytes
        try:
            return free_memory_of(self._device(number))
        except RuntimeError:  # "busy or unavailable": exclusive mode, or out of memory for a context
            return None

    def sum_of_ones(self, number: int, count: int) -> float:
        return float(torch.ones(count, device=self._device(number)).sum())

    def _device(self, number: int) -> torch.device:
        assert self._name is not None, "there are no GPUs to ask for"
        return torch.device(self._name, number)


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


# What a machine has of NVIDIA's, found without torch: a torch that cannot use a GPU does not see it either.


NVIDIA_SMI_S = 20
"""Seconds for nvidia-smi to answer; it wakes sleeping GPUs first."""


class Host(Protocol):
    """A machine that can be asked for files, programs and environment variables."""

    def text(self, path: str) -> str | None:
        """A file's contents; None if there is none."""
        ...

    def names_in(self, folder: str) -> Sequence[str]:
        """Names of what is in a folder; empty where there is none."""
        ...

    def answer(self, command: Sequence[str]) -> str | None:
        """A program's output; None if it is missing or fails."""
        ...

    def variable(self, name: str) -> str | None:
        """An environment variable; None where it is not set."""
        ...


class ThisHost:
    """The machine on which this process runs."""

    def text(self, path: str) -> str | None:
        try:
            return Path(path).read_text()
        except OSError:
            return None

    def names_in(self, folder: str) -> Sequence[str]:
        try:
            return [path.name for path in Path(folder).iterdir()]
        except OSError:
            return ()

    def answer(self, command: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaCards:
    """The NVIDIA GPUs that this machine, or this container, has."""

    count: int
    driver: str | None
    """Version of the driver, such as "580.65.06"; None where it is unknown."""


def find_nvidia_cards(host: Host) -> NvidiaCards:
    """The GPUs whose device files are here, else those that nvidia-smi lists (WSL has no device files).

    A driver alone is no GPU: a container sees its host's driver also where no GPU was handed to it.
    """
    count = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in host.names_in("/dev"))
    if not count:
        count = sum(line.startswith("GPU ") for line in (host.answer(["nvidia-smi", "-L"]) or "").splitlines())
    return NvidiaCards(count=count, driver=_driver_version(host) if count else None)


def _driver_version(host: Host) -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", host.text("/proc/driver/nvidia/version") or "")
    if found:
        return found[1]
    answer = host.answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0].strip() if answer and answer.strip() else None


# Whether torch.compile can work on a machine, found before a worker tries: a failed compilation is pages of text.


TRITON_CAPABILITY = (7, 0)
"""The oldest compute capability that Triton compiles for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTools:
    """The requirements of torch.compile, in addition to torch, to compile for GPUs."""

    triton: bool
    compiler: str | None
    """Path of a C compiler: Triton builds a launcher for each kernel with it."""
    headers: Path | None
    """The folder of Python.h, which that launcher includes."""


def find_compile_tools(path: str | None = None) -> CompileTools:
    """The tools of this Python and of the folders in `path`, which is as PATH; None for PATH itself."""
    names = [name for name in (os.environ.get("CC"), "clang", "gcc") if name]
    headers = Path(sysconfig.get_path("include"))
    return CompileTools(
        triton=importlib.util.find_spec("triton") is not None,
        compiler=next((found for name in names if (found := shutil.which(name, path=path))), None),
        headers=headers if (headers / "Python.h").is_file() else None,
    )


def why_not_compiled(tools: CompileTools, capability: tuple[int, int]) -> str:
    """Why layers cannot be compiled for a GPU, with what to do about it; empty where they can."""
    if capability < TRITON_CAPABILITY:
        return f"Triton compiles for compute capability 7.0 and newer, and this is {capability[0]}.{capability[1]}"
    if not tools.triton:
        return "Triton is not installed; a CUDA build of torch brings it"
    if tools.compiler is None:
        return "there is no C compiler; install gcc, or name one in CC"
    if tools.headers is None:
        return "Python.h is not here; install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"
    return ""
