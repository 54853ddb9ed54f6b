"""How many cores a process may use, and how much of each, where a control group limits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


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
