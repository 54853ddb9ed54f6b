"""What this machine says of the interface that a run's hosts meet on: size of packets, speed, RDMA, and what limits
it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of a network card that is up and can move memory without the processor (RDMA)."""

    name: str
    """As NCCL names it: device:port."""
    link: str
    """InfiniBand or Ethernet (RoCE)."""
    rate: str
    """As the driver says it, such as "200 Gb/sec (4X HDR)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """The interface, and what messages between GPUs would find; None where the machine does not say."""

    interface: str
    mtu: int | None = None
    """Bytes of the largest packet."""
    megabits: int | None = None
    """Speed of the link in Mb/s."""
    rdma: tuple[RdmaPort, ...] = ()
    lockable_bytes: int | None = None
    """How much memory this process may keep in place; None: as much as there is."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm."""
    has_gpus: bool = False
    is_ipv6: bool = False


def network_facts(interface: str, *, is_ipv6: bool = False, root: Path = _ROOT) -> NetworkFacts:
    """The facts of this machine, whose files are below `root`; never fails, and takes no time."""
    folder = root / "sys/class/net" / interface
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NetworkFacts(
        interface=interface,
        mtu=_number(folder / "mtu"),
        megabits=_number(folder / "speed"),
        rdma=tuple(_rdma_ports(root / "sys/class/infiniband")),
        lockable_bytes=None if soft == resource.RLIM_INFINITY else soft,
        shared_memory_bytes=_size(root / "dev/shm"),
        has_gpus=(root / "dev/nvidiactl").exists(),
        is_ipv6=is_ipv6,
    )


def _number(file: Path) -> int | None:
    """A positive number in a file; the kernel says -1, or nothing, of a speed that it does not know."""
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _rdma_ports(folder: Path) -> Iterator[RdmaPort]:
    for port in sorted(folder.glob("*/ports/*")) if folder.is_dir() else []:
        if "ACTIVE" in _text(port / "state"):
            name = f"{port.parents[1].name}:{port.name}"
            yield RdmaPort(name=name, link=_text(port / "link_layer") or "InfiniBand", rate=_text(port / "rate"))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _size(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
