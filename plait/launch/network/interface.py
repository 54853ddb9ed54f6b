"""Which network interface owns an address: gloo and NCCL are given interfaces, people choose addresses."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator

from plait.errors import PlaitError


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
        raise PlaitError(f"{address!r} is no IP address; {_choices()}") from None
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
        if found.address and (text := _text(found.address.contents)):
            yield found.name.decode(), text
        entry = found.next


def _text(address: _SocketAddress) -> str:
    data = bytes(address.data)
    if address.family == socket.AF_INET:  # port, address
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if address.family == socket.AF_INET6:  # port, flow, address
        text = socket.inet_ntop(socket.AF_INET6, data[6:22])
        return "" if ipaddress.ip_address(text).is_link_local else text
    return ""
