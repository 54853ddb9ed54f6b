"""Which build of torch a machine gets, and from which package index: no CUDA libraries where there is no NVIDIA driver.

The syntax here is that of Python 3.6, as in bootstrap.py.
"""

import re
from typing import Callable, NamedTuple, Optional, Sequence

OLDEST_TORCH = (2, 11)
TESTED_TORCH = "2.13.0"


class Build(NamedTuple):
    """One of the ways in which torch is compiled."""

    name: str
    labels: str
    """Regular expression for the local version label: `cpu` in `2.13.0+cpu`."""
    own_index: str
    """Its name among PyTorch's own indexes."""
    oldest_driver: int = 0
    capabilities: "tuple[tuple[int, int], tuple[int, int]]" = ((0, 0), (99, 0))
    """The compute capabilities of the oldest GPUs that it has kernels for, and of the first that are too new."""


CPU = Build("the CPU build", "cpu.*", "cpu")
CUDA_12 = Build("the CUDA 12.6 build", "cu12[0-6].*", "cu126", 525, ((5, 0), (10, 0)))
CUDA_12_8 = Build("the CUDA 12.8 build", "cu12[89].*", "cu128", 525, ((7, 5), (13, 0)))
CUDA_13 = Build("the CUDA 13 build", "|cu13.*", "cu130", 580, ((7, 5), (99, 0)))
ANY_LABEL = ".*"
CUDA_BUILDS = (CUDA_13, CUDA_12, CUDA_12_8)
"""In the order of preference. Drivers: NVIDIA, CUDA Compatibility, "minor version compatibility",
https://docs.nvidia.com/deploy/cuda-compatibility/ . GPUs: the support matrices of torch 2.11 to 2.14 (RELEASE.md,
pytorch/pytorch#175253, #178665, #190355): all have 12.6 and 13.0, and 2.11 alone still has 12.8, the only one for
Blackwell under a driver for CUDA 12. PyPI's own builds, without a label, are for CUDA 13 (2.14: 13.2, the same
driver). 2.15 is to drop 12.6 (#190385): `_pick` then takes the newest that the index still has."""


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
    versions: 'Callable[[Optional[str]], "list[str]"]',
    driver: Optional[str],
    own_indexes: str,
    named_index: str,
    capabilities: "Sequence[tuple[int, int]]" = (),
) -> Optional[Choice]:
    """The build that suits a driver and its GPUs, from pip's index or else from PyTorch's own; None where no index has
    one.

    `versions` lists what the index at an address has, newest first; pip's own index for None. `driver` is the version
    of the NVIDIA driver, `capabilities` those of its GPUs, as far as they are known. `own_indexes` is the address above
    PyTorch's own indexes. `named_index`, unless it is empty, is the only one to take torch from, in any build.
    """
    if named_index:
        return _pick(versions(named_index), named_index, ANY_LABEL, "TORCH_INDEX names the index")
    build, reason = build_for(driver, capabilities)
    own_index = f"{own_indexes}/{build.own_index}"
    missing = f"{reason}, but pip's index does not have {build.name}, nor can it be had from {own_index}"
    return (
        _pick(versions(None), None, build.labels, reason)
        or _pick(versions(own_index), own_index, build.labels, reason)
        or _pick(versions(None), None, ANY_LABEL, missing)
    )


def build_for(driver: Optional[str], capabilities: "Sequence[tuple[int, int]]" = ()) -> "tuple[Build, str]":
    """The first build that a driver can run and that has kernels for all its GPUs, and why; where none has, the first
    that the driver can run."""
    if driver is None:
        return CPU, "no NVIDIA driver was found"
    running = [build for build in CUDA_BUILDS if numbers(driver) >= (build.oldest_driver,)]
    if not running:
        return CPU, f"the NVIDIA driver is {driver}, and torch needs 525, better 580"
    build = next((one for one in running if not _without_kernels(one, capabilities)), running[0])
    reason = f"the NVIDIA driver is {driver}"
    if CUDA_13 not in running:
        reason += ", and CUDA 13 needs 580"
    passed = running[: running.index(build)]
    lacking = [one for each in passed for one in _without_kernels(each, capabilities)]
    if lacking:
        reason += ", and {} has no kernels for compute capability {}.{}".format(passed[0].name, *lacking[0])
    return build, reason


def suits_gpus(version: str, driver: Optional[str], capabilities: "Sequence[tuple[int, int]]" = ()) -> bool:
    """Whether a torch that is installed can use the GPUs of a driver, as far as its version tells: a build for
    processors cannot, nor one for a CUDA that is newer than the driver, nor one without kernels for a GPU where another
    has them. Without a driver any will do."""
    best = build_for(driver, capabilities)[0]
    if best is CPU:
        return True
    here = next((one for one in (CPU, *CUDA_BUILDS) if re.fullmatch(one.labels, _label(version))), None)
    if here is None:
        return True
    runs = here is not CPU and numbers(driver or "") >= (here.oldest_driver,)
    return runs and (not _without_kernels(here, capabilities) or bool(_without_kernels(best, capabilities)))


def _without_kernels(build: Build, capabilities: "Sequence[tuple[int, int]]") -> "list[tuple[int, int]]":
    oldest, too_new = build.capabilities
    return [one for one in capabilities if not oldest <= one < too_new]


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
