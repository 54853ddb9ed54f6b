"""A machine's devices, memory and software: detected once per start, then compared with those that a plan was made
for."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plait.devices import DEVICE_TRAITS, DeviceName
from plait.version import __version__

ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CORES_VARIABLE = "PLAIT_CORES"
"""Number of cores that a scheduler gave this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host: its devices, cores and memory, and the software that its numerical results depend on."""

    device: DeviceName
    name: str
    """Name of the processor or of the GPUs."""
    devices: int
    """Number of GPUs, or 1 for a machine that trains on its processor."""
    cores: int
    memory_bytes: int
    """Bytes of memory of one GPU, or of the whole machine."""
    versions: tuple[tuple[str, str], ...]
    """(package, version) of the software that determines numerical results and speed."""
    unlike: tuple[str, ...] = ()
    """Names of the machine's other GPUs, where not all have the name in `name`."""
    gpus: tuple[int, ...] = ()
    """torch's numbers of the GPUs to use, where these are not all of them."""
    without: tuple[str, ...] = ()
    """Arithmetic that one of the GPUs lacks: "bf16", "fp16"."""
    uncompiled: str = ""
    """Why layers cannot be compiled for the GPUs, with what to do about it; empty where they can."""

    @property
    def has_accelerators(self) -> bool:
        """Whether it trains on GPUs, with one worker each, and not on its processor."""
        return DEVICE_TRAITS[self.device].is_accelerator

    def fingerprint(self) -> dict[str, Any]:
        """The values that must be equal for a plan, its speed and its bit-exact results to hold again."""
        values = asdict(self)
        values["versions"] = dict(self.versions)
        for key in ("unlike", "gpus", "without"):
            found = values.pop(key)
            values |= {key: list(found)} if found else {}
        if not self.uncompiled:
            del values["uncompiled"]
        # Memory as the kernel reports it moves by a few pages from boot to boot.
        values["memory_bytes"] = round(self.memory_bytes / 2**30) * 2**30
        return values

    def digest(self) -> str:
        """A hash of the fingerprint, 16 hexadecimal digits."""
        return sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()[:16]

    @staticmethod
    def from_fingerprint(values: Mapping[str, Any]) -> Machine:
        """The machine that a stored fingerprint describes."""
        pairs = {"versions": tuple(sorted(values["versions"].items()))}
        lists = {key: tuple(values.get(key, ())) for key in ("unlike", "gpus", "without")}
        return Machine(**{**values, **pairs, **lists})


def detect_cpu_machine() -> Machine:
    """The machine as far as it can be known without torch: its processor, cores and memory."""
    return Machine(
        device="cpu",
        name=processor_name(),
        devices=1,
        cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        versions=software_versions(),
    )


def software_versions() -> tuple[tuple[str, str], ...]:
    """Versions of Python, plait and the packages that a run's numerical results depend on."""
    found = {"python": platform.python_version(), "plait": __version__}
    for package in ("torch", "numpy", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return tuple(sorted(found.items()))


def usable_cores(
    environment: Mapping[str, str] = os.environ, own_cgroup: Path = OWN_CGROUP, cgroups: Path = ROOT
) -> int:
    """Number of cores that this process may use: the least of its CPU affinity, the CPU quotas of its control group
    and that group's parents, and the cores that its scheduler gave it, which not every one enforces."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    granted = [int(quota) for quota in cpu_quotas(own_cgroup, cgroups)]
    slurm = environment.get("SLURM_CPUS_PER_TASK", "") if environment.get("SLURM_JOB_ID") else ""
    given = [int(one) for one in (slurm, environment.get(CORES_VARIABLE, "")) if one.isdecimal()]
    return max(1, min([cores, *granted, *given]))


def usable_memory_bytes() -> int:
    """Bytes of this machine's memory, limited by a container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        _number(Path(path)) for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    ]
    return min([total, *(limit for limit in limits if limit)])


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of this machine's memory that are free or only cache files, at most what a container's limit leaves;
    half of the usable memory where this is unknown (not Linux)."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        (free,) = (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        free = usable_memory_bytes() // 2
    groups = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        granted = _number(groups / limit)
        if granted is not None:
            free = min(free, max(0, granted - (_number(groups / used) or 0)))
    return free


def processor_name() -> str:
    """The processor's model as its maker calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value > 0 else None


def strip_name_number(name: str) -> str:
    """A name without the number that `make_names_unique` gave it."""
    return re.sub(r" \(\d+\)$", "", name)


def make_names_unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number behind each that has come before ("host (2)"): machines made from one image often
    share theirs."""
    before = [names[:at].count(name) for at, name in enumerate(names)]
    return tuple(f"{name} ({count + 1})" if count else name for name, count in zip(names, before, strict=True))


# How many cores a process may use, and how much of each, where a control group limits it.


def core_share(threads: int, *, own: Path = OWN_CGROUP, root: Path = ROOT) -> float:
    """Share of a core that each of `threads` busy threads of this process's control group gets; 1 where nothing
    limits them."""
    return min([1.0, *(quota / threads for quota in cpu_quotas(own, root))])


def cpu_quotas(own: Path = OWN_CGROUP, root: Path = ROOT) -> list[float]:
    """Numbers of cores that this process's control group and its parents grant; empty where nothing limits them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []  # not Linux
    return [limit for line in lines for limit in _limits(line, root)]


def _limits(line: str, root: Path) -> Iterator[float]:
    """Numbers of cores that a control group and its parents grant; version 2 has one line, version 1 one for each
    controller."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    folder = root / "cpu" if controllers else root
    group = folder / path.lstrip("/")
    for place in (group, *group.parents):
        if not place.is_relative_to(folder):
            return
        limit = _two_files(place) if controllers else _one_file(place)
        if limit is not None:
            yield limit


def _one_file(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return float(quota) / float(period) if quota != "max" else None
    except (OSError, ValueError):
        return None


def _two_files(group: Path) -> float | None:
    try:
        quota, period = (float((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None
