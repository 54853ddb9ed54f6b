"""Which build of torch a machine gets, and from which package index: no CUDA libraries where there is no NVIDIA driver.

The syntax here is that of Python 3.6, as in bootstrap.py.
"""

import re
from typing import Callable, NamedTuple, Optional

OLDEST_TORCH = (2, 11)
TESTED_TORCH = "2.13.0"


class Build(NamedTuple):
    """One of the ways in which torch is compiled."""

    name: str
    labels: str
    """Regular expression for the local version label: `cpu` in `2.13.0+cpu`."""
    own_index: str
    """Its name among PyTorch's own indexes."""


CPU = Build("the CPU build", "cpu.*", "cpu")
CUDA_12 = Build("the CUDA 12 build", "cu12.*", "cu126")
CUDA_13 = Build("the CUDA 13 build", "|cu13.*", "cu130")
ANY_LABEL = ".*"
OLDEST_DRIVERS = ((580, CUDA_13), (525, CUDA_12))
"""The oldest driver that runs a build, newest build first: NVIDIA, CUDA Compatibility, "minor version compatibility",
https://docs.nvidia.com/deploy/cuda-compatibility/ ."""


class Choice(NamedTuple):
    """The torch to install."""

    version: str
    address: Optional[str]
    """Of the package index that has it; None for the index that pip is configured to use."""
    reason: str

    @property
    def has_cuda(self) -> bool:
        """Whether gigabytes of NVIDIA's libraries come with it."""
        return not re.fullmatch(CPU.labels, _label(self.version))


def choose_torch(
    versions: 'Callable[[Optional[str]], "list[str]"]', driver: Optional[str], own_indexes: str, named_index: str
) -> Optional[Choice]:
    """The build that suits a driver, from pip's index or else from PyTorch's own; None where no index has one.

    `versions` lists what the index at an address has, newest first; pip's own index for None. `driver` is the version
    of the NVIDIA driver. `own_indexes` is the address above PyTorch's own indexes. `named_index`, unless it is empty,
    is the only one to take torch from, in any build.
    """
    if named_index:
        return _pick(versions(named_index), named_index, ANY_LABEL, "TORCH_INDEX names the index")
    build, reason = build_for_driver(driver)
    own_index = f"{own_indexes}/{build.own_index}"
    missing = f"{reason}, but pip's index does not have {build.name}, nor can it be had from {own_index}"
    return (
        _pick(versions(None), None, build.labels, reason)
        or _pick(versions(own_index), own_index, build.labels, reason)
        or _pick(versions(None), None, ANY_LABEL, missing)
    )


def build_for_driver(driver: Optional[str]) -> "tuple[Build, str]":
    """The newest build that a driver can run, and why."""
    if driver is None:
        return CPU, "no NVIDIA driver was found"
    too_new = ""
    for oldest, build in OLDEST_DRIVERS:
        if numbers(driver) >= (oldest,):
            return build, f"the NVIDIA driver is {driver}{too_new}"
        too_new = f", and CUDA 13 needs {oldest}"
    return CPU, f"the NVIDIA driver is {driver}, and torch needs 525, better 580"


def suits_driver(version: str, driver: Optional[str]) -> bool:
    """Whether a torch that is installed can use the GPUs of a driver, as far as its version tells: a build for
    processors cannot, nor can one for a CUDA that is newer than the driver. Without a driver any will do."""
    best = build_for_driver(driver)[0]
    if best is CPU:
        return True
    unusable = [CPU] + [build for oldest, build in OLDEST_DRIVERS if numbers(driver or "") < (oldest,)]
    return not any(re.fullmatch(build.labels, _label(version)) for build in unusable)


def _pick(versions: "list[str]", address: Optional[str], labels: str, reason: str) -> Optional[Choice]:
    """The tested version where a build with such a label is there, else the newest that is."""
    fitting = [version for version in versions if is_new_enough(version) and re.fullmatch(labels, _label(version))]
    tested = [version for version in fitting if version.partition("+")[0] == TESTED_TORCH]
    return Choice((tested + fitting)[0], address, reason) if fitting else None


def _label(version: str) -> str:
    return version.partition("+")[2]


def is_new_enough(version: Optional[str]) -> bool:
    return version is not None and numbers(version) >= OLDEST_TORCH


def numbers(version: str) -> "tuple[int, ...]":
    """`2.13.0+cpu` is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))
