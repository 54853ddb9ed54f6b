"""What a machine has, as a value: found out once per start, compared with what a plan was made for."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

MachineDevice = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host: its devices, cores, memory and the software that its numbers depend on."""

    device: MachineDevice
    name: str
    """Name of the processor or of the GPUs."""
    devices: int
    """GPUs, or 1 for a machine that trains on its processor."""
    cores: int
    memory_bytes: int
    """Memory of one GPU, or of the whole machine."""
    versions: tuple[tuple[str, str], ...]
    """(package, version) of what decides the numbers and the speed."""
    unlike: tuple[str, ...] = ()
    """Names of its other GPUs, where not all are of the kind in `name`."""

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a plan, its speed and its bits to hold again."""
        values = asdict(self)
        values["versions"] = dict(self.versions)
        others = values.pop("unlike")
        values |= {"unlike": list(others)} if others else {}
        # Memory as the kernel reports it moves by a few pages from boot to boot.
        values["memory_bytes"] = round(self.memory_bytes / 2**30) * 2**30
        return values

    def digest(self) -> str:
        """The fingerprint in a few characters."""
        return sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()[:16]

    @staticmethod
    def from_fingerprint(values: Mapping[str, Any]) -> Machine:
        """The machine of a stored fingerprint."""
        pairs = {"versions": tuple(sorted(values["versions"].items())), "unlike": tuple(values.get("unlike", ()))}
        return Machine(**{**values, **pairs})


def this_host() -> Machine:
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
    """Versions of python, plait and the packages that a run's numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("plait", "torch", "numpy", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return tuple(sorted(found.items()))


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _cpu_quota()
    return max(1, min(cores, int(quota))) if quota else cores


def usable_memory_bytes() -> int:
    """Memory of the machine, cut by a container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        _number(Path(path)) for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    ]
    return min([total, *(limit for limit in limits if limit)])


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine that is free or only caches files, at most what a container's limit leaves; half of the
    machine's where this is unknown (not Linux)."""
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


def _cpu_quota() -> float | None:
    """Cores' worth of time that the control group grants (version 2, then version 1)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period) if quota != "max" else None
    except (OSError, ValueError):
        quota = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
        period = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
        return quota / period if quota and period else None


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value > 0 else None


def bare_name(name: str) -> str:
    """A name without the number that made it unique."""
    return re.sub(r" \(\d+\)$", "", name)


def numbered_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names numbered where one has come before: machines made from one image often share theirs."""
    before = [names[:at].count(name) for at, name in enumerate(names)]
    return tuple(f"{name} ({count + 1})" if count else name for name, count in zip(names, before, strict=True))
