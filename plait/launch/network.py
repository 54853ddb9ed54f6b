"""The network interface on which a run's hosts meet: which one owns an address, what this machine says of it, and the
variables that gloo and NCCL get for it, with the reasons."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.errors import PlaitError
from plait.units import format_bytes


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """`struct ifaddrs` as far as we read it; see getifaddrs(3)."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)


def local_addresses() -> dict[str, str]:
    """This machine's addresses, each with its interface, in the kernel's order: IPv4 first, loopback included.

    IPv6 addresses of one link (fe80::…) are left out: without their scope they name no host.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        pairs = [(text, name) for name, text in _walk(first)]
    finally:
        libc.freeifaddrs(first)
    return dict(sorted(pairs, key=lambda pair: ":" in pair[0]))


def interface_of(address: str) -> str:
    """The interface that owns an address of this machine ("lo" for all of 127.0.0.0/8); PlaitError for any other."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        raise PlaitError(f"{address!r} is not an IP address; {_choices()}") from None
    if wanted.is_loopback:
        return "lo"
    known = local_addresses()
    if str(wanted) not in known:
        raise PlaitError(f"{address} is not an address of this machine; {_choices()}")
    return known[str(wanted)]


def _choices() -> str:
    outside = [text for text in local_addresses() if not ipaddress.ip_address(text).is_loopback]
    return f"choose {' or '.join(outside)}" if outside else "connect this machine to a network first"


def _walk(entry: ctypes._Pointer[_InterfaceAddress]) -> Iterator[tuple[str, str]]:
    while entry:
        found = entry.contents
        if found.address and (text := _address_text(found.address.contents)):
            yield found.name.decode(), text
        entry = found.next


def _address_text(address: _SocketAddress) -> str:
    data = bytes(address.data)
    if address.family == socket.AF_INET:  # port, address
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if address.family == socket.AF_INET6:  # port, flow, address
        text = socket.inet_ntop(socket.AF_INET6, data[6:22])
        return "" if ipaddress.ip_address(text).is_link_local else text
    return ""


_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of a network card that is up and supports RDMA."""

    name: str
    """NCCL's name, device:port."""
    link: str
    """InfiniBand or Ethernet (RoCE)."""
    rate: str
    """The driver's text, such as "200 Gb/sec (4X HDR)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """The interface, and the facts that matter to GPUs' communication; None for what the machine does not say."""

    interface: str
    mtu: int | None = None
    """Bytes of the largest packet."""
    megabits: int | None = None
    """Speed of the link in Mb/s."""
    rdma: tuple[RdmaPort, ...] = ()
    lockable_bytes: int | None = None
    """Memory that this process may lock; None: no limit."""
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
    """A positive number in a file; for an unknown speed the kernel gives -1, or nothing."""
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


FAST_MEGABITS = 100_000
"""At this speed and above, one TCP stream does not fill the link; NCCL's manual then advises four threads with four
sockets each."""
LOCKED_ENOUGH = 1 << 30
SHARED_MEMORY_ENOUGH = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkVariable:
    """A variable for ranks, unless the user has set it."""

    name: str
    value: str
    reason: str


def network_variables(facts: NetworkFacts, *, spans_hosts: bool) -> tuple[NetworkVariable, ...]:
    """The variables for the interface that owns a host's address in the run."""
    gloo = NetworkVariable(
        name="GLOO_SOCKET_IFNAME",
        value=facts.interface,
        reason="gloo (on CPUs) uses the interface on which the hosts met; its default is that of the host's name, "
        "which a container often lacks",
    )
    if not spans_hosts:  # within one machine NCCL needs no network
        return (gloo,)
    nccl = NetworkVariable(
        name="NCCL_SOCKET_IFNAME",
        value=f"={facts.interface}",
        reason='GPUs meet there, too; NCCL would take the first that it finds; "=" means this exact name, not a prefix',
    )
    return (gloo, nccl, *_of_family(facts), *_of_speed(facts))


def _of_family(facts: NetworkFacts) -> tuple[NetworkVariable, ...]:
    if not facts.is_ipv6:
        return ()
    reason = "the hosts met over IPv6; NCCL would take IPv4 if the interface has both"
    return (NetworkVariable(name="NCCL_SOCKET_FAMILY", value="AF_INET6", reason=reason),)


def _of_speed(facts: NetworkFacts) -> tuple[NetworkVariable, ...]:
    """Several streams if one does not fill the link, unless RDMA carries large messages."""
    if facts.rdma or facts.megabits is None or facts.megabits < FAST_MEGABITS:
        return ()
    reason = f"the link carries {facts.megabits // 1000} Gb/s, and one stream of TCP does not fill it; NCCL has one"
    return (
        NetworkVariable(name="NCCL_SOCKET_NTHREADS", value="4", reason=reason),
        NetworkVariable(name="NCCL_NSOCKS_PERTHREAD", value="4", reason="as many streams in each of these threads"),
    )


def network_lines(
    facts: NetworkFacts, environment: Mapping[str, str], *, address: str, lost_after_s: float
) -> list[str]:
    """Printed lines: the interface, each variable with its reason (or that the user's own value is kept), RDMA,
    possible obstacles, and when a host counts as lost."""
    size = f", packets of {facts.mtu:,} bytes at most (MTU)" if facts.mtu else ""
    speed = f", {facts.megabits / 1000:g} Gb/s" if facts.megabits else ""
    points = []
    for one in network_variables(facts, spans_hosts=True):
        if environment.get(one.name, one.value) == one.value:
            points.append(f"{one.name}={one.value}: {one.reason}")
        else:
            points.append(f"{one.name}={environment[one.name]} stays as you set it")
    points += _gpu_points(facts) if facts.has_gpus else []
    points.append(
        f"a host that says nothing for {lost_after_s:g} s is lost, and at once if its connection breaks; no "
        f"variable is needed for this"
    )
    return [f"network  {address} on {facts.interface}{size}{speed}", *(f"         · {point}" for point in points)]


def _gpu_points(facts: NetworkFacts) -> list[str]:
    points = []
    if facts.rdma:
        ports = ", ".join(f"{port.name} ({port.link}, {port.rate})" for port in facts.rdma)
        points.append(f"GPUs use RDMA through {ports}; NCCL finds it by itself")
    if facts.rdma and facts.lockable_bytes is not None and facts.lockable_bytes < LOCKED_ENOUGH:
        points.append(
            f"but this process may lock only {format_bytes(facts.lockable_bytes)} of memory, which is too little "
            f"for RDMA: ulimit -l unlimited, LimitMEMLOCK=infinity of a service, or in a pod the capability IPC_LOCK"
        )
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < SHARED_MEMORY_ENOUGH:
        points.append(
            f"/dev/shm has {format_bytes(facts.shared_memory_bytes)}, through which a machine's GPUs may communicate: "
            "give a container more, for example --shm-size=8g"
        )
    return points
